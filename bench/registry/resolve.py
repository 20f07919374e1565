"""Measure what requests, pages of lists and scrapes read of a registry with few and with many versions.

The tenant has 200 variants of one version each and a variant `a`, which has 10 versions, 100,000, or fewer of which
15,000 are inactive, deleted, or deleted with a live version behind each 15; in the last registry, 1,000 further
variants have 100 versions each. Each registry is asked in turns to resolve `a`, for a page of a hundred variants and
for a scrape. To list, parse and sort the names in directories grows with their number; it is timed inside each
question, and the goal is about the rest. The files are written as publications and deletions leave them, but not synced
and without objects.
"""

from __future__ import annotations

import hashlib
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from bench.harness import Bench, Report, fixed, ms, table_of, text
from deltastore.registry import Registry, variants
from deltastore.registry.directory.files import DirectoryFiles
from deltastore.registry.records import Usage, VariantState, VersionRecord
from deltastore.registry.variants import EntrySequence, VariantDirectory
from server.metrics.exposition import read_registry

TENANT, NAME = "acme", "a"
PAGE = 100
MAX_RATIO = 2.0
# Of every 16 versions, 15 are deleted one by one.
STRIDE = 16
COLUMNS = {
    "registry": text("registry"),
    "question": text("question"),
    "names, ms": ms("names_s", 2),
    "rest, ms": ms("rest_s", 2),
    "rest / few": fixed("ratio_of_rest", 2),
    f"at most {MAX_RATIO:g}": lambda row: "met" if row["ratio_of_rest"] <= MAX_RATIO else "not met",
}


@dataclass(frozen=True, slots=True)
class ResolveScope:
    num_few: int = 10
    num_many: int = 100_000
    num_old: int = 15_000  # inactive or deleted
    num_variants: int = 200
    repeats: int = 15


FULL_SCOPE, SMALL_SCOPE = ResolveScope(), ResolveScope(num_many=300, num_old=150, num_variants=20, repeats=2)


@dataclass(frozen=True, slots=True)
class QuestionCosts:
    """Median seconds of one question: of the readings of names in it, and of all else."""

    rest_s: float
    names_s: float


