"""Answers of models as they come: deltas of chats, tokens of `/generate`, and what they add up to."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from client.http import ErrorFields, Reply, ServerRefused, UnexpectedReply, parsed
from deltastore.console import printable

if TYPE_CHECKING:
    import httpx

DONE = b"[DONE]"
# The least that gives a speed: fewer pieces of text, or pieces in less time, came in one packet and tell nothing of the
# server.
MIN_PIECES, MIN_MEASURED_S = 3, 0.05
VERSION = re.compile(r"[1-9][0-9]{0,8}")
# The base's id among the models; no variant may have the name.
BASE = "base"

D_co = TypeVar("D_co", covariant=True)


class ReceivedDelta(msgspec.Struct, frozen=True):
    """The text that a chunk adds to the answer, and to the thoughts before it."""

    content: str | None = None
    reasoning_content: str | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.content or self.reasoning_content)


class ReceivedMessage(ReceivedDelta, frozen=True):
    """A whole answer; calls are as OpenAI's API has them."""

    tool_calls: list[dict[str, Any]] = []


class ReceivedChoice(msgspec.Struct, frozen=True):
    """The part of a chunk that belongs to the one sequence that is asked for; `message` is set in a whole answer."""

    delta: ReceivedDelta = ReceivedDelta()
    message: ReceivedMessage = ReceivedMessage()
    finish_reason: str | None = None


class ReceivedUsage(msgspec.Struct, frozen=True):
    """The tokens of a whole answer."""

    prompt_tokens: int
    completion_tokens: int


class ReceivedChunk(Reply, frozen=True):
    """One event of a streamed answer, or a whole one; `error` is set if the answer failed after its first bytes."""

    choices: tuple[ReceivedChoice, ...] = ()
    usage: ReceivedUsage | None = None
    error: ErrorFields | None = None


class Received(Protocol[D_co]):
    """An answer that is made of the events of a stream."""

    is_whole: bool

    def sent(self) -> None:
        """Note that the call is made now."""

    def begin(self, reply: httpx.Response) -> None:
        """Take the head of the reply in."""

    def event(self, name: str, data: bytes) -> D_co | None:
        """Take an event in; return what it adds, or None if that is no text."""

    def broken_off(self) -> UnexpectedReply:
        """Return the error of a stream that ended early."""


@dataclass(slots=True)
class Answer:
    """An answer of a chat as far as it has come.

    Attributes:
        model: The variant, or ``base``.
        text: The answer.
        reasoning: The thoughts before it, where the chat template has any.
        tool_calls: Calls of functions, as OpenAI's API has them; not of streams.
        finish_reason: ``stop``, ``length``, ``tool_calls``, or None while the answer comes.
        version: The version that answered; None for the base.
        digest: Its digest, ``sha256:`` and 64 hex digits.
        usage: The number of tokens; None while the answer comes.
        document: The server's JSON of an answer that was not streamed, with all choices and log-probabilities.
    """

    model: str
    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    version: int | None = None
    digest: str | None = None
    usage: ReceivedUsage | None = None
    document: dict[str, Any] | None = field(default=None, repr=False)
    is_whole: bool = False
    # On the clock of `time.perf_counter`.
    sent_at: float = field(default_factory=time.perf_counter, repr=False)
    first_at: float | None = field(default=None, repr=False)
    last_at: float | None = field(default=None, repr=False)
    num_pieces: int = field(default=0, repr=False)

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the call to the first text or thought, as this client sees it."""
        return None if self.first_at is None else self.first_at - self.sent_at

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first over the time from the first piece to the last; None if that is too short."""
        if self.usage is None or self.first_at is None or self.last_at is None:
            return None
        elapsed_s = self.last_at - self.first_at
        if self.num_pieces < MIN_PIECES or elapsed_s < MIN_MEASURED_S:
            return None
        return (self.usage.completion_tokens - 1) / elapsed_s

    def as_json(self) -> dict[str, Any]:
        """Return the answer and its times as a JSON document."""
        return {
            "model": self.model,
            "text": self.text,
            "reasoning": self.reasoning,
            "finish_reason": self.finish_reason,
            "version": self.version,
            "digest": self.digest,
            "usage": None if self.usage is None else msgspec.to_builtins(self.usage),
            "first_token_s": self.first_token_s,
            "tokens_per_s": self.tokens_per_s,
        }

    def sent(self) -> None:
        self.sent_at = time.perf_counter()

    def begin(self, reply: httpx.Response) -> None:
        self.version, self.digest = _version_of(reply), reply.headers.get("x-peraxis-digest")

    def event(self, name: str, data: bytes) -> ReceivedDelta | None:
        if data == DONE:
            self.is_whole = True
            return None
        chunk = parsed(data, ReceivedChunk)
        if chunk.error is not None:
            raise _failed(chunk.error)
        delta = self.add(chunk)
        return delta if delta.has_text else None

    def broken_off(self) -> UnexpectedReply:
        return UnexpectedReply(f"the answer of {self.model} broke off: ask again")

    def add(self, chunk: ReceivedChunk) -> ReceivedDelta:
        """Take a chunk in; return what it adds."""
        self.usage = chunk.usage or self.usage
        if not chunk.choices:
            return ReceivedDelta()
        (choice,) = chunk.choices[:1]
        self.finish_reason = choice.finish_reason or self.finish_reason
        if choice.delta.has_text:
            self.last_at = time.perf_counter()
            self.first_at = self.first_at or self.last_at
            self.num_pieces += 1
            self.text += choice.delta.content or ""
            self.reasoning += choice.delta.reasoning_content or ""
        return choice.delta

    def fill(self, reply: httpx.Response) -> None:
        """Take a whole answer in, which was not streamed."""
        self.begin(reply)
        chunk = parsed(reply.content, ReceivedChunk)
        self.document, self.usage, self.is_whole = chunk.as_json(), chunk.usage, True
        for choice in chunk.choices[:1]:
            self.text, self.reasoning = choice.message.content or "", choice.message.reasoning_content or ""
            self.tool_calls, self.finish_reason = choice.message.tool_calls, choice.finish_reason


