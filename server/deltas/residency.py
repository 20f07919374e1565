"""The deltas in slots: load, use, evict.

A delta is named by the label of its version, `tenant/name@N`. All users of a public variant share its slot; versions of
different tenants share none, also with the same bytes, so that no tenant sees, times or keeps another's.

The engine thread owns this object and never waits for a file in it. Loads run on other threads, into slots that no
batch reads. The engine calls `poll_loads` between steps to make finished loads visible, so a delta never appears in the
middle of a step.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain

from deltastore.errors import PeraxisError
from deltastore.loader import LoadReport
from deltastore.registry.records import VersionRecord
from server.deltas.fetcher import Fetcher
from server.deltas.resident import ResidentDelta, Slot
from server.errors import EngineFailed, InvalidRequest, LoadTimeout, RateLimited
from server.fairness import FairBudget
from server.metrics.metrics import ResidencyMetrics
from server.protocol.messages import Level

# How long after its last use a delta is kept from another tenant's calls to load.
KEPT_S = 60.0
# Tenants that used a delta last, of those whose uses are known.
MAX_USERS = 8
# Loads of one tenant under way at a time, as many as downloads: another tenant's next load waits for few.
MAX_LOADS = 4


@dataclass(slots=True)
class _SlotEntry:
    """A slot in use: the delta in it, its version, and how many users keep it there."""

    record: VersionRecord
    tenant: str  # that the load began for
    slot: Slot
    fetch: Future[tuple[ResidentDelta, LoadReport]]
    delta: ResidentDelta | None = None  # None while it loads
    num_users: int = 0
    is_pinned: bool = False
    # When each of the last tenants used it, the latest last, in seconds of `time.monotonic`; its load is no use.
    used_at: dict[str, float] = field(default_factory=dict)

    def users(self, now: float) -> set[str]:
        """Return the tenants that the slot counts for, as `Residency.kept_from` says."""
        recent = {tenant for tenant, at in self.used_at.items() if now - at < KEPT_S}
        return recent or {next(reversed(self.used_at), self.tenant)}


@dataclass(slots=True)
class _RetainedRecord:
    """The record of a version that may be asked for, and how many requests and calls may ask."""

    record: VersionRecord
    num_users: int = 0


@dataclass(frozen=True, slots=True)
class FinishedLoad:
    """The end of one load: the delta is resident, or `error` is the reason why not, behind the version's name."""

    version: str
    error: PeraxisError | None


