"""Define prometheus_client metrics with the service's prefix and buckets, and with their bounded series at 0."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

PREFIX = "peraxis_"
LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120,
)  # fmt: skip
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

M = TypeVar("M", Counter, Gauge, Histogram)


class MetricSet:
    """Metrics in one prometheus_client registry. Thread-safe.

    An attribute of a subclass has its metric's name without `PREFIX`. Labels are given with the values that are known
    in advance: every combination of them starts at 0, so that a rate includes the first event.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

    def _counter(self, name: str, text: str, **labels: Iterable[str]) -> Counter:
        return self._with_series(Counter, name, text, labels)

    def _gauge(self, name: str, text: str, **labels: Iterable[str]) -> Gauge:
        return self._with_series(Gauge, name, text, labels)

    def _histogram(
        self, name: str, text: str, buckets: Iterable[float] = LATENCY_BUCKETS, **labels: Iterable[str]
    ) -> Histogram:
        return self._with_series(Histogram, name, text, labels, buckets=tuple(buckets))

    def _with_series(
        self, kind: Callable[..., M], name: str, text: str, labels: dict[str, Iterable[str]], **more: Any
    ) -> M:
        """Define a metric and every combination of its given label values."""
        metric = kind(PREFIX + name, text, tuple(labels), registry=self.registry, **more)
        if labels:
            for values in itertools.product(*labels.values()):
                metric.labels(*values)
        return metric