def make_registries(directory: Path, scope: ResolveScope) -> dict[str, Registry]:
    """Write one registry of each kind."""
    many, old, last = scope.num_many, scope.num_old, scope.num_old // (STRIDE - 1) * STRIDE
    runs = tuple((first, first + STRIDE - 2) for first in range(1, last, STRIDE))
    # Each deletion notes the newest version.
    scattered = VariantState(active=last, as_of=last, deleted=runs, previous=last - STRIDE)
    live = [number for number in range(1, last + 1) if scattered.is_live(number)]
    oldest = VariantState(as_of=old, deleted=((1, old),))
    inactive = range(1, old + 1)
    registries = {}
    for kind, numbers, active, state in (
        ("few", range(1, scope.num_few + 1), None, VariantState()),
        (f"{many:,} versions", range(1, many + 1), None, VariantState()),
        (f"{old:,} inactive", inactive, 1, VariantState()),
        (f"{old:,} deleted", range(old + 1, old + 1 + scope.num_few), None, oldest),
        (f"{old:,} scattered", live, None, scattered),
        (f"{many:,} elsewhere", range(1, scope.num_few + 1), None, VariantState()),
    ):
        registry = registries[kind] = Registry(directory / kind)
        _write(registry, NAME, numbers, active)
        if state.deleted:
            variant = VariantDirectory(registry.files, TENANT, NAME)
            registry.files.add(variant.entries.path(1), state.to_json())
        for number in range(scope.num_variants):
            _write(registry, f"v{number:03}", [1])
    for number in range(many // 100):
        _write(registries[f"{many:,} elsewhere"], f"w{number:04}", range(1, 101))
    return registries


def _write(registry: Registry, name: str, numbers: Iterable[int], active: int | None = None) -> None:
    """Write versions of a variant: all of them active in their turn, or `active` alone."""
    directory = VariantDirectory(registry.files, TENANT, name)
    directory.make()
    for number in numbers:
        digest = hashlib.sha256(f"{name}@{number}".encode()).hexdigest()
        record = VersionRecord(
            tenant=TENANT,
            name=name,
            version=number,
            digest=digest,
            size_bytes=60_000_000,
            data_start=4096,
            device_bytes=59_000_000,
            base_fingerprint=digest,
            chunk_sha256=(digest,) * 15,
            created_at="2026-01-01T00:00:00.000+00:00",
            method="both",
            report=digest[:32],
            activate=active in (None, number),
            active_before=number - 1 if active is None else active if number > active else 0,
        )
        Path(directory.report_path(record)).write_bytes(b"{}")
        Path(directory.record_path(number)).write_bytes(record.to_json())


def measure(registries: dict[str, Registry], scope: ResolveScope) -> dict[str, dict[str, QuestionCosts]]:
    """Ask every registry in turns."""
    rests: dict[tuple[str, str], list[float]] = {}
    names: dict[tuple[str, str], list[float]] = {}
    with NameReadings() as readings:
        for _ in range(scope.repeats):
            for kind, registry in registries.items():
                for question, ask in questions(registry).items():
                    # The one before asked another registry, which has left the processor's caches to its names.
                    ask()
                    readings.results.clear()
                    readings.seconds, begun = 0.0, time.perf_counter()
                    ask()
                    total_s = time.perf_counter() - begun
                    readings.results.clear()
                    rests.setdefault((kind, question), []).append(total_s - readings.seconds)
                    names.setdefault((kind, question), []).append(readings.seconds)
    found: dict[str, dict[str, QuestionCosts]] = {}
    for (kind, question), seconds in rests.items():
        found.setdefault(kind, {})[question] = QuestionCosts(median(seconds), median(names[kind, question]))
    return found


def questions(registry: Registry) -> dict[str, Callable[[], object]]:
    usage = Usage(0, 0, 0, 0)
    return {
        "resolve": lambda: registry.resolve(TENANT, NAME),
        "page": lambda: registry.summaries(TENANT, registry.names(TENANT)[:PAGE]),
        "scrape": lambda: read_registry(registry, [f"{TENANT}/{NAME}"], usage),
    }


class NameReadings(ExitStack):
    """Adds up the seconds inside its block in which names of files are listed, parsed and sorted.

    It keeps what they return, so that freeing a hundred thousand names is no part of what is timed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.results: list[object] = []
        self._is_inside = False
        for owner, name in (
            (DirectoryFiles, "names"),
            (variants, "_numbers"),
            (EntrySequence, "numbers"),
            (Registry, "names"),
        ):
            self.enter_context(patch.object(owner, name, self._timed(getattr(owner, name))))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            if self._is_inside:
                return self._kept(function(*args, **options))
            self._is_inside, begun = True, time.perf_counter()
            try:
                return self._kept(function(*args, **options))
            finally:
                self._is_inside = False
                self.seconds += time.perf_counter() - begun

        return timed

    def _kept(self, result: Any) -> Any:
        self.results.append(result)
        return result


def report(args: Namespace) -> Report:
    scope = SMALL_SCOPE if args.small else FULL_SCOPE
    found = measure(make_registries(args.directory, scope), scope)
    results = {
        registry: {
            question: {
                "names_s": round(cost.names_s, 6),
                "rest_s": round(cost.rest_s, 6),
                "ratio_of_rest": round(cost.rest_s / found["few"][question].rest_s, 3),
            }
            for question, cost in costs.items()
        }
        for registry, costs in found.items()
    }
    rows = [
        {"registry": registry, "question": question, **cost}
        for registry, costs in results.items()
        for question, cost in costs.items()
    ]
    settings = asdict(scope)
    return Report(settings, results, [table_of(COLUMNS, rows)], conditions=f"median of {scope.repeats}")


main = Bench(
    "registry.resolve",
    __doc__,
    report,
    small="few versions",
    folder="for the registries",
    file=lambda _: "resolve.json",
)

if __name__ == "__main__":
    sys.exit(main())
