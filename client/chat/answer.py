"""One answer of a variant as it streams in: its text, its times and the version that gave it.

Reads the server-sent events of `POST /v1/chat/completions`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from client.errors import NoAnswer, ServerRefused, UnexpectedReply
from client.http import ErrorFields, ServerAddress, parsed
from client.waiting import ServerWait
from deltastore.tables import printable

# For types alone: `stream` imports it, and `--help` needs none of it.
if TYPE_CHECKING:
    import httpx

# Longest silence between two pieces of an answer, in seconds; a variant may have to be loaded before the first.
SILENCE_S = 300.0
PATH = "/v1/chat/completions"
DONE = b"[DONE]"
BAD_REQUEST = 400
# The least that gives a speed: fewer pieces of text, or pieces in less time, came in one packet and tell nothing of the
# server.
MIN_PIECES, MIN_MEASURED_S = 3, 0.05
VERSION = re.compile(r"[1-9][0-9]{0,8}")


class ReceivedDelta(msgspec.Struct, frozen=True):
    """The text that a chunk adds to the answer."""

    content: str | None = None


class ReceivedChoice(msgspec.Struct, frozen=True):
    """The part of a chunk that belongs to the one sequence that is asked for."""

    delta: ReceivedDelta = ReceivedDelta()
    finish_reason: str | None = None


class ReceivedUsage(msgspec.Struct, frozen=True):
    """The tokens of a whole answer."""

    prompt_tokens: int
    completion_tokens: int


class ReceivedChunk(msgspec.Struct, frozen=True):
    """One event of a streamed answer; `error` is set if the answer failed after its first bytes."""

    choices: tuple[ReceivedChoice, ...] = ()
    usage: ReceivedUsage | None = None
    error: ErrorFields | None = None


@dataclass(slots=True)
class Answer:
    """An answer as far as it has come."""

    model: str
    text: str = ""
    finish_reason: str | None = None
    version: int | None = None  # None for the base
    digest: str | None = None
    usage: ReceivedUsage | None = None
    # On the clock of `time.perf_counter`.
    sent_at: float = field(default_factory=time.perf_counter)
    first_at: float | None = None
    last_at: float | None = None
    num_pieces: int = 0

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the call to the first text, as this client sees it."""
        return None if self.first_at is None else self.first_at - self.sent_at

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first over the time from the first text to the last; None if that is too short."""
        if self.usage is None or self.first_at is None or self.last_at is None:
            return None
        elapsed_s = self.last_at - self.first_at
        if self.num_pieces < MIN_PIECES or elapsed_s < MIN_MEASURED_S:
            return None
        return (self.usage.completion_tokens - 1) / elapsed_s

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "version": self.version,
            "digest": self.digest,
            "usage": None if self.usage is None else msgspec.to_builtins(self.usage),
            "first_token_s": self.first_token_s,
            "tokens_per_s": self.tokens_per_s,
        }

    def add(self, chunk: ReceivedChunk) -> str:
        """Take a chunk in; return the text that it adds."""
        self.usage = chunk.usage or self.usage
        if not chunk.choices:
            return ""
        (choice,) = chunk.choices[:1]
        self.finish_reason = choice.finish_reason or self.finish_reason
        text = choice.delta.content or ""
        if text:
            self.last_at = time.perf_counter()
            self.first_at = self.first_at or self.last_at
            self.num_pieces += 1
            self.text += text
        return text


async def stream(
    address: ServerAddress,
    body: Mapping[str, Any],
    answer: Answer,
    waiting: ServerWait,
    *,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> AsyncIterator[str]:
    """Ask a server, fill `answer`, and yield its text in pieces as they come.

    A call that found no server, or one that takes no calls, is made again until `waiting` ends. An answer that has
    begun is not asked for again.

    Args:
        address: The server.
        body: The fields of the request; those that make it stream are added.
        answer: An answer without text, of the variant that `body` names.
        waiting: How long the server is waited for.
        sleep: Waits so many seconds.

    Raises:
        NoAnswer, ServerRefused: The call failed, or the answer broke off.
        UnexpectedReply: It is no answer of OpenAI's API.
    """
    import httpx

    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    is_done = False
    async with httpx.AsyncClient(**address.client_options(SILENCE_S)) as client:
        while True:
            answer.sent_at = time.perf_counter()
            try:
                reply = await _begun(address, client, streamed)
                break
            except (NoAnswer, ServerRefused) as error:
                pause_s = waiting.next_pause_s(error)
            await sleep(pause_s)
        waiting.answered()
        answer.version = _version_of(reply)
        answer.digest = reply.headers.get("x-peraxis-digest")
        with address.reached():
            async with aclosing(reply):
                async for data in _events(reply):
                    is_done = data == DONE
                    if not is_done and (text := answer.add(_checked(data, reply.status_code))):
                        yield text
    if not is_done:
        raise UnexpectedReply(f"the answer of {answer.model} broke off: ask again")


async def _begun(
    address: ServerAddress, client: httpx.AsyncClient, body: Mapping[str, Any]
) -> httpx.Response:
    """Make the call; return its answer, whose body has not been read and which the caller closes."""
    with address.reached():
        reply = await client.send(client.build_request("POST", PATH, json=body), stream=True)
        if reply.is_success:
            return reply
        async with aclosing(reply):
            await reply.aread()
    refused = address.refusal(reply)
    if refused.status == BAD_REQUEST:
        # The server's messages of wrong requests do not name the model.
        refused = ServerRefused(f"{body['model']}: {refused}", refused.status, refused.code)
    raise refused


def _checked(data: bytes, status: int) -> ReceivedChunk:
    chunk = parsed(data, ReceivedChunk)
    if chunk.error is not None:
        raise ServerRefused(printable(chunk.error.message), status, chunk.error.code)
    return chunk


def _version_of(reply: httpx.Response) -> int | None:
    version = reply.headers.get("x-peraxis-version", "")
    return int(version) if VERSION.fullmatch(version) else None


async def _events(reply: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event."""
    # httpx would split lines at every line break of Unicode, which JSON strings may hold.
    rest = b""
    async for piece in reply.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