class GeneratedToken(msgspec.Struct, frozen=True):
    """One token of a stream of `/generate`.

    Attributes:
        index: The sequence, from 0 to `n` - 1.
        token_id: Its id.
        text: What it adds to the sequence's text; the rest of a character comes with a later token.
    """

    index: int
    token_id: int
    text: str


class FinishedSequence(msgspec.Struct, frozen=True):
    """The end of one sequence of a stream, with the text that its last tokens leave."""

    index: int
    finish_reason: str | None
    text: str = ""


class GeneratedSequence(msgspec.Struct):
    """One sequence that was generated, as far as it has come."""

    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None
    logprobs: list[dict[str, Any]] | None = None


class GeneratedReply(Reply, frozen=True):
    """The answer of `POST /generate`; the last event of a stream has no outputs."""

    usage: ReceivedUsage
    version: int | None = None
    digest: str | None = None
    outputs: tuple[GeneratedSequence, ...] = ()


@dataclass(slots=True)
class Generation:
    """The sequences of one call of `/generate` as far as they have come.

    Attributes:
        variant: As it was asked for; None is the base.
        outputs: One for each of the `n` sequences.
        version: The version that answered; None for the base, and while a stream comes.
        digest: Its digest, ``sha256:`` and 64 hex digits.
        usage: The number of tokens; None while a stream comes.
        document: The server's last JSON document.
    """

    variant: str | None
    outputs: list[GeneratedSequence] = field(default_factory=list)
    version: int | None = None
    digest: str | None = None
    usage: ReceivedUsage | None = None
    document: dict[str, Any] | None = field(default=None, repr=False)
    is_whole: bool = False

    @property
    def text(self) -> str:
        """The text of the first sequence."""
        return self.outputs[0].text if self.outputs else ""

    @property
    def token_ids(self) -> list[int]:
        """The token ids of the first sequence."""
        return self.outputs[0].token_ids if self.outputs else []

    def sent(self) -> None:
        """Times of a generation are in its `document`."""

    def begin(self, reply: httpx.Response) -> None:
        self.version, self.digest = _version_of(reply), reply.headers.get("x-peraxis-digest")

    def event(self, name: str, data: bytes) -> GeneratedToken | None:
        if name == "error":
            raise _failed(parsed(data, ReceivedChunk).error or ErrorFields("the answer failed: ask again"))
        if name == "done":
            self._end(parsed(data, GeneratedReply))
        elif name == "finish":
            end = parsed(data, FinishedSequence)
            sequence = self._sequence(end.index)
            sequence.text += end.text
            sequence.finish_reason = end.finish_reason
        elif name == "token":
            token = parsed(data, GeneratedToken)
            sequence = self._sequence(token.index)
            sequence.text += token.text
            sequence.token_ids.append(token.token_id)
            return token
        return None

    def broken_off(self) -> UnexpectedReply:
        return UnexpectedReply(f"the answer of {self.variant or BASE} broke off: ask again")

    def fill(self, reply: httpx.Response) -> None:
        """Take a whole answer in, which was not streamed."""
        found = parsed(reply.content, GeneratedReply)
        self.outputs = [*found.outputs]
        self._end(found)

    def _end(self, found: GeneratedReply) -> None:
        self.version, self.digest, self.usage = found.version, found.digest, found.usage
        self.document, self.is_whole = found.as_json(), True

    def _sequence(self, index: int) -> GeneratedSequence:
        # Such an index would take all memory.
        if not 0 <= index <= len(self.outputs) + MAX_SEQUENCES:
            raise self.broken_off()
        while len(self.outputs) <= index:
            self.outputs.append(GeneratedSequence())
        return self.outputs[index]


# The most sequences that a server makes of one prompt.
MAX_SEQUENCES = 128


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, bytes]]:
    """Yield the name and the data of each server-sent event."""
    # httpx would split lines at every line break of Unicode, which JSON strings may hold.
    rest, name = b"", ""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"event:"):
                name = line[6:].strip().decode("latin-1")
            elif line.startswith(b"data:"):
                yield name, line[5:].strip()
                name = ""


def messages_of(prompt: str | list[Mapping[str, Any]], system: str | None = None) -> list[Mapping[str, Any]]:
    """Return a conversation: a text is the user's one message."""
    first: list[Mapping[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    return [*first, *([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)]


def _failed(error: ErrorFields) -> ServerRefused:
    """Return the error of an answer that failed after its head, which said 200."""
    return ServerRefused(printable(error.message), 200, error.code)


def _version_of(reply: httpx.Response) -> int | None:
    version = reply.headers.get("x-peraxis-version", "")
    return int(version) if VERSION.fullmatch(version) else None
