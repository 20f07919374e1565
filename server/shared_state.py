"""The state that all HTTP processes of a server share: usage of tenants, loaded adapters and metrics.

One process has it: the supervisor, the only process of `--engine inline`, or one replica under Ray Serve. HTTP
processes call its methods wherever it is.

vLLM lists an adapter from its load call to its unload call, also while it is in no memory. The supervisor keeps the
record, so that every HTTP process lists the same, and an engine that restarts changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

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

    HTTP processes call its methods, those of another process by `RemoteState` (`server/protocol/control.py`): what is
    `async` is answered, anything else is told. Calls of one process are begun in the order in which they are made, and
    give all arguments: defaults do not travel.

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

    async def admit_requests(
        self, process: str, work_id: int, tenant: str, num_requests: int
    ) -> Admitted | Refused:
        """Count requests of a tenant, and count them as running until their release.

        The same id again says how many requests the call has, now that it is known; refused work is released.

        Args:
            process: the identity of the HTTP process.
            work_id: of this work among that of its process.
        """
        return self._rate_limiter.admit_requests(process, work_id, tenant, num_requests)

    async def admit_upload(
        self, process: str, work_id: int, tenant: str, num_bytes: int
    ) -> Admitted | Refused:
        """Count an upload of a tenant as under way until its release."""
        return self._rate_limiter.admit_upload(process, work_id, tenant, num_bytes)

    async def grow_upload(self, process: str, work_id: int, num_bytes: int) -> int:
        """Count bytes of an upload whose length was not known, or none; return those of the tenant's others."""
        return self._rate_limiter.grow_upload(process, work_id, num_bytes)

    def count_tokens(self, tenant: str, num_tokens: int) -> None:
        """Count prompt or generated tokens of a tenant."""
        self._rate_limiter.count_tokens(tenant, num_tokens)

    def release(self, process: str, work_id: int) -> None:
        """End work, or give up an answer that is not waited for. Unknown ids are ignored."""
        self._rate_limiter.release(process, work_id)

    async def usage(self, tenant: str) -> Usage:
        """Return a tenant's limits and its usage."""
        return self._rate_limiter.usage(tenant)

    async def change_adapters(self, change: AdapterChange) -> tuple[LoadedAdapter, ...]:
        """Change the record of adapters that vLLM's calls have loaded; return the tenant's."""
        return self._adapters.apply(change)

    async def metrics(self) -> Snapshot:
        """Take in the metrics of all processes, and return them together."""
        async with self._collecting:
            await self._sources.collect(self.aggregator)
            return self.aggregator.merged()

    async def stats(self) -> ServerStats:
        """Return the statistics of all processes together."""
        return stats_of(await self.metrics(), await self._sources.residents(), time.time())

    async def forget_variants(self, labels: tuple[str, ...]) -> None:
        """Remove variants that do not exist any more from the metrics, so that others can have their labels."""
        self.aggregator.forget_variants(labels)
        await self._sources.forget_variants(labels)

    def lost(self, process: str) -> None:
        """Free what a process that has ended held; its counts stay in the metrics."""
        self.aggregator.ended(process)
        self._rate_limiter.free(process)
