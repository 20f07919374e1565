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
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args

import msgspec
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


class SourceJob(Struct, frozen=True, kw_only=True):
    """A publication from a source at one moment.

    Attributes:
        id: unique on the server.
        tenant: the owner; others do not see the job.
        name: the variant that the artifact becomes a version of.
        source: as the client gave it.
        status: ``running``; then ``done`` with `result`, or ``failed`` with `error`.
        revision: the commit that a hub's revision was when the job began.
        num_bytes: bytes received so far.
        size_bytes: of the artifact, if its source tells.
        started_at: in seconds since 1970.
        result: what an upload of the same bytes would have been answered with.
        error: the ``error`` that a refused upload of the same bytes would have been answered with.
    """

    id: str
    tenant: str
    name: str
    source: str
    status: Literal["running", "done", "failed"] = "running"
    revision: str | None = None
    num_bytes: int = 0
    size_bytes: int | None = None
    started_at: float
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


# Bound on one tenant's jobs, on the whole server.
MAX_RUNNING = 4
# Jobs of one tenant, and of all, that are remembered after their end.
MAX_ENDED_OF_TENANT = 64
MAX_ENDED = 4096
INTERRUPTED = {
    "message": "the process that fetched the artifact has ended: send the request again",
    "type": "server_error",
    "param": None,
    "code": "internal_error",
}


@dataclass(slots=True)
class _Entry:
    """A job, and the process that runs it."""

    job: SourceJob
    process: Hashable


class SourceBoard:
    """The last state of each job of a server."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}  # by id, the oldest first

    def put(self, process: Hashable, job: SourceJob) -> bool:
        """Keep a state of a job that `process` runs. Return False for a new job of a tenant with `MAX_RUNNING` others.

        A state of a job that was forgotten is ignored.
        """
        if job.id not in self._entries:
            if job.status != "running":
                return True
            if self._num_running(job.tenant) >= MAX_RUNNING:
                return False
        self._entries[job.id] = _Entry(job, process)
        if job.status != "running":
            self._forget_oldest(job.tenant)
        return True

    def find(self, tenant: str, name: str, job_id: str) -> SourceJob | None:
        """Return the last state of a tenant's job for this variant; None if there is none or it was forgotten."""
        entry = self._entries.get(job_id)
        if entry is None or (entry.job.tenant, entry.job.name) != (tenant, name):
            return None
        return entry.job

    def lost(self, process: Hashable) -> None:
        """Fail the running jobs of a process that has ended."""
        for entry in self._entries.values():
            if entry.process == process and entry.job.status == "running":
                entry.job = msgspec.structs.replace(entry.job, status="failed", error=INTERRUPTED)

    def _num_running(self, tenant: str) -> int:
        jobs = (entry.job for entry in self._entries.values())
        return sum(job.tenant == tenant and job.status == "running" for job in jobs)

    def _forget_oldest(self, tenant: str) -> None:
        ended = [entry.job for entry in self._entries.values() if entry.job.status != "running"]
        theirs = [job for job in ended if job.tenant == tenant]
        surplus = (
            theirs[: max(0, len(theirs) - MAX_ENDED_OF_TENANT)] or ended[: max(0, len(ended) - MAX_ENDED)]
        )
        for job in surplus:
            del self._entries[job.id]


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


class PutSourceJob(SharedCall[bool], frozen=True, tag=True):
    """Keep a state of a job that this process runs. Answered by False for a new one of a tenant that has too many."""

    job: SourceJob


class FindSourceJob(SharedCall[SourceJob | None], frozen=True, tag=True):
    """Ask for the last state of a tenant's job."""

    tenant: str
    name: str
    job_id: str


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
    | PutSourceJob
    | FindSourceJob
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
