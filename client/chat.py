"""`peraxis chat`: ask one variant or two, show the answers as they stream in, with times and their version."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from client.answers import Answer, ReceivedDelta
from client.calls import AsyncStream
from client.client import AsyncClient
from client.http import NoAnswer, ServerAddress, ServerRefused, UnexpectedReply
from client.options import SHARED_FLAGS, Json, Wait, print_json, print_line, takes_address
from deltastore.console import naming_flags, printable, short
from deltastore.errors import UsageError

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
    chat = Chat(address, conversations, options, wait_s, as_json)
    if not is_interactive:
        chat.ask(_piped_prompt() if once is None else once)
        return
    for prompt in _typed_prompts():
        try:
            with naming_flags(SHARED_FLAGS):
                chat.ask(prompt)
        except KeyboardInterrupt:
            print("\n[interrupted: the prompt is dropped]", file=sys.stderr)
        except (NoAnswer, ServerRefused, UnexpectedReply) as error:
            # The conversation goes on: a busy server may answer the next time.
            print(f"error: {error}", file=sys.stderr)


@dataclass(slots=True)
class Chat:
    """The conversations that get the same prompts, and how their answers are shown."""

    address: ServerAddress
    conversations: Sequence[ChatHistory]
    options: ChatOptions
    wait_s: int | None
    as_json: bool
    answers: Sequence[Answer] = ()  # to the last prompt

    def ask(self, prompt: str) -> None:
        """Ask all variants at the same time, show the answers and keep them."""
        if self.as_json:
            asyncio.run(self._gather(prompt))
            print_json({"answers": [answer.as_json() for answer in self.answers]})
        elif len(self.conversations) == 1:
            asyncio.run(self._print(prompt))
        elif sys.stdout.isatty():
            self._compare(prompt)
        else:
            asyncio.run(self._gather(prompt))
            _print_whole(self.answers)
        for conversation, answer in zip(self.conversations, self.answers, strict=True):
            conversation.keep(prompt, answer.text)

    def _client(self) -> AsyncClient:
        return AsyncClient.at(self.address, self.wait_s, print_line)

    def _begin(self, client: AsyncClient, prompt: str) -> list[AsyncStream[Answer, ReceivedDelta]]:
        streams = [conversation.ask(client, prompt, self.options) for conversation in self.conversations]
        self.answers = [stream.answer for stream in streams]
        return streams

    async def _print(self, prompt: str) -> None:
        # Elsewhere the answer alone is printed.
        shows_thoughts = sys.stdout.isatty()
        async with self._client() as client:
            (stream,) = self._begin(client, prompt)
            answer = stream.answer
            try:
                async for delta in stream:
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

    def _compare(self, prompt: str) -> None:
        with Live(
            get_renderable=lambda: _side_by_side(self.answers),
            refresh_per_second=REFRESH_PER_S,
            vertical_overflow="ellipsis",
        ):
            asyncio.run(self._gather(prompt))

    async def _gather(self, prompt: str) -> None:
        """Fill all answers. The first failure ends the others."""
        async with self._client() as client:
            await asyncio.gather(*map(_read, self._begin(client, prompt)))


async def _read(stream: AsyncStream[Answer, ReceivedDelta]) -> None:
    async for _ in stream:
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

    def ask(
        self, client: AsyncClient, prompt: str, options: ChatOptions
    ) -> AsyncStream[Answer, ReceivedDelta]:
        """Return the stream of an answer to `prompt`."""
        messages: list[Mapping[str, Any]] = [*self.messages, {"role": "user", "content": prompt}]
        return client.stream_chat(self.model, messages, **options.fields())

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
