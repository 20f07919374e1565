"""Tables that commands print on stdout, and the forms of values in their cells."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

# Wider than any table, so that lines are never folded off a terminal.
UNBOUNDED = 100_000


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns, coloured and within the width of a terminal, else plain lines."""
    is_terminal = sys.stdout.isatty()
    console = Console(width=None if is_terminal else UNBOUNDED, highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in head:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def printable(text: str) -> str:
    """Return text of others on one line and without control characters, which could command a terminal."""
    return "".join(filter(str.isprintable, " ".join(text.split())))


def short(digest: str) -> str:
    """Return the first 12 characters of a digest, as `system_fingerprint` has them."""
    return digest.removeprefix("sha256:")[:12]


def to_second(moment: str) -> str:
    """Return an ISO 8601 time without its fraction and its zone."""
    return moment[:19]


def mark(is_set: bool, word: str) -> str:
    """Return the word if it applies to the row, else ``-``."""
    # Columns must not be empty, or tools that split lines at spaces would shift those behind.
    return word if is_set else "-"
