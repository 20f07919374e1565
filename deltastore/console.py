"""Output of commands: progress on stderr, tables, quantities, the findings of a diagnosis, and flags in errors."""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column, Table
from rich.text import Text

from deltastore.base import Base
from deltastore.errors import PeraxisError

if TYPE_CHECKING:
    from deltastore.checkpoint import Checkpoint

# With the time of one update on top, no more than 10 s pass between two lines.
LINE_INTERVAL_S = 8.0
# Between two drawings of a notebook's bar.
REDRAW_INTERVAL_S = 0.2
# Long enough to hold several of the slowest units, which are blocks of a model that is fitted.
SPEED_PERIOD_S = 900


class ProgressBar:
    """Progress over `total` units; use as a context manager.

    On a terminal it is a bar that vanishes at its end, and in a notebook one that stays. In a log it is whole lines
    without control characters, `LINE_INTERVAL_S` apart over all bars of the process.
    """

    _last_line_s: ClassVar[float] = time.monotonic()

    def __init__(self, total: int, what: str, unit: str, enabled: bool, file: TextIO | io.TextIOBase) -> None:
        self._file = file
        # Said here, because rich would take a log for a terminal where FORCE_COLOR is set, as it is in some CIs.
        console = Console(file=cast(TextIO, file), force_terminal=file.isatty(), force_jupyter=False)
        self._progress = Progress(
            # Names of files are no markup.
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            _Figures(unit),
            console=console,
            speed_estimate_period=SPEED_PERIOD_S,
            transient=True,
            # Results go to standard output, and stay there.
            redirect_stdout=False,
        )
        self._task = self._progress.add_task(printable(what), total=total)
        self._unit = unit
        self._notebook = _display() if enabled and file is sys.stderr else None
        self._is_bar = enabled and console.is_interactive and self._notebook is None
        self._is_lines = enabled and not console.is_interactive and self._notebook is None
        self._shown: Any = None
        self._shown_s = 0.0

    def update(self, amount: int = 1) -> None:
        """Count `amount` further units."""
        self._progress.advance(self._task, amount)
        self._print_line()
        self._show()

    def __enter__(self) -> Self:
        if self._is_bar:
            self._progress.start()
        self._print_line()
        self._show()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_bar:
            self._progress.stop()
        self._show(is_last=True)

    def _show(self, *, is_last: bool = False) -> None:
        """Draw the bar of a notebook, a few times a second and at its end."""
        now = time.monotonic()
        if self._notebook is None or (not is_last and now - self._shown_s < REDRAW_INTERVAL_S):
            return
        self._shown_s = now
        (task,) = self._progress.tasks
        line = f"{task.description}: {_figures(task, self._unit)}"
        share = f'value="{task.completed}" max="{max(task.total or 0, 1)}"'
        data = {"text/plain": line, "text/html": f"<progress {share}></progress> {escape(line)}"}
        if self._shown is None:
            self._shown = self._notebook(data, raw=True, display_id=True)
        else:
            self._shown.update(data, raw=True)

    def _print_line(self) -> None:
        """Write a line to a log if the interval since the last line of any bar has passed."""
        now = time.monotonic()
        if self._is_lines and now - ProgressBar._last_line_s >= LINE_INTERVAL_S:
            ProgressBar._last_line_s = now
            (task,) = self._progress.tasks
            self._file.write(f"{task.description}: {_figures(task, self._unit)}\n")
            self._file.flush()


def _display() -> Callable[..., Any] | None:
    """Return IPython's `display` in a notebook; None elsewhere. rich's own bars there need ipywidgets."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    # Only a shell with a kernel has a front end that shows HTML.
    if getattr(shell, "kernel", None) is None:
        return None
    display: Callable[..., Any] = import_module("IPython.display").display
    return display


class _Figures(ProgressColumn):
    """The figures of a bar, in the words of a line."""

    def __init__(self, unit: str) -> None:
        super().__init__(Column(no_wrap=True))
        self._unit = unit

    def render(self, task: Task) -> Text:
        return Text(_figures(task, self._unit))


def _figures(task: Task, unit: str) -> str:
    """Return text such as ``50%, 3 of 6 blocks, 0:01:05 left``."""
    done, total = int(task.completed), int(task.total or 0)
    amounts = f"{size_text(done)} of {size_text(total)}" if unit == "B" else f"{done} of {total} {unit}s"
    parts = [f"{task.percentage:.0f}%", amounts]
    if unit == "B" and (speed := task.speed):
        parts.append(f"{size_text(int(speed))}/s")
    if (left_s := task.time_remaining) is not None:
        parts.append(f"{timedelta(seconds=int(left_s))} left")
    return ", ".join(parts)


def progress_bar(
    total: int, what: str, unit: str, enabled: bool, file: TextIO | io.TextIOBase | None = None
) -> ProgressBar:
    """Show progress over `total` units on a file, standard error by default; use as a context manager."""
    return ProgressBar(total, what, unit, enabled, file or sys.stderr)


def byte_progress(
    total: int, what: str, enabled: bool, file: TextIO | io.TextIOBase | None = None
) -> ProgressBar:
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
    if num_bytes < 1000:
        return f"{num_bytes}B"
    size, prefixes = num_bytes / 1000, iter("kMGTPEZY")
    prefix = next(prefixes)
    # From here on the digits would be rounded up to 1000.
    while size >= 999.5:
        size, prefix = size / 1000, next(prefixes)
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:.{digits}f}{prefix}B"


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


# An argument in an error of a library function, as `name` or `name=value`.
ARGUMENT = re.compile(r"`(\w+)(?:=([^`]*))?`")


def flag_of(argument: str) -> str:
    """Return the flag of an argument that has its name."""
    return f"--{argument.replace('_', '-')}"


@contextmanager
def naming_flags(flags: Mapping[str, str]) -> Iterator[None]:
    """Name flags in errors of the block, where library functions name arguments, and print the notes of errors.

    Args:
        flags: the flags of a command by argument.
    """
    try:
        yield
    except BaseException as error:
        for note in getattr(error, "__notes__", ()):
            print(with_flags(note, flags), file=sys.stderr)
        if isinstance(error, PeraxisError):
            error.args = (with_flags(str(error), flags),)
        raise


def with_flags(message: str, flags: Mapping[str, str]) -> str:
    """Replace each of a command's arguments that stands in backticks by its flag."""

    def flag(found: re.Match[str]) -> str:
        name, value = found.groups()
        if name not in flags:
            return found[0]
        if value is None or value == "True":
            return flags[name]
        if value == "False":
            return f"--no-{flags[name][2:]}"
        with suppress(ValueError, SyntaxError):
            value = ast.literal_eval(value)
        return f"{flags[name]} {value}"

    return ARGUMENT.sub(flag, message)
