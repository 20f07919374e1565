"""The state that all HTTP processes of a server share: usage of tenants, loaded adapters, source jobs and metrics.

One process has it: the supervisor, the only process of `--engine inline`, or one replica under Ray Serve. HTTP
processes reach it by a `SharedLink`, of which each of the three has one.

vLLM lists an adapter from its load call to its unload call, also while it is in no memory. The supervisor keeps the
record, so that every HTTP process lists the same, and an engine that restarts changes nothing.

A client may poll at another process than the one that runs its job, and a job may outlive the process that ran it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Generic, Protocol, TypeVar, get_args

from msgspec import Struct

from server.fairness import FairBudget
from server.metrics.aggregator import Aggregator, ServerStats, stats_of
from server.metrics.instruments import Snapshot
from server.protocol.messages import Resident
from server.tenants.limits import RateLimiter
from server.tenants.tenant import Admitted, Refused, TenantLimits, Usage

# With their paths, a tenant's are far smaller than a message to the supervisor may be.
MAX_ADAPTERS = 4096


class LoadedAdapter(Struct, frozen=True, array_like=True):
    """A variant's name that was loaded and not unloaded since."""

    tenant: str
    name: str
    path: str  # as the client gave it
    loaded_at: float  # seconds since 1970


class AdapterChange(Struct, frozen=True):
    """A change of what a tenant has loaded; without a field that is set, a question about it."""

    tenant: str
    loaded: LoadedAdapter | None = None
    unloaded: str | None = None  # the name


class LoadedAdapters:
    """The record of one server. Not thread-safe.

    Tenants share its length: one alone may have half of `MAX_ADAPTERS`, and its oldest is forgotten for the next one.
    """

    def __init__(self) -> None:
        self._by_tenant: dict[str, dict[str, LoadedAdapter]] = {}
        self._budget = FairBudget(MAX_ADAPTERS, "loaded adapters")

    def apply(self, change: AdapterChange) -> tuple[LoadedAdapter, ...]:
        """Make a change and return the tenant's adapters, in the order in which they were first loaded."""
        own = self._by_tenant.get(change.tenant, {})
        if change.loaded is not None and self._has_place(change.tenant, change.loaded.name):
            own = self._by_tenant.setdefault(change.tenant, {})
            own[change.loaded.name] = change.loaded
        if change.unloaded in own:
            self._forget(change.tenant, change.unloaded)
        return tuple(own.values())

    def _has_place(self, tenant: str, name: str) -> bool:
        """Take a place for a name that has none; the tenant's oldest gives its own if there is no other."""
        own = self._by_tenant.get(tenant, {})
        if name in own:
            return True
        if own and not self._budget.has(tenant, 1):
            self._forget(tenant, next(iter(own)))
        if not self._budget.has(tenant, 1):
            return False
        self._budget.take(tenant, 1)
        return True

    def _forget(self, tenant: str, name: str) -> None:
        own = self._by_tenant[tenant]
        del own[name]
        self._budget.give_back(tenant, 1)
        if not own:
            del self._by_tenant[tenant]


R = TypeVar("R")


class SharedCall(Struct, Generic[R], frozen=True):
    """A call whose answer is an R."""


class AdmitRequests(SharedCall[Admitted | Refused], frozen=True, tag=True):
    """Count requests of a tenant, and count them as running until their Release.

    The same id again says how many requests the call has, now that it is known; the work is released if it is Refused.
    """

    id: int  # of this work among that of its HTTP process
    tenant: str
    num_requests: int = 1


class AdmitUpload(SharedCall[Admitted | Refused], frozen=True, tag=True):
    """Count an upload of a tenant as under way until its Release."""

    id: int
    tenant: str
    num_bytes: int


class GrowUpload(SharedCall[int], frozen=True, tag=True):
    """Count bytes of an upload whose length was not known, or none. Answered by those of the tenant's other uploads."""

    id: int
    num_bytes: int  # since the last count


class CountTokens(SharedCall[None], frozen=True, tag=True):
    """Count prompt or generated tokens of a tenant."""

    tenant: str
    num_tokens: int


class Release(SharedCall[None], frozen=True, tag=True):
    """The work has ended, or its answer is not waited for. Unknown ids are ignored."""

    id: int


class GetUsage(SharedCall[Usage], frozen=True, tag=True):
    """Ask for a tenant's limits and its usage."""

    tenant: str


class ChangeAdapters(SharedCall[tuple[LoadedAdapter, ...]], frozen=True, tag=True):
    """Change the record of adapters that vLLM's calls have loaded. Answered by the tenant's."""

    change: AdapterChange


class GetMetrics(SharedCall[Snapshot], frozen=True, tag=True):
    """Ask for the metrics of all processes together."""


class GetStats(SharedCall[ServerStats], frozen=True, tag=True):
    """Ask for the statistics of all processes together."""


class VariantsDeleted(SharedCall[None], frozen=True, tag=True):
    """Remove variants that do not exist any more from the metrics, so that others can have their labels."""

    labels: tuple[str, ...]


AnyCall = (
    AdmitRequests
    | AdmitUpload
    | GrowUpload
    | CountTokens
    | Release
    | GetUsage
    | ChangeAdapters
    | GetMetrics
    | GetStats
    | VariantsDeleted
)


class SharedLink(Protocol):
    """The way of an HTTP process to the shared state. Calls are begun in the order in which they are made."""

    async def ask(self, call: SharedCall[R]) -> R:
        """Return the answer to a call.

        Raises:
            QueueFull: nothing can answer now.
        """

    def tell(self, call: SharedCall[None]) -> None:
        """Send a call without waiting for its answer."""


@cache
def answer_type(call: type[SharedCall[Any]]) -> Any:
    """Return the type of a call's answer."""
    (base,) = call.__orig_bases__  # type: ignore[attr-defined]
    return get_args(base)[0]


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

    async def collect(self) -> Snapshot:
        """Take in the metrics of all processes, and return them together."""
        async with self._collecting:
            await self._sources.collect(self.aggregator)
            return self.aggregator.merged()
