"""`peraxis chat`: parse the options, read prompts, ask one variant or two, show the answers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from client.chat.answer import Answer, stream
from client.errors import NoAnswer, ServerRefused, UnexpectedReply
from client.http import ServerAddress
from client.options import Json, Wait, print_json, takes_address
from client.waiting import ServerWait
from deltastore.errors import UsageError
from deltastore.tables import printable, short

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
    all of standard input is one prompt. A server that is starting or busy is waited for.
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
        try:
            async for text in stream(self.address, body, answer, self.waiting):
                _print_piece(text)
        finally:
            # An error is printed below what has come, not behind it.
            if answer.text and not answer.text.endswith("\n"):
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
        prompt = sys.stdin.read()
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


def _print_whole(answers: Sequence[Answer]) -> None:
    """Print answers below each other, each with its facts."""
    for answer in answers:
        text = _visible(answer.text) if sys.stdout.isatty() else answer.text
        print(f"== {answer.model}: {_facts(answer)}\n{text}")


def _side_by_side(answers: Sequence[Answer]) -> Table:
    """Return the answers as columns, in their present state."""
    table = Table(expand=True, show_lines=False)
    for answer in answers:
        table.add_column(Text(answer.model), ratio=1, overflow="fold")
    table.add_row(*(Text(_visible(answer.text)) for answer in answers), end_section=True)
    table.add_row(*(Text(_facts(answer), style="dim") for answer in answers))
    return table
