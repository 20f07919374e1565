"""Counters, gauges and histograms of one process as plain values, their snapshot, and their labels.

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

import msgspec
from prometheus_client import ProcessCollector

from server.fairness import FairBudget
from server.tenants.tenant import FIELDS


class Series(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One series of a family.

    Attributes:
        labels: values of the family's `label_names`, in their order.
        value: a counter's total, a gauge's value, or the sum of a histogram's observations.
        counts: a histogram's observations in each bucket, without those of lower buckets.
        created: when counting began, in seconds since 1970; None for gauges and the counters of the process.
    """

    labels: tuple[str, ...]
    value: float
    counts: tuple[float, ...] = ()
    created: float | None = None


class Family(msgspec.Struct, frozen=True, array_like=True):
    """One metric and its series.

    Attributes:
        name: without a counter's `_total`.
        type: ``counter``, ``gauge`` or ``histogram``.
        bounds: upper bounds of a histogram's buckets, infinity last.
    """

    name: str
    documentation: str
    type: str
    label_names: tuple[str, ...]
    series: tuple[Series, ...]
    bounds: tuple[float, ...] = ()


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """The metrics of one process, or of the service, at one moment."""

    families: tuple[Family, ...]


SOURCES = ("store", "disk", "host")
STAGES = ("fetch", "read", "copy", "total")
LEVELS = ("device", "host")
LOOKUPS = ("device", "host", "disk")
# Levels of a delta that was not in a slot when its request came.
COLD_LOOKUPS = ("host", "disk")
KINDS = ("prompt", "generation")
WAIT_REASONS = ("capacity", "variant_load")
FINISH_REASONS = ("stop", "length", "cancelled", "error")
LOAD_FAILURES = ("corrupt", "missing", "error")
EVICTION_REASONS = ("capacity", "unload")
# A tenant over a limit is refused for the limit's name.
REJECTIONS = ("queue_full", "draining", "engine_restarted", "invalid", *FIELDS)
MEMORY_KINDS = ("base", "slots", "kv", "other")
UPLOAD_RESULTS = ("created", "duplicate", "rejected", "failed")

# The label `variant` of the base, and the value that further values of any label fold into.
BASE, OTHER = "base", "other"
MAX_LABEL_VALUES = 200


def variant_label(tenant: str, name: str) -> str:
    """Return the `variant` label of a variant. It contains a slash, which `BASE` and `OTHER` do not."""
    return f"{tenant}/{name}"


class VariantLabels:
    """The `variant` labels that are taken, of which each tenant has a share.

    A tenant may have as many as are left free: one alone has `MAX_LABEL_VALUES`, and the next one always finds some.
    The caller sees to it that one thread uses it at a time.
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._budget = FairBudget(2 * MAX_LABEL_VALUES, "labels of variants")

    def take(self, label: str) -> bool:
        """Take a label if it is not taken; return False if its tenant may have no more."""
        if label not in self._taken:
            tenant = _tenant_of(label)
            if not self._budget.has(tenant, 1):
                return False
            self._budget.take(tenant, 1)
            self._taken.add(label)
        return True

    def give_back(self, label: str) -> None:
        """Let another variant have a label; no effect if it is not taken."""
        if label in self._taken:
            self._taken.remove(label)
            self._budget.give_back(_tenant_of(label), 1)


def _tenant_of(label: str) -> str:
    return label.partition("/")[0]


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

    @property
    def value(self) -> float:
        """The sum of what was added."""
        return self._value

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
