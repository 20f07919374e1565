"""Adds up the snapshots of a service's processes.

Counters and histograms grow by what each snapshot has more than the one before it, as Prometheus' `increase` computes
it. So they never decrease when a process ends and another takes its place, and nothing is kept of the one that ended.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable
from operator import add, sub

import msgspec

from server.metrics.engine import EngineMetrics
from server.metrics.frontend import FrontendMetrics
from server.metrics.labels import BASE, MAX_LABEL_VALUES, OTHER, VariantLabels
from server.metrics.snapshot import Family, Series, Snapshot

# Gauges of which the service has the smallest of its processes' values; all others are added.
SMALLEST = ("process_start_time_seconds", "process_max_fds")
# The source of all metrics at 0, so that they exist before their processes do and between two of them.
_ZERO = object()

_ByLabels = dict[tuple[str, ...], Series]


class Aggregator:
    """The metrics of a service whose processes come and go. Thread-safe.

    A source is any name for one run of one process: a process that replaces another is another source.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, Family] = {}  # without series
        self._totals: dict[str, _ByLabels] = {}  # of counters and histograms, by family
        self._last: dict[Hashable, dict[str, _ByLabels]] = {}  # the last snapshot of each source, by family
        # Label values that are not folded into OTHER, by label name.
        self._values: dict[str, set[str]] = {}
        self._variants = VariantLabels()
        self.started(_ZERO)
        for kind in (EngineMetrics, FrontendMetrics):
            self.received(_ZERO, kind().snapshot())

    def started(self, source: Hashable) -> None:
        """Add a process that has counted nothing yet."""
        with self._lock:
            self._last[source] = {}

    def ended(self, source: Hashable) -> None:
        """Drop a process' gauges; what it had counted by its last snapshot stays in the totals."""
        with self._lock:
            self._last.pop(source, None)

    def received(self, source: Hashable, snapshot: Snapshot) -> None:
        """Take a process' next snapshot; ignored if the process has ended.

        Snapshots of one source must arrive in the order in which they were taken.
        """
        with self._lock:
            last = self._last.get(source)
            if last is None:
                return
            for family in snapshot.families:
                self._families.setdefault(family.name, msgspec.structs.replace(family, series=()))
                if family.type != "gauge":
                    self._count(family, last.get(family.name, {}))
                last[family.name] = {series.labels: series for series in family.series}

    def forget_variants(self, labels: Collection[str]) -> None:
        """Remove deleted variants from the totals, so that other variants can have a label."""
        with self._lock:
            for label in labels:
                self._variants.give_back(label)
            for name, totals in self._totals.items():
                label_names = self._families[name].label_names
                if "variant" in label_names:
                    index = label_names.index("variant")
                    self._totals[name] = {
                        values: series for values, series in totals.items() if values[index] not in labels
                    }

    def merged(self) -> Snapshot:
        """Return the metrics of the service."""
        with self._lock:
            return Snapshot(
                tuple(
                    msgspec.structs.replace(family, series=tuple(self._series_of(family).values()))
                    for family in self._families.values()
                )
            )

    def _series_of(self, family: Family) -> _ByLabels:
        if family.type != "gauge":
            return self._totals[family.name]
        merged: _ByLabels = {}
        for last in self._last.values():
            for labels, series in last.get(family.name, {}).items():
                known = merged.get(labels)
                merged[labels] = series if known is None else _merged_gauge(family, known, series)
        return merged

    def _count(self, family: Family, last: _ByLabels) -> None:
        totals = self._totals.setdefault(family.name, {})
        for series in family.series:
            before = last.get(series.labels)
            if series == before:
                continue
            labels = tuple(map(self._bounded, family.label_names, series.labels))
            growth = msgspec.structs.replace(_growth(before, series), labels=labels)
            total = totals.get(labels)
            totals[labels] = growth if total is None else _sum(total, growth)

    def _bounded(self, name: str, value: str) -> str:
        """Return a label's value, or OTHER if the label has `MAX_LABEL_VALUES` others, or as many as its tenant may."""
        if value in (BASE, OTHER):
            return value
        if name == "variant":
            return value if self._variants.take(value) else OTHER
        values = self._values.setdefault(name, set())
        if value in values:
            return value
        if len(values) >= MAX_LABEL_VALUES:
            return OTHER
        values.add(value)
        return value


def _growth(before: Series | None, series: Series) -> Series:
    """Return what a counter or histogram has counted since `before`: all, if it was removed and created again."""
    if before is None or before.created != series.created:
        return series
    counts = tuple(map(sub, series.counts, before.counts))
    return Series(series.labels, series.value - before.value, counts, series.created)


def _sum(total: Series, growth: Series) -> Series:
    created = [series.created for series in (total, growth) if series.created is not None]
    counts = tuple(map(add, total.counts, growth.counts))
    return Series(total.labels, total.value + growth.value, counts, min(created, default=None))


def _merged_gauge(family: Family, one: Series, other: Series) -> Series:
    merge = min if family.name in SMALLEST else add
    return Series(one.labels, merge(one.value, other.value))
