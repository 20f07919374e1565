"""Calls that load, pin or unload a delta, kept until they can be answered. Engine thread only."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from deltastore.errors import PeraxisError
from deltastore.registry.records import VersionRecord
from server.deltas.residency import Residency
from server.errors import LoadTimeout, RateLimited
from server.fair_budget import FairBudget

# Calls that wait for their outcome. One tenant may have as many as are left for others.
MAX_CALLS = 256


@dataclass(slots=True, eq=False)
class Prefetch:
    """A call to load a version and, with `pin`, to never evict it."""

    record: VersionRecord
    pin: bool
    future: Future[None]
    max_pinned: int | None = None  # versions that the version's tenant may pin
    called_at: float = field(default_factory=time.monotonic)


@dataclass(slots=True, eq=False)
class Unload:
    """A call to unpin a version and to free its slot once no request runs on it."""

    record: VersionRecord
    future: Future[None]


class ResidencyCalls:
    """Answers calls when their delta is loaded or unloaded. An equal call joins a pending one.

    The calls of all tenants share `MAX_CALLS`, and begin loads in tenants' turns.
    """

    def __init__(self, residency: Residency, load_timeout_s: float) -> None:
        self._residency = residency
        self._load_timeout_s = load_timeout_s
        self._budget = FairBudget(MAX_CALLS, "calls to load and unload variants")
        # Tenants with calls to load, the next one to begin a load first.
        self._turns: dict[str, None] = {}
        self._prefetches: list[Prefetch] = []
        self._unloads: list[Unload] = []

    def add_prefetch(self, call: Prefetch) -> None:
        """Take a call to load. A pending call to unload the same version is answered: this one is newer.

        Raises:
            QueueFull: too many calls of its tenant wait.
        """
        # What an engine before this one had pinned is pinned again whatever the tenant asks for meanwhile.
        if not call.pin or call.max_pinned is not None:
            self._count(call.record.tenant, call.future)
        for unload in [u for u in self._unloads if u.record.label == call.record.label]:
            self._unloads.remove(unload)
            unload.future.set_result(None)
        asked = call.record.label, call.pin, call.max_pinned
        for pending in self._prefetches:
            if (pending.record.label, pending.pin, pending.max_pinned) == asked:
                _follow(pending.future, call.future)
                return
        self._residency.retain(call.record)
        self._turns.setdefault(call.record.tenant)
        self._prefetches.append(call)

    def add_unload(self, call: Unload) -> None:
        """Take a call to unload; the version's own pin ends now, and what nothing uses is freed now.

        Raises:
            QueueFull: too many calls of its tenant wait.
        """
        self._residency.unpin(call.record.label)
        same = [pending for pending in self._unloads if pending.record.label == call.record.label]
        if not same and self._residency.unload(call.record.label):
            call.future.set_result(None)
            return
        self._count(call.record.tenant, call.future)
        if same:
            _follow(same[0].future, call.future)
        else:
            self._unloads.append(call)

    def serve(self, now: float) -> None:
        """Start loads, evict unused deltas, and answer the calls that are done or late."""
        for unload in [u for u in self._unloads if self._residency.unload(u.record.label)]:
            self._unloads.remove(unload)
            unload.future.set_result(None)
        for prefetch in list(self._prefetches):
            self._end_if_over(prefetch, now)
        self._begin_loads()

    def fail_prefetches(self, version: str, error: PeraxisError) -> None:
        """Answer the calls to load a delta whose load has failed."""
        for prefetch in [prefetch for prefetch in self._prefetches if prefetch.record.label == version]:
            self._end_prefetch(prefetch)
            prefetch.future.set_exception(error)

    def fail_all(self, error: PeraxisError) -> None:
        """Answer every pending call with an error: the engine stops."""
        pending: list[Prefetch | Unload] = [*self._prefetches, *self._unloads]
        self._prefetches, self._unloads, self._turns = [], [], {}
        for call in pending:
            call.future.set_exception(error)

    def _count(self, tenant: str, future: Future[None]) -> None:
        """Count a call until it has an outcome."""
        self._budget.take(tenant, 1)
        future.add_done_callback(lambda _: self._budget.give_back(tenant, 1))

    def _begin_loads(self) -> None:
        """Begin a load of each tenant in turn, until no slot can be freed."""
        waiting: dict[str, deque[Prefetch]] = {}
        for prefetch in self._prefetches:
            if not self._residency.is_loading(prefetch.record.label):
                waiting.setdefault(prefetch.record.tenant, deque()).append(prefetch)
        tenants = deque(tenant for tenant in self._turns if tenant in waiting)
        while tenants:
            tenant = tenants.popleft()
            if not self._residency.may_load(tenant):
                continue
            if not self._residency.load(waiting[tenant].popleft().record.label, tenant):
                return
            del self._turns[tenant]
            self._turns[tenant] = None
            if waiting[tenant]:
                tenants.append(tenant)

    def _end_if_over(self, prefetch: Prefetch, now: float) -> None:
        """Answer a call whose delta is resident, that may not pin, or that is late."""
        resident, refusal = self._residency.is_resident(prefetch.record.label), self._refusal_of_pin(prefetch)
        if refusal is None and not resident and now - prefetch.called_at <= self._load_timeout_s:
            return
        self._end_prefetch(prefetch)
        try:
            if refusal is not None:
                raise refusal
            if not resident:
                raise load_timeout(prefetch.record, self._load_timeout_s)
            if prefetch.pin:
                self._residency.pin(prefetch.record)
            prefetch.future.set_result(None)
        except PeraxisError as error:
            prefetch.future.set_exception(error)

    def _refusal_of_pin(self, prefetch: Prefetch) -> RateLimited | None:
        """Return the error of a pin beyond its tenant's limit. Only the engine knows the pins of all clients."""
        if not prefetch.pin or prefetch.max_pinned is None:
            return None
        record = prefetch.record
        num_pinned = self._residency.num_pinned_by(record.tenant)
        if num_pinned - self._residency.is_pinned(record.label) < prefetch.max_pinned:
            return None
        return RateLimited(
            f"tenant {record.tenant!r} may pin {prefetch.max_pinned} versions and has pinned {num_pinned}: "
            "unpin another variant first",
            "max_pinned",
        )

    def _end_prefetch(self, prefetch: Prefetch) -> None:
        self._prefetches.remove(prefetch)
        if all(other.record.tenant != prefetch.record.tenant for other in self._prefetches):
            del self._turns[prefetch.record.tenant]
        self._residency.forget(prefetch.record.label)


def _follow(first: Future[None], later: Future[None]) -> None:
    """Give a later call the outcome of an equal one."""

    def answer(done: Future[None]) -> None:
        error = done.exception()
        if error is None:
            later.set_result(None)
        else:
            later.set_exception(error)

    first.add_done_callback(answer)


def load_timeout(record: VersionRecord, load_timeout_s: float) -> LoadTimeout:
    """Return the error of a request or call whose delta was not loaded in time."""
    return LoadTimeout(
        f"{record.label} found no slot or was not loaded within {load_timeout_s:g} s: "
        "try again later, or unpin another variant"
    )