class Residency:
    """Slots under least-recently-used eviction. A delta that is pinned, in use or loading is never evicted."""

    def __init__(
        self,
        slots: list[Slot],
        fetcher: Fetcher,
        metrics: ResidencyMetrics,
        on_load_ended: Callable[[], None],
    ) -> None:
        """`on_load_ended` is called on a loader thread when `poll_loads` has something to return."""
        self.slot_bytes = slots[0].memory.numel()
        self._free = list(reversed(slots))
        self._entries: OrderedDict[str, _SlotEntry] = OrderedDict()  # by version, least recently used first
        self._records: dict[str, _RetainedRecord] = {}
        self._fetcher = fetcher
        self._cache = fetcher.cache
        self._metrics = metrics
        self._resident: frozenset[str] = frozenset()
        self._pinned: frozenset[str] = frozenset()
        self._num_loading: Counter[str] = Counter()  # by tenant
        self._num_pins: Counter[str] = Counter()  # by tenant
        self._pin_changes: list[tuple[VersionRecord, bool]] = []
        self._on_load_ended = on_load_ended

    def retain(self, record: VersionRecord) -> None:
        """Keep a version's record, from which `load` reads its delta, until `forget` has been called as often as this.

        The scheduler asks for deltas by label alone. Each request and each call for a delta retains its record while
        it waits or runs. The bytes of the delta are not kept by this.
        """
        self._records.setdefault(record.label, _RetainedRecord(record)).num_users += 1

    def forget(self, version: str) -> None:
        """Undo one `retain`. A delta in a slot stays there."""
        retained = self._records[version]
        retained.num_users -= 1
        if not retained.num_users:
            del self._records[version]

    def is_resident(self, version: str) -> bool:
        """Return whether the delta can be used now."""
        entry = self._entries.get(version)
        return entry is not None and entry.delta is not None

    def is_loading(self, version: str) -> bool:
        entry = self._entries.get(version)
        return entry is not None and entry.delta is None

    def find(self, version: str) -> ResidentDelta | None:
        """Return the delta if it is resident, else None. Counts as a use."""
        if not self.is_resident(version):
            return None
        self._entries.move_to_end(version)
        return self._entries[version].delta

    def acquire(self, version: str) -> None:
        """Keep a resident delta in its slot until `release` has been called as often as this. Counts as a use."""
        self._entries[version].num_users += 1
        self._entries.move_to_end(version)

    def release(self, version: str) -> None:
        """Undo one `acquire`. Counts as a use."""
        self._entries[version].num_users -= 1
        self._entries.move_to_end(version)

    def note_use(self, version: str, tenant: str) -> None:
        """Note that a tenant has used a resident delta, which is then kept from others' calls to load."""
        used_at = self._entries[version].used_at
        used_at.pop(tenant, None)
        used_at[tenant] = time.monotonic()
        if len(used_at) > MAX_USERS:
            del used_at[next(iter(used_at))]

    def may_load(self, tenant: str) -> bool:
        """Return whether `load` may begin one more load for a tenant."""
        return self._num_loading[tenant] < MAX_LOADS

    def load(self, version: str, tenant: str, kept: Set[str] = frozenset()) -> bool:
        """Start to load a retained record's delta, unless it has a slot.

        Return False if no slot can be freed, or if `MAX_LOADS` loads of the tenant are under way. `kept` are versions
        that are not evicted for this load.
        """
        if version in self._entries:
            return True
        if not self.may_load(tenant) or (slot := self._take_slot(kept)) is None:
            return False
        record = self._records[version].record
        entry = self._entries[version] = _SlotEntry(record, tenant, slot, self._fetcher.fetch(record, slot))
        self._num_loading[tenant] += 1
        entry.fetch.add_done_callback(lambda _: self._on_load_ended())
        self._publish()
        return True

    def kept_from(self, tenant: str, now: float) -> set[str]:
        """Return the versions that a tenant's call to load may not evict: those used by others in the last `KEPT_S`.

        Only by tenants that would be left with fewer slots than it then has. A slot counts for each tenant that used it
        in the last `KEPT_S`, else for the one that did last, and before any use for the one that its load began for.
        """
        users = {version: entry.users(now) for version, entry in self._entries.items()}
        num_slots = Counter(chain.from_iterable(users.values()))
        few = {other for other in num_slots if num_slots[other] <= num_slots[tenant] + 1} - {tenant}
        return {
            version
            for version, entry in self._entries.items()
            if any(now - entry.used_at.get(other, -math.inf) < KEPT_S for other in few & users[version])
        }

    def poll_loads(self) -> Iterator[FinishedLoad]:
        """Make finished loads resident, free the slots of failed ones, and yield both."""
        ended = [e for e in self._entries.values() if e.delta is None and e.fetch.done()]
        for entry in ended:
            self._num_loading[entry.tenant] -= 1
            if not self._num_loading[entry.tenant]:
                del self._num_loading[entry.tenant]
            error = entry.fetch.exception()
            if error is None:
                entry.delta, report = entry.fetch.result()
                self._metrics.loaded(entry.record, report)
                self._publish()
            else:
                self._free_slot(entry)
                if not isinstance(error, PeraxisError):
                    what = f"{type(error).__name__}: {error}"
                    error = EngineFailed(f"it could not be loaded: {what}")
                self._metrics.load_failed(error)
                error = error.about(entry.record.label)
            yield FinishedLoad(entry.record.label, error)

    def evict(self, version: str, reason: str) -> bool:
        """Free the slot and the host copy of an idle delta. Return False if it is in use or loading."""
        entry = self._entries.get(version)
        if entry is not None:
            if entry.delta is None or entry.num_users:
                return False
            self._evict_from_slot(entry, reason)
        self._cache.drop(version, reason)
        return True

    def unload(self, version: str) -> bool:
        """Evict a delta. Return False if it is in use, loading or waited for, and nothing was changed: call again."""
        return version not in self._records and self.evict(version, "unload")

    def pin(self, record: VersionRecord) -> None:
        """Never evict a version's resident delta until `unpin`.

        Raises:
            InvalidRequest: all other slots are pinned already.
        """
        entry = self._entries[record.label]
        if entry.is_pinned:
            return
        if len(self._pinned) + 1 >= self.num_slots:
            raise InvalidRequest(
                "all slots that may be pinned are pinned already: unpin another variant first"
            )
        self._set_pin(entry, is_pinned=True)
        self._publish()

    def unpin(self, version: str) -> None:
        """Remove a version's pin, if it has one."""
        entry = self._entries.get(version)
        if entry is not None and entry.is_pinned:
            self._set_pin(entry, is_pinned=False)
            self._publish()

    def num_pinned_by(self, tenant: str) -> int:
        """Return how many versions a tenant pins."""
        return self._num_pins[tenant]

    def take_pin_changes(self) -> list[tuple[VersionRecord, bool]]:
        """Return the versions that were pinned (True) or unpinned since the last call, in order."""
        changes, self._pin_changes = self._pin_changes, []
        return changes

    @property
    def num_slots(self) -> int:
        return len(self._free) + len(self._entries)

    def level_of(self, version: str) -> Level:
        """Return where a delta is now. Any thread may call this; takes no lock."""
        if version in self._resident:
            return "device"
        return "host" if self._cache.holds(version) else "disk"

    def is_pinned(self, version: str) -> bool:
        """Return whether a delta is pinned. Any thread may call this; takes no lock."""
        return version in self._pinned

    def records(self) -> tuple[VersionRecord, ...]:
        """Return the version of each delta in memory, the least recently used first, those in slots last."""
        resident = [entry.record for entry in self._entries.values() if entry.delta is not None]
        copies = [record for record in self._cache.records() if record.label not in self._resident]
        return (*copies, *resident)

    def pinned_records(self) -> tuple[VersionRecord, ...]:
        """Return every pinned version, in the order of the deltas' last use."""
        return tuple(entry.record for entry in self._entries.values() if entry.is_pinned)

    def close(self) -> None:
        """Wait for running loads, then free their threads and memory."""
        self._fetcher.close()

    def _set_pin(self, entry: _SlotEntry, *, is_pinned: bool) -> None:
        entry.is_pinned = is_pinned
        tenant = entry.record.tenant
        self._num_pins[tenant] += 1 if is_pinned else -1
        if not self._num_pins[tenant]:
            del self._num_pins[tenant]
        self._pin_changes.append((entry.record, is_pinned))

    def _take_slot(self, kept: Set[str]) -> Slot | None:
        if not self._free:
            idle = (
                entry
                for version, entry in self._entries.items()
                if entry.delta and not entry.num_users and not entry.is_pinned and version not in kept
            )
            if (oldest := next(idle, None)) is None:
                return None
            self._evict_from_slot(oldest, "capacity")
            # It was used more recently than any delta that is only in host memory.
            self._cache.touch(oldest.record.label)
        return self._free.pop()

    def _evict_from_slot(self, entry: _SlotEntry, reason: str) -> None:
        self._free_slot(entry)
        self._metrics.evicted(entry.record, "device", reason)

    def _free_slot(self, entry: _SlotEntry) -> None:
        del self._entries[entry.record.label]
        if entry.is_pinned:
            self._set_pin(entry, is_pinned=False)
        # Views of the slot are refused from now on.
        entry.slot.generation += 1
        self._free.append(entry.slot)
        self._publish()

    def _publish(self) -> None:
        """Replace the sets that other threads read."""
        self._resident = frozenset(
            version for version, entry in self._entries.items() if entry.delta is not None
        )
        self._pinned = frozenset(version for version, entry in self._entries.items() if entry.is_pinned)
        self._metrics.slots(len(self._entries), len(self._pinned), len(self._resident))
        self._metrics.pinned(self._pinned)


# Tenants for which no slot is found in one step.
MAX_REFUSED = 8
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
        self._begin_loads(now)

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

    def _begin_loads(self, now: float) -> None:
        """Begin a load of each tenant in turn, until no slot can be freed for `MAX_REFUSED` of them."""
        waiting: dict[str, deque[Prefetch]] = {}
        for prefetch in self._prefetches:
            if not self._residency.is_loading(prefetch.record.label):
                waiting.setdefault(prefetch.record.tenant, deque()).append(prefetch)
        tenants = deque(tenant for tenant in self._turns if tenant in waiting)
        num_refused = 0
        while tenants and num_refused < MAX_REFUSED:
            tenant = tenants.popleft()
            if not self._residency.may_load(tenant):
                continue
            version, kept = waiting[tenant].popleft().record.label, self._residency.kept_from(tenant, now)
            has_begun = self._residency.load(version, tenant, kept)
            del self._turns[tenant]
            self._turns[tenant] = None
            num_refused += not has_begun
            if has_begun and waiting[tenant]:
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
