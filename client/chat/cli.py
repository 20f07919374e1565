"""`peraxis chat`: parse the options, read prompts, ask one variant or two, show the answers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.live import Live

from client.chat.answer import Answer, stream
from client.chat.history import ChatHistory, ChatOptions
from client.chat.screen import print_end, print_piece, print_whole, side_by_side
from client.errors import NoAnswer, ServerRefused, UnexpectedReply
from client.http import ServerAddress
from client.options import Json, takes_address
from client.output import print_json
from deltastore.errors import UsageError

app = typer.Typer(no_args_is_help=True)

# Frames per second of answers side by side.
REFRESH_PER_S = 8


@dataclass(frozen=True, slots=True)
class Chat:
    """The conversations that get the same prompts, and how their answers are shown."""

    address: ServerAddress
    conversations: Sequence[ChatHistory]
    options: ChatOptions
    as_json: bool

    def ask(self, prompt: str) -> None:
        """Ask all variants at the same time, show the answers and keep them."""
        answers = [Answer(conversation.model) for conversation in self.conversations]
        if self.as_json:
            asyncio.run(self._gather(prompt, answers))
            print_json({"answers": [answer.as_json() for answer in answers]})
        elif len(answers) == 1:
            asyncio.run(self._print(prompt, answers[0]))
        elif sys.stdout.isatty():
            self._compare(prompt, answers)
        else:
            asyncio.run(self._gather(prompt, answers))
            print_whole(answers)
        for conversation, answer in zip(self.conversations, answers, strict=True):
            conversation.keep(prompt, answer.text)

    async def _print(self, prompt: str, answer: Answer) -> None:
        body = self.conversations[0].asking(prompt, self.options)
        async for text in stream(self.address, body, answer):
            print_piece(text)
        print_end(answer)

    def _compare(self, prompt: str, answers: Sequence[Answer]) -> None:
        with Live(
            get_renderable=lambda: side_by_side(answers),
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
        async for _ in stream(self.address, conversation.asking(prompt, self.options), answer):
            pass


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
    once: Annotated[str | None, typer.Option("--once", metavar="PROMPT", help="Ask this and end.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Tokens of an answer.", min=1)
    ] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 is greedy.", min=0)] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of sampling.", min=0)] = None,
    as_json: Json = False,
) -> None:
    """Talk to a variant, or to two side by side.

    Examples: peraxis chat instruct; peraxis chat instruct --once "Hello"; peraxis chat --compare instruct instruct@1

    Without --once, prompts are read line by line from a terminal (Ctrl-C ends an answer, Ctrl-D the chat); elsewhere,
    all of standard input is one prompt.
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
    chat = Chat(address, conversations, options, as_json)
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
