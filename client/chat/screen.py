"""Show answers: text as it comes, or two variants side by side on a terminal. Knows no HTTP."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from client.chat.answer import Answer
from deltastore.tables import printable, short


def visible(text: str) -> str:
    """Return a model's text without the control characters with which it could command a terminal."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")


def facts(answer: Answer) -> str:
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


def print_piece(text: str) -> None:
    """Print a piece of the one answer that is streamed; on a terminal without control characters."""
    print(visible(text) if sys.stdout.isatty() else text, end="", flush=True)


def print_end(answer: Answer) -> None:
    """End the text of a streamed answer, and print its facts on stderr."""
    if not answer.text.endswith("\n"):
        print()
    print(f"[{facts(answer)}]", file=sys.stderr)


def print_whole(answers: Sequence[Answer]) -> None:
    """Print answers below each other, each with its facts."""
    for answer in answers:
        text = visible(answer.text) if sys.stdout.isatty() else answer.text
        print(f"== {answer.model}: {facts(answer)}\n{text}")


def side_by_side(answers: Sequence[Answer]) -> Table:
    """Return the answers as columns, in their present state."""
    table = Table(expand=True, show_lines=False)
    for answer in answers:
        table.add_column(Text(answer.model), ratio=1, overflow="fold")
    table.add_row(*(Text(visible(answer.text)) for answer in answers), end_section=True)
    table.add_row(*(Text(facts(answer), style="dim") for answer in answers))
    return table
