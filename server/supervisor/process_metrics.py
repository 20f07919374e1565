"""The metrics of all processes: collects their snapshots and merges them, also to statistics. Reads no registry."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector

from deltastore.errors import PeraxisError
from server.frontend.engine_client import EngineClient
from server.metrics.aggregator import Aggregator
from server.metrics.snapshot import Snapshot, take_snapshot
from server.metrics.stats import Statistics
from server.protocol.messages import Resident
from server.protocol.stats import ServerStats

# A process that has not answered by then counts with its last snapshot, as an engine in a long step.
COLLECT_S = 2.0
# Seconds that one collection of statistics serves all HTTP processes; they ask for one a second.
STATS_S = 0.9
ENGINE, SUPERVISOR = "engine", "supervisor"


class ProcessMetrics:
    """The metrics of a server whose processes come and go."""

    def __init__(self, engine: EngineClient) -> None:
        self.aggregator = Aggregator()
        self._engine = engine
        self._own = CollectorRegistry()
        ProcessCollector(registry=self._own)
        self.aggregator.started(SUPERVISOR)
        # One scrape at a time: an older snapshot must not follow a newer one.
        self._lock = asyncio.Lock()
        self._statistics = Statistics()
        self._stats: ServerStats | None = None
        self._stats_lock = asyncio.Lock()
        self._next_stats_at = 0.0

    async def merged(self, ask_http: Callable[[float], Awaitable[Mapping[str, Snapshot]]]) -> Snapshot:
        """Return the metrics of all processes together.

        Args:
            ask_http: returns the snapshots of the HTTP processes within a number of seconds.
        """
        async with self._lock:
            await self._collect(ask_http)
            return self.aggregator.merged()

    def forget_variants(self, labels: frozenset[str]) -> None:
        """Remove deleted variants, so that others can have their labels."""
        self.aggregator.forget_variants(labels)
        self._engine.forget_variants(labels)

    async def stats(self, ask_http: Callable[[float], Awaitable[Mapping[str, Snapshot]]]) -> ServerStats:
        """Return the statistics of the server, at most `STATS_S` old; `ask_http` is as in `merged`."""
        async with self._stats_lock:
            if self._stats is None or time.monotonic() >= self._next_stats_at:
                async with self._lock:
                    await self._collect(ask_http)
                    residents = await self._residents()
                    merged = self.aggregator.merged()
                now = time.monotonic()
                self._next_stats_at = now + STATS_S
                self._stats = self._statistics.make(merged, residents, now, time.time())
            return self._stats

    async def _collect(self, ask_http: Callable[[float], Awaitable[Mapping[str, Snapshot]]]) -> None:
        http, _ = await asyncio.gather(ask_http(COLLECT_S), self._ask_engine())
        for source, snapshot in http.items():
            self.aggregator.received(source, snapshot)
        self.aggregator.received(SUPERVISOR, take_snapshot(self._own))

    async def _residents(self) -> tuple[Resident, ...]:
        with contextlib.suppress(PeraxisError, TimeoutError):
            return await asyncio.wait_for(self._engine.residents(), COLLECT_S)
        return ()

    async def _ask_engine(self) -> None:
        # While no engine is ready, the totals of the one before stand.
        with contextlib.suppress(PeraxisError, TimeoutError):
            self.aggregator.received(ENGINE, await asyncio.wait_for(self._engine.metrics(), COLLECT_S))
