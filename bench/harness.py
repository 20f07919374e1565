"""One harness of all benches: options, goals, tables, and results with the machine, the versions and the date.

A bench sets up, measures, and returns a `Report`. A result names no host, no user and no path, so that it can be
published as it is.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch

from deltastore.console import table

RESULTS = Path(__file__).parent / "results"
# Those that decide how fast products of matrices are, slow ones first.
INSTRUCTIONS = ("avx2", "asimd", "avx512f", "sve", "avx512_bf16", "bf16", "amx_bf16")
LIBRARIES = ("torch", "transformers", "safetensors", "numpy", "numba", "triton")
CPU = torch.device("cpu")
BEST_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Option = tuple[str, dict[str, Any]]
Row = Mapping[str, Any]
# The head of each column, and the cell of a row in it.
Columns = Mapping[str, Callable[[Any], object]]


def option(flag: str, default: Any = None, help: str | None = None, **how: Any) -> Option:
    """Describe an option of a bench.

    Args:
        how: what `ArgumentParser.add_argument` takes besides; `type` is by default that of `default`. With
            `instead_of_small=True` the option excludes `--small`.
    """
    if default is False:
        how["action"] = "store_true"
    elif default is not None:
        how.setdefault("type", type(default))
    return flag, {"default": default, "help": help, **how}


THREADS = option("--threads", min(16, len(os.sched_getaffinity(0))))
DEVICE = option("--device", BEST_DEVICE.type)


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure and its limit.

    Args:
        reached: None where it was not measured.
        of: the subject, where several have the same goal; the table has a column for each.
    """

    name: str
    reached: float | None
    limit: float
    at_least: bool = False
    of: str = ""

    @property
    def side(self) -> str:
        return f"at {'least' if self.at_least else 'most'} {_short(self.limit)}"

    @property
    def is_met(self) -> bool | None:
        """None if it was not measured."""
        if self.reached is None:
            return None
        return self.reached >= self.limit if self.at_least else self.reached <= self.limit

    def as_json(self) -> dict[str, Any]:
        reached = None if self.reached is None else round(self.reached, 4)
        of = {"of": self.of} if self.of else {}
        return {"goal": self.name, **of, "limit": self.side, "reached": reached, "met": self.is_met}


def at_most(name: str, reached: float | None, limit: float, of: str = "") -> Goal:
    """Return a goal that a figure up to its limit meets."""
    return Goal(name, reached, limit, of=of)


def at_least(name: str, reached: float | None, limit: float, of: str = "") -> Goal:
    """Return a goal that a figure from its limit on meets."""
    return Goal(name, reached, limit, at_least=True, of=of)


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of a run, and how they are shown.

    Args:
        settings: sizes and conditions, for the JSON document.
        results: figures, for the JSON document.
        parts: tables in Markdown and sentences; goals follow them.
        conditions: follow the machine in the first line.
        libraries: whose versions the document has besides `LIBRARIES`.
        is_failed: the command ends with 1.
    """

    settings: Mapping[str, Any]
    results: Any
    parts: Sequence[str]
    goals: Sequence[Goal] = ()
    conditions: str = ""
    device: torch.device = CPU
    libraries: Sequence[str] = ()
    is_failed: bool = False

    def text(self) -> str:
        head = "; ".join(filter(None, (describe(self.device), self.conditions)))
        return "\n\n".join([head, *self.parts, *([goal_table(self.goals)] if self.goals else [])])

    def publish(self, bench: str, out: Path | None) -> None:
        """Print the report, and write the JSON document with the machine, the versions and the date."""
        print(self.text())
        if out is None:
            return
        document = {
            "bench": bench,
            "date": datetime.now(UTC).date().isoformat(),
            "machine": machine(self.device),
            "versions": versions(*self.libraries),
            "settings": self.settings,
            "results": self.results,
            "goals": [goal.as_json() for goal in self.goals],
        }
        out.write_text(json.dumps(document, indent=2) + "\n")


@dataclass(frozen=True, slots=True)
class Bench:
    """The command `python -m bench.NAME`: parses its options, measures, prints the report and writes the JSON.

    Args:
        doc: the module's docstring, which `--help` prints.
        measure: called with the parsed options; None is a run that has printed what there was to say. `out` is the
            path of the document or None, and with `folder` a temporary directory is `directory`.
        small: the help of `--small`, whose figures are written to `--out` alone; None for a bench without.
        folder: the help of `--dir`, in which the temporary directory is made; None for a bench without.
        file: names the document in bench/results; None from it writes none. NAME.json by default.
    """

    name: str
    doc: str | None
    measure: Callable[[Namespace], Report | None]
    options: Sequence[Option] = ()
    small: str | None = None
    folder: str | None = None
    file: Callable[[Namespace], str | None] | None = None

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Run the command; return its exit code."""
        args = self._parsed(argv)
        if self.folder is None:
            report = self.measure(args)
        else:
            with tempfile.TemporaryDirectory(dir=args.dir) as name:
                args.directory = Path(name)
                report = self.measure(args)
        if report is None:
            return 0
        report.publish(self.name, args.out)
        return int(report.is_failed)

    def _parsed(self, argv: Sequence[str] | None) -> Namespace:
        parser = ArgumentParser(prog=f"python -m bench.{self.name}", description=self.doc)
        sizes: Any = parser
        if self.small is not None:
            sizes = parser.add_mutually_exclusive_group()
            sizes.add_argument(
                "--small", action="store_true", help=f"{self.small}; writes JSON only with --out"
            )
        for flag, how in self.options:
            instead_of_small = how.get("instead_of_small", False)
            how = {key: value for key, value in how.items() if key != "instead_of_small"}
            (sizes if instead_of_small else parser).add_argument(flag, **how)
        if self.folder is not None:
            parser.add_argument("--dir", type=Path, help=self.folder)
        parser.add_argument("--out", type=Path, help="the JSON file; by default one in bench/results")
        args = parser.parse_args(argv)
        if args.out is None and not getattr(args, "small", False):
            name = f"{self.name}.json" if self.file is None else self.file(args)
            args.out = None if name is None else RESULTS / name
        return args


