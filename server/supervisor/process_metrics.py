"""The metrics of all processes: collects their snapshots, merges them, and renders the sum as text or statistics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, ProcessCollector

from deltastore.errors import PeraxisError, RegistryUnavailable
from deltastore.registry import Registry
from server.frontend.engine_client import EngineClient
from server.metrics.aggregator import Aggregator
from server.metrics.exposition import compose
from server.metrics.service import RegistryState, read_registry
from server.metrics.snapshot import Snapshot, take_snapshot
from server.metrics.stats import Statistics
from server.protocol.messages import Resident
from server.protocol.stats import ServerStats
from server.volume.calls import RegistryCalls

log = logging.getLogger(__name__)

# A process that has not answered by then counts with its last snapshot, as an engine in a long step.
COLLECT_S = 2.0
# Seconds that one collection of statistics serves all HTTP processes; they ask for one a second.
STATS_S = 0.9
ENGINE, SUPERVISOR = "engine", "supervisor"


class ProcessMetrics:
    """The metrics of a server whose processes come and go."""

    def __init__(self, registry: Registry, calls: RegistryCalls, engine: EngineClient) -> None:
        self.aggregator = Aggregator()
        self._registry = registry
        self._calls = calls
        self._has_answered = True
        self._reading: asyncio.Task[RegistryState | None] | None = None
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

    async def exposition(
        self, ask_http: Callable[[float], Awaitable[Mapping[str, Snapshot]]], is_ready: bool
    ) -> bytes:
        """Return the metrics of all processes in Prometheus' text format.

        Args:
            ask_http: returns the snapshots of the HTTP processes within a number of seconds.
            is_ready: the value of `peraxis_ready`.
        """
        async with self._lock:
            await self._collect(ask_http)
            # Before variants are listed, so that one registered meanwhile keeps its series.
            labels = self.aggregator.variant_labels()
            state = await self._registry_state()
            answer = await asyncio.to_thread(compose, self.aggregator, labels, state, is_ready=is_ready)
        self._engine.forget_variants(answer.deleted)
        return answer.text

    async def stats(self, ask_http: Callable[[float], Awaitable[Mapping[str, Snapshot]]]) -> ServerStats:
        """Return the statistics of the server, at most `STATS_S` old; `ask_http` is as in `exposition`."""
        async with self._stats_lock:
            if self._stats is None or time.monotonic() >= self._next_stats_at:
                async with self._lock:
                    await self._collect(ask_http)
                    residents = await self._residents()
                    merged = self.aggregator.merged(without_variants=())
                now = time.monotonic()
                self._next_stats_at = now + STATS_S
                self._stats = self._statistics.make(merged, residents, now, time.time())
            return self._stats

    async def _collect(self, ask_http: Callable[[float], Awaitable[Mapping[str, Snapshot]]]) -> None:
        http, _ = await asyncio.gather(ask_http(COLLECT_S), self._ask_engine())
        for source, snapshot in http.items():
            self.aggregator.received(source, snapshot)
        self.aggregator.received(SUPERVISOR, take_snapshot(self._own))

    async def _registry_state(self) -> RegistryState | None:
        """Read the registry; None if it cannot be read, or if its file system does not answer within `COLLECT_S`."""
        # At most one thread waits for a file system that hangs.
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_registry())
            await asyncio.wait([self._reading], timeout=COLLECT_S)
            if self._reading.done():
                self._has_answered = True
                return self._reading.result()
        if self._has_answered:
            log.error("metrics without the registry: it does not answer within %g s", COLLECT_S)
        self._has_answered = False
        return None

    async def _read_registry(self) -> RegistryState | None:
        with contextlib.suppress(RegistryUnavailable):
            return await self._calls.run_long(partial(read_registry, self._registry), None)
        return None

    async def _residents(self) -> tuple[Resident, ...]:
        with contextlib.suppress(PeraxisError, TimeoutError):
            return await asyncio.wait_for(self._engine.residents(), COLLECT_S)
        return ()

    async def _ask_engine(self) -> None:
        # While no engine is ready, the totals of the one before stand.
        with contextlib.suppress(PeraxisError, TimeoutError):
            self.aggregator.received(ENGINE, await asyncio.wait_for(self._engine.metrics(), COLLECT_S))
