"""Counters, gauges and histograms of one process as plain values, of which a snapshot can be sent to another process.

prometheus_client renders them, in the process that answers a scrape.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from prometheus_client import ProcessCollector

from server.metrics.snapshot import Family, Series, Snapshot

PREFIX = "peraxis_"
LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120,
)  # fmt: skip
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Counter:
    """A number that grows. Thread-safe."""

    type = "counter"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value = 0.0
        self._created = time.time()

    def inc(self, amount: float = 1.0) -> None:
        """Add an amount."""
        with self._lock:
            self._value += amount

    def series(self, labels: tuple[str, ...]) -> Series:
        """Return the series that the counter is now."""
        return Series(labels, self._value, (), self._created)


class Gauge:
    """A number that is set. Thread-safe."""

    type = "gauge"

    def __init__(self) -> None:
        self._value = 0.0

    def set(self, value: float) -> None:
        """Replace the number."""
        self._value = float(value)

    def series(self, labels: tuple[str, ...]) -> Series:
        """Return the series that the gauge is now."""
        return Series(labels, self._value)


class Histogram:
    """Observations by bucket, and their sum. Thread-safe.

    Args:
        bounds: upper bounds of the buckets, infinity last.
    """

    type = "histogram"

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._lock = threading.Lock()
        self._bounds = bounds
        self._counts = [0.0] * len(bounds)
        self._sum = 0.0
        self._created = time.time()

    def observe(self, value: float) -> None:
        """Count an observation."""
        index = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[index] += 1
            self._sum += value

    def series(self, labels: tuple[str, ...]) -> Series:
        """Return the series that the histogram is now."""
        with self._lock:
            return Series(labels, self._sum, tuple(self._counts), self._created)


Kind = TypeVar("Kind", Counter, Gauge, Histogram)


class Metric(Generic[Kind]):
    """A metric with an instrument for each set of label values. Thread-safe.

    Args:
        make: returns a new instrument.
        family: the metric without series.
    """

    def __init__(self, make: Callable[[], Kind], family: Family) -> None:
        self._make: Callable[[], Kind] = make
        self._family = family
        self._instruments: dict[tuple[str, ...], Kind] = {}

    def labels(self, *values: str, **named: str) -> Kind:
        """Return the instrument of a set of label values, given in their order or by name."""
        if named:
            values = tuple(named[name] for name in self._family.label_names)
        found = self._instruments.get(values)
        # If two threads make one, both use the first.
        return self._instruments.setdefault(values, self._make()) if found is None else found

    def remove(self, *values: str) -> None:
        """Remove the instrument of a set of label values, if there is one."""
        self._instruments.pop(values, None)

    def family(self) -> Family:
        """Return the metric with its series now."""
        family = self._family
        # A copy that no thread changes.
        instruments = self._instruments.copy().items()
        series = tuple([instrument.series(labels) for labels, instrument in instruments])
        return Family(
            family.name, family.documentation, family.type, family.label_names, series, family.bounds
        )


class MetricSet:
    """Metrics of one process. Thread-safe.

    An attribute of a subclass has its metric's name without `PREFIX`. Labels are given with the values that are known
    in advance: every combination of them starts at 0, so that a rate includes the first event.

    Args:
        process: whether the snapshots hold the memory, descriptors and processor time of this process, too.
    """

    def __init__(self, *, process: bool = False) -> None:
        self._metrics: list[Metric[Counter] | Metric[Gauge] | Metric[Histogram]] = []
        self._process = process

    def snapshot(self) -> Snapshot:
        """Return all metrics at one moment."""
        families = tuple([metric.family() for metric in self._metrics])
        return Snapshot((*families, *process_families()) if self._process else families)

    def labelled_counter(self, name: str, text: str, **labels: Iterable[str]) -> Metric[Counter]:
        """Define a counter with labels."""
        return self._define(Counter, name, text, labels)

    def labelled_gauge(self, name: str, text: str, **labels: Iterable[str]) -> Metric[Gauge]:
        """Define a gauge with labels."""
        return self._define(Gauge, name, text, labels)

    def labelled_histogram(self, name: str, text: str, **labels: Iterable[str]) -> Metric[Histogram]:
        """Define a histogram of times with labels."""
        return self._define_histogram(name, text, LATENCY_BUCKETS, labels)

    def counter(self, name: str, text: str) -> Counter:
        """Define a counter without labels."""
        return self._define(Counter, name, text, {}).labels()

    def gauge(self, name: str, text: str) -> Gauge:
        """Define a gauge without labels."""
        return self._define(Gauge, name, text, {}).labels()

    def histogram(self, name: str, text: str, buckets: Iterable[float] = LATENCY_BUCKETS) -> Histogram:
        """Define a histogram without labels."""
        return self._define_histogram(name, text, buckets, {}).labels()

    def _define_histogram(
        self, name: str, text: str, buckets: Iterable[float], labels: dict[str, Iterable[str]]
    ) -> Metric[Histogram]:
        bounds = (*map(float, buckets), math.inf)
        return self._define(Histogram, name, text, labels, bounds, lambda: Histogram(bounds))

    def _define(
        self,
        kind: type[Kind],
        name: str,
        text: str,
        labels: dict[str, Iterable[str]],
        bounds: tuple[float, ...] = (),
        make: Callable[[], Kind] | None = None,
    ) -> Metric[Kind]:
        """Define a metric and every combination of its given label values."""
        full_name = name if ":" in name else PREFIX + name
        metric = Metric(make or kind, Family(full_name, text, kind.type, tuple(labels), (), bounds))
        for values in itertools.product(*labels.values()):
            metric.labels(*values)
        self._metrics.append(metric)
        return metric


def process_families() -> tuple[Family, ...]:
    """Return the memory, descriptors and processor time of this process, under the names of prometheus_client."""
    return tuple(
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            (),
            tuple(Series((), sample.value) for sample in metric.samples),
        )
        for metric in _process.collect()
    )


_process = ProcessCollector(registry=None)
