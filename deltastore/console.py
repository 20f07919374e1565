"""Output of commands: progress on stderr, tables, quantities, and the findings of a diagnosis."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from deltastore.base import Base
from deltastore.errors import PeraxisError

if TYPE_CHECKING:
    from deltastore.checkpoint import Checkpoint

# With the time of one update on top, no more than 10 s pass between two lines.
LINE_INTERVAL_S = 8.0


class _Lines(tqdm):  # type: ignore[type-arg]
    """A bar for logs: whole lines, `LINE_INTERVAL_S` apart over all bars of the process."""

    last_line_s: ClassVar[float] = time.monotonic()

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Print the bar's text if the interval since the last line of any bar has passed."""
        now = time.monotonic()
        if not self.disable and now - _Lines.last_line_s >= LINE_INTERVAL_S:
            _Lines.last_line_s = now
            self.fp.write(f"{self}\n")
            self.fp.flush()

    def close(self) -> None:
        """End the bar without tqdm's carriage return."""
        self.disable = True
        super().close()


def progress_bar(
    total: int, what: str, unit: str, enabled: bool, file: TextIO | io.TextIOBase | None = None
) -> tqdm[NoReturn]:
    """Show progress over `total` units on a file, standard error by default; use as a context manager."""
    file = file or sys.stderr
    return (tqdm if file.isatty() else _Lines)(
        total=total,
        desc=what,
        unit=unit,
        unit_scale=unit == "B",
        disable=not enabled,
        leave=False,
        # `_Lines` spaces its lines itself.
        mininterval=min(0.1, LINE_INTERVAL_S),
        file=file,
    )


def byte_progress(
    total: int, what: str, enabled: bool, file: TextIO | io.TextIOBase | None = None
) -> tqdm[NoReturn]:
    """Show progress over `total` bytes on a file, standard error by default; use as a context manager."""
    return progress_bar(total, what, "B", enabled, file)


def identify_base(checkpoint: Checkpoint, enabled: bool) -> Base:
    """Run `Base.of` with progress while the fingerprint is computed.

    Raises:
        CheckpointError: As `Base.of` does.
    """
    total = sum(stored.num_bytes for stored in checkpoint.tensors.values())
    with byte_progress(total, f"fingerprint of {checkpoint.path.name}", enabled) as bar:
        return Base.of(checkpoint, progress=bar.update)


def size_text(num_bytes: int) -> str:
    """Return bytes with three digits and an SI prefix, such as 1.23GB; fewer than 1000 as they are."""
    return f"{num_bytes}B" if num_bytes < 1000 else tqdm.format_sizeof(num_bytes, "B")


def rounded(value: float) -> float:
    """Round to six digits: further ones depend on the order of sums, which differs between machines."""
    return float(f"{value:.6g}")


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


State = Literal["ok", "note", "failed"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The outcome of one check; a failed one names the way out."""

    subject: str
    state: State
    message: str


def diagnose(subject: str, check: Callable[[], str]) -> Diagnosis:
    """Run a check that returns what it found; an error of Peraxis is a failure."""
    try:
        return Diagnosis(subject, "ok", check())
    except PeraxisError as error:
        return Diagnosis(subject, "failed", " ".join(str(error).split()))


def has_failed(diagnoses: Sequence[Diagnosis]) -> bool:
    return any(diagnosis.state == "failed" for diagnosis in diagnoses)


def print_diagnoses(diagnoses: Sequence[Diagnosis], as_json: bool) -> None:
    """Print one line per check, or one JSON document."""
    if as_json:
        document = {"ok": not has_failed(diagnoses), "checks": [asdict(each) for each in diagnoses]}
        print(json.dumps(document, indent=2))
        return
    width = max(len(each.subject) for each in diagnoses)
    for each in diagnoses:
        print(f"{each.state:<6}  {each.subject:<{width}}  {each.message}")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table with aligned columns, the first to the left and all others to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [_aligned(head, widths), _aligned(rule, widths), *(_aligned(row, widths) for row in rows)]
    return "\n".join(lines)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(row, widths, strict=True)
    cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
    return f"| {' | '.join(cells)} |"
