"""Metrics of a service that runs in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable

from prometheus_client import CollectorRegistry, ProcessCollector

from server.metrics.aggregator import Aggregator
from server.metrics.engine import EngineMetrics
from server.metrics.frontend import FrontendMetrics
from server.metrics.snapshot import Snapshot, take_snapshot
from server.metrics.stats import Statistics
from server.protocol.messages import Resident
from server.protocol.stats import ServerStats


class LocalMetrics:
    """The engine's metrics and those of HTTP, counted and rendered in one process. Thread-safe."""

    def __init__(self) -> None:
        self.engine = EngineMetrics(CollectorRegistry())
        self.frontend = FrontendMetrics(CollectorRegistry())
        ProcessCollector(registry=self.frontend.registry)
        self._lock = threading.Lock()
        self._aggregator = Aggregator()
        self._statistics = Statistics()
        self._sources = (self.engine.registry, self.frontend.registry)
        for source in self._sources:
            self._aggregator.started(source)

    def merged(self) -> Snapshot:
        """Return the metrics of the engine and of HTTP together."""
        # The aggregator takes snapshots in their order.
        with self._lock:
            self._collect()
            return self._aggregator.merged()

    def forget_variants(self, labels: Collection[str]) -> None:
        """Remove deleted variants, so that others can have their labels."""
        self._aggregator.forget_variants(labels)
        self.engine.forget_variants(labels)
        self.frontend.forget_variants(labels)

    def stats(self, residents: Iterable[Resident]) -> ServerStats:
        """Return the statistics of the server, which has these deltas in memory."""
        with self._lock:
            self._collect()
            merged = self._aggregator.merged()
            return self._statistics.make(merged, residents, time.monotonic(), time.time())

    def _collect(self) -> None:
        for source in self._sources:
            self._aggregator.received(source, take_snapshot(source))