def goal_table(goals: Sequence[Goal]) -> str:
    """Return a row per goal, with its limit, what each subject reached, and the verdict."""
    subjects = list(dict.fromkeys(goal.of for goal in goals))
    alike: dict[tuple[str, str], dict[str, Goal]] = {}
    for goal in goals:
        alike.setdefault((goal.name, goal.side), {})[goal.of] = goal
    rows = []
    for (name, side), own in alike.items():
        met = {goal.is_met for goal in own.values()}
        verdict = "not met" if False in met else "not measured" if None in met else "met"
        cells = (_reached(own[one], len(subjects) > 1) if one in own else "" for one in subjects)
        rows.append((name, side, *cells, verdict))
    return table(("goal", "limit", *(one or "reached" for one in subjects), ""), rows)


def _reached(goal: Goal, is_marked: bool) -> str:
    if goal.reached is None:
        return ""
    return _short(goal.reached) + (" (not met)" if is_marked and not goal.is_met else "")


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def table_of(columns: Columns, rows: Iterable[Any]) -> str:
    """Return rows as a table in Markdown."""
    return table(list(columns), [[str(cell(row)) for cell in columns.values()] for row in rows])


def text(key: str) -> Callable[[Row], object]:
    """Return a column of what each row has under a key."""
    return lambda row: row[key]


def fixed(key: str, digits: int = 1, scale: float = 1.0) -> Callable[[Row], object]:
    """Return a column of numbers, each multiplied by `scale`."""
    return lambda row: f"{scale * row[key]:.{digits}f}"


def ms(key: str, digits: int = 1) -> Callable[[Row], object]:
    """Return a column of milliseconds, of seconds under a key."""
    return fixed(key, digits, 1e3)


def percent(key: str) -> Callable[[Row], object]:
    """Return a column of percentages, of shares under a key."""
    return lambda row: f"{row[key]:.1%}"


def mb(key: str, digits: int = 1) -> Callable[[Row], object]:
    """Return a column of megabytes, of bytes under a key."""
    return fixed(key, digits, 1e-6)


def rounded(figures: Mapping[str, Any], digits: int = 6) -> dict[str, Any]:
    """Round the floating-point numbers of a document, those of mappings in it, too."""
    return {
        name: rounded(value, digits)
        if isinstance(value, Mapping)
        else round(value, digits)
        if isinstance(value, float)
        else value
        for name, value in figures.items()
    }


def say(line: str) -> None:
    """Print progress."""
    print(line, file=sys.stderr, flush=True)


def settle(device: torch.device) -> None:
    """Wait until a device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device = CPU) -> float:
    """Time `work` until the device is idle."""
    settle(device)
    start = time.perf_counter()
    work()
    settle(device)
    return time.perf_counter() - start


def in_turns(
    works: Mapping[str, Callable[[], object]], repeats: int, device: torch.device = CPU
) -> dict[str, list[float]]:
    """Time each work once in each turn, so that other work on the machine slows all; return seconds by name."""
    turns = [{name: seconds(work, device) for name, work in works.items()} for _ in range(repeats)]
    return {name: [turn[name] for turn in turns] for name in works}


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile.

    Raises:
        RuntimeError: there are fewer than two values.
    """
    if len(values) < 2:
        raise RuntimeError(f"a percentile of {len(values)} values: measure for longer")
    return quantiles(values, n=100, method="inclusive")[98]


def machine(device: torch.device) -> dict[str, Any]:
    """Describe the hardware."""
    return {
        "cpu": _cpu_fact("model name") or platform.machine(),
        "instructions": _instructions(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def versions(*more: str) -> dict[str, str]:
    """Return the versions of Python and of the installed libraries."""
    found = {"python": platform.python_version()}
    for name in (*LIBRARIES, *more):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def describe(device: torch.device) -> str:
    """Describe the machine in one line, for the head of a report."""
    facts = machine(device)
    where = "" if facts["device"] == "cpu" else f", {facts['device']}"
    cpu = " ".join([facts["cpu"], *facts["instructions"][-1:]])
    return f"{cpu}, {facts['cores']} cores, {facts['memory_bytes'] / 2**30:.0f} GiB{where}"


def _instructions() -> list[str]:
    """Return those of `INSTRUCTIONS` that the processor has: one name often stands for several generations."""
    found = {*_cpu_fact("flags").split(), *_cpu_fact("Features").split()}
    return [name for name in INSTRUCTIONS if name in found]


def _cpu_fact(name: str) -> str:
    """Return what Linux tells of the first processor, or an empty text."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return ""
