"""`peraxis chat`: ask one variant or two, show the answers as they stream in, with times and their version.

Reads the server-sent events of `POST /v1/chat/completions`.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from client.http import ErrorFields, NoAnswer, ServerAddress, ServerRefused, UnexpectedReply, parsed
from client.options import Json, Wait, print_json, takes_address
from client.waiting import ServerWait
from deltastore.console import printable, short
from deltastore.errors import UsageError

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
    """The text that a chunk adds to the answer, and to the thoughts before it."""

    content: str | None = None
    reasoning_content: str | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.content or self.reasoning_content)


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
    reasoning: str = ""
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


async def stream(
    address: ServerAddress,
    body: Mapping[str, Any],
    answer: Answer,
    waiting: ServerWait,
    *,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> AsyncIterator[ReceivedDelta]:
    """Ask a server, fill `answer`, and yield its text and thoughts in pieces as they come.

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
                    if not is_done and (delta := answer.add(_checked(data, reply.status_code))).has_text:
                        yield delta
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


app = typer.Typer(no_args_is_help=True)

# Frames per second of answers side by side.
REFRESH_PER_S = 8


@app.command()
@takes_address()
def chat(
    address: ServerAddress,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME[@VERSION]", help="The variant, or 'base'.")
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option("--compare", metavar="A B", help="Instead of NAME: ask two variants at the same time."),
    ] = None,
    once: Annotated[
        str | None,
        typer.Option("--once", metavar="PROMPT", help="Ask this prompt, print the answer and end."),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="System message before the first prompt.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", help="Most tokens of an answer.", show_default="what fits", min=1),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            help="Temperature of sampling; 0 is greedy.",
            show_default="the variant's own",
            min=0,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed of sampling.", show_default="random", min=0)
    ] = None,
    wait_s: Wait = None,
    as_json: Json = False,
) -> None:
    """Talk to a variant, or to two side by side.

    Examples: peraxis chat instruct; peraxis chat instruct --once "Hello"; peraxis chat --compare instruct instruct@1

    Without --once, prompts are read line by line from a terminal (Ctrl-C ends an answer, Ctrl-D the chat); elsewhere,
    all of standard input is one prompt. A terminal shows what a model thinks before its answer, dimmed; elsewhere only
    the answer is printed. A server that is starting or busy is waited for.
    """
    if (name is None) == (compare is None):
        raise UsageError("give the NAME of a variant, or --compare and two names")
    is_interactive = once is None and sys.stdin.isatty()
    if as_json and is_interactive:
        raise UsageError("--json prints one document: give --once PROMPT, or a prompt on standard input")
    first = [] if system is None else [{"role": "system", "content": system}]
    models = compare or [str(name)]
    conversations = [ChatHistory(model, list(first)) for model in models]
    options = ChatOptions(max_tokens, temperature, seed)
    chat = Chat(address, conversations, options, ServerWait(address.url, wait_s), as_json)
    if not is_interactive:
        chat.ask(_piped_prompt() if once is None else once)
        return
    for prompt in _typed_prompts():
        try:
            chat.ask(prompt)
        except KeyboardInterrupt:
            print("\n[interrupted: the prompt is dropped]", file=sys.stderr)
        except (NoAnswer, ServerRefused, UnexpectedReply) as error:
            # The conversation goes on: a busy server may answer the next time.
            print(f"error: {error}", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class Chat:
    """The conversations that get the same prompts, and how their answers are shown."""

    address: ServerAddress
    conversations: Sequence[ChatHistory]
    options: ChatOptions
    waiting: ServerWait
    as_json: bool

    def ask(self, prompt: str) -> None:
        """Ask all variants at the same time, show the answers and keep them."""
        answers = [Answer(conversation.model) for conversation in self.conversations]
        self.waiting.restart()
        if self.as_json:
            asyncio.run(self._gather(prompt, answers))
            print_json({"answers": [answer.as_json() for answer in answers]})
        elif len(answers) == 1:
            asyncio.run(self._print(prompt, answers[0]))
        elif sys.stdout.isatty():
            self._compare(prompt, answers)
        else:
            asyncio.run(self._gather(prompt, answers))
            _print_whole(answers)
        for conversation, answer in zip(self.conversations, answers, strict=True):
            conversation.keep(prompt, answer.text)

    async def _print(self, prompt: str, answer: Answer) -> None:
        body = self.conversations[0].asking(prompt, self.options)
        # Elsewhere the answer alone is printed.
        shows_thoughts = sys.stdout.isatty()
        try:
            async for delta in stream(self.address, body, answer, self.waiting):
                if shows_thoughts and delta.reasoning_content:
                    _print_thought(delta.reasoning_content)
                if shows_thoughts and answer.reasoning and delta.content == answer.text:
                    print("\n")
                _print_piece(delta.content or "")
        finally:
            # An error is printed below what has come, not behind it.
            shown = answer.text or (answer.reasoning if shows_thoughts else "")
            if shown and not shown.endswith("\n"):
                print(flush=True)
        print(f"[{_facts(answer)}]", file=sys.stderr)

    def _compare(self, prompt: str, answers: Sequence[Answer]) -> None:
        with Live(
            get_renderable=lambda: _side_by_side(answers),
            refresh_per_second=REFRESH_PER_S,
            vertical_overflow="ellipsis",
        ):
            asyncio.run(self._gather(prompt, answers))

    async def _gather(self, prompt: str, answers: Sequence[Answer]) -> None:
        """Fill all answers. The first failure ends the others."""
        await asyncio.gather(
            *(
                self._fill(conversation, prompt, answer)
                for conversation, answer in zip(self.conversations, answers, strict=True)
            )
        )

    async def _fill(self, conversation: ChatHistory, prompt: str, answer: Answer) -> None:
        body = conversation.asking(prompt, self.options)
        async for _ in stream(self.address, body, answer, self.waiting):
            pass


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The parameters of every request; None leaves one to the variant."""

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None

    def fields(self) -> dict[str, Any]:
        given = {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(slots=True)
class ChatHistory:
    """The messages that were exchanged with one variant."""

    model: str
    messages: list[dict[str, str]] = field(default_factory=list)

    def asking(self, prompt: str, options: ChatOptions) -> dict[str, Any]:
        """Return the body of the request for an answer to `prompt`."""
        messages = [*self.messages, {"role": "user", "content": prompt}]
        return {"model": self.model, "messages": messages, **options.fields()}

    def keep(self, prompt: str, answer: str) -> None:
        """Add a prompt and its answer."""
        self.messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _piped_prompt() -> str:
    try:
        # What `echo` adds is no part of the prompt.
        prompt = sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError("standard input is no text in UTF-8: give the prompt in UTF-8") from error
    if not prompt.strip():
        raise UsageError("standard input is empty: give a prompt there, or --once PROMPT")
    return prompt


def _typed_prompts() -> Iterator[str]:
    """Yield the lines that are typed at a terminal, until Ctrl-D."""
    # Lets input() edit lines.
    import readline  # noqa: F401

    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        if line.strip():
            yield line


def _visible(text: str) -> str:
    """Return a model's text without the control characters with which it could command a terminal."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")


def _facts(answer: Answer) -> str:
    """Return one line: the time to the first token, the speed, the version and the digest."""
    parts = []
    if answer.first_token_s is not None:
        parts.append(f"first token {answer.first_token_s:.2f} s")
    if answer.tokens_per_s is not None:
        parts.append(f"{answer.tokens_per_s:.1f} tokens/s")
    if answer.version is not None:
        parts.append(f"version {answer.version}")
    if answer.digest is not None:
        parts.append(f"digest {short(printable(answer.digest))}")
    if answer.finish_reason not in (None, "stop"):
        parts.append(f"ended by {printable(str(answer.finish_reason))}")
    return ", ".join(parts)


def _print_piece(text: str) -> None:
    """Print a piece of the one answer that is streamed; on a terminal without control characters."""
    print(_visible(text) if sys.stdout.isatty() else text, end="", flush=True)


def _print_thought(text: str) -> None:
    """Print a piece of what a model thinks before its answer, dimmed, on a terminal."""
    Console(soft_wrap=True).print(Text(_visible(text), style="dim"), end="")


def _print_whole(answers: Sequence[Answer]) -> None:
    """Print answers below each other, each with its facts."""
    for answer in answers:
        text = _visible(answer.text) if sys.stdout.isatty() else answer.text
        print(f"== {answer.model}: {_facts(answer)}\n{text}")


def _side_by_side(answers: Sequence[Answer]) -> Table:
    """Return the answers as columns, in their present state: thoughts until there is text."""
    table = Table(expand=True, show_lines=False)
    for answer in answers:
        table.add_column(Text(answer.model), ratio=1, overflow="fold")
    table.add_row(*map(_present, answers), end_section=True)
    table.add_row(*(Text(_facts(answer), style="dim") for answer in answers))
    return table


def _present(answer: Answer) -> Text:
    return Text(_visible(answer.text)) if answer.text else Text(_visible(answer.reasoning), style="dim")
