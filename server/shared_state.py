"""The state that all HTTP processes of a server share: usage of tenants, loaded adapters, source jobs and metrics.

One process has it: the supervisor, the only process of `--engine inline`, or one replica under Ray Serve. HTTP
processes reach it by a `SharedLink`, of which each of the three has one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from server.metrics.aggregator import Aggregator
from server.metrics.snapshot import Snapshot
from server.metrics.stats import stats_of
from server.protocol.adapters import LoadedAdapters
from server.protocol.messages import Resident
from server.protocol.shared_calls import (
    AdmitRequests,
    AdmitUpload,
    AnyCall,
    ChangeAdapters,
    CountTokens,
    FindSourceJob,
    GetMetrics,
    GetStats,
    GetUsage,
    GrowUpload,
    PutSourceJob,
    Release,
    VariantsDeleted,
)
from server.sources.board import SourceBoard
from server.tenants.limits.rate_limiter import RateLimiter
from server.tenants.limits.tenant_limits import TenantLimits

# A process that has not answered by then counts with its last snapshot, as an engine in a long step.
COLLECT_S = 2.0


class MetricSources(Protocol):
    """The processes of a server, as the sources of its metrics."""

    async def collect(self, aggregator: Aggregator) -> None:
        """Give the aggregator new snapshots of the processes that answer within `COLLECT_S`."""

    async def residents(self) -> Sequence[Resident]:
        """Return the deltas in memory, as far as engines answer within `COLLECT_S`."""

    async def forget_variants(self, labels: tuple[str, ...]) -> None:
        """Have the engines forget deleted variants."""


class SharedState:
    """The shared state. Event loop only.

    Args:
        sources: the server's processes.
        limits_of: returns a tenant's limits now; raises QueueFull if they are unknown.
    """

    def __init__(self, sources: MetricSources, limits_of: Callable[[str], TenantLimits]) -> None:
        self.aggregator = Aggregator()
        self._sources = sources
        self._rate_limiter = RateLimiter(limits_of)
        self._adapters = LoadedAdapters()
        self._board = SourceBoard()
        # One collection at a time: an older snapshot must not follow a newer one.
        self._collecting = asyncio.Lock()

    async def answer(self, process: str, call: AnyCall) -> Any:
        """Do what an HTTP process asks, and return the answer that the call's type names.

        Only calls for metrics wait; others are done at once, so that calls in order are done in order.

        Raises:
            QueueFull: a tenant's limits are unknown.
        """
        match call:
            case AdmitRequests(work_id, tenant, num_requests):
                return self._rate_limiter.admit_requests(process, work_id, tenant, num_requests)
            case AdmitUpload(work_id, tenant, num_bytes):
                return self._rate_limiter.admit_upload(process, work_id, tenant, num_bytes)
            case GrowUpload(work_id, num_bytes):
                return self._rate_limiter.grow_upload(process, work_id, num_bytes)
            case CountTokens(tenant, num_tokens):
                self._rate_limiter.count_tokens(tenant, num_tokens)
            case Release(work_id):
                self._rate_limiter.release(process, work_id)
            case GetUsage(tenant):
                return self._rate_limiter.usage(tenant)
            case ChangeAdapters(change):
                return self._adapters.apply(change)
            case PutSourceJob(job):
                return self._board.put(process, job)
            case FindSourceJob(tenant, name, job_id):
                return self._board.find(tenant, name, job_id)
            case GetMetrics():
                return await self.collect()
            case GetStats():
                return stats_of(await self.collect(), await self._sources.residents(), time.time())
            case VariantsDeleted(labels):
                self.aggregator.forget_variants(labels)
                await self._sources.forget_variants(labels)

    def lost(self, process: str) -> None:
        """Free what a process that has ended held; its counts stay in the metrics."""
        self.aggregator.ended(process)
        self._rate_limiter.free(process)
        self._board.lost(process)

    async def collect(self) -> Snapshot:
        """Take in the metrics of all processes, and return them together."""
        async with self._collecting:
            await self._sources.collect(self.aggregator)
            return self.aggregator.merged()
