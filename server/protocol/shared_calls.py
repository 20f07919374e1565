"""The calls of an HTTP process to the state that all of them share, `server/shared_state.py`, and their answers."""

from __future__ import annotations

from functools import cache
from typing import Any, Generic, Protocol, TypeVar, get_args

from msgspec import Struct

from server.metrics.snapshot import Snapshot
from server.protocol.adapters import AdapterChange, LoadedAdapter
from server.protocol.limits import Admitted, Refused, Usage
from server.protocol.source_job import SourceJob
from server.protocol.stats import ServerStats

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
