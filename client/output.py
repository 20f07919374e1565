"""Print results on stdout: tables, JSON documents, and text of servers without its control characters."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

# Wider than any table, so that lines are never folded off a terminal.
UNBOUNDED = 100_000


def print_json(document: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(document, indent=2))


def print_reply(content: bytes) -> None:
    """Print the JSON body of an answer. It has been parsed before, so it is valid."""
    print_json(json.loads(content))


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
    """Return a server's text on one line and without control characters, which could command a terminal."""
    return "".join(filter(str.isprintable, " ".join(text.split())))


def size(num_bytes: int) -> str:
    """Format bytes with a decimal unit, as in ``1.01GB``."""
    return tqdm.format_sizeof(num_bytes, "B")


def short(digest: str) -> str:
    """Return the first 12 characters of a digest, as `system_fingerprint` has them."""
    return digest.removeprefix("sha256:")[:12]
