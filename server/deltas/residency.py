"""The deltas in slots: load, use, evict. Knows digests and bytes; no HTTP, tenants or prompts.

Versions with the same bytes share one slot. Pins are of versions: a slot is pinned while any version pins it. A version
wants its delta from its first call or request until its `unload`, or until the delta has left memory. A delta is freed
on demand when the last version that wants it unloads it.

The engine thread owns this object and never waits for a file in it. Loads run on other threads, into slots that no
batch reads. The engine calls `poll_loads` between steps to make finished loads visible, so a delta never appears in the
middle of a step.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from deltastore.errors import PeraxisError
from deltastore.loader import LoadReport
from deltastore.registry.records import VersionRecord
from server.deltas.fetcher import Fetcher
from server.deltas.residency_metrics import ResidencyMetrics, WantingVersion
from server.deltas.resident import ResidentDelta, Slot
from server.deltas.wanted import WantedDeltas
from server.errors import EngineFailed, InvalidRequest
from server.protocol.messages import Level

# Loads of one tenant under way at a time, as many as downloads: another tenant's next load waits for few.
MAX_LOADS = 4


@dataclass(slots=True)
class _SlotEntry:
    """A slot in use: the delta in it, a version that has this delta, and how many users keep it there."""

    record: VersionRecord
    tenant: str  # that the load began for
    slot: Slot
    fetch: Future[tuple[ResidentDelta, LoadReport]]
    delta: ResidentDelta | None = None  # None while it loads
    num_users: int = 0
    pins: dict[str, VersionRecord] = field(default_factory=dict)  # by the label of the version


@dataclass(slots=True)
class _RetainedRecord:
    """The record of a delta that may be asked for, and how many requests and calls may ask."""

    record: VersionRecord
    num_users: int = 0


@dataclass(frozen=True, slots=True)
class FinishedLoad:
    """The end of one load: the delta is resident, or `error` is the reason why not, without the name of a version."""

    digest: str
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
        self._entries: OrderedDict[str, _SlotEntry] = OrderedDict()  # by digest, least recently used first
        self._records: dict[str, _RetainedRecord] = {}
        self._wanted = WantedDeltas(metrics)
        self._fetcher = fetcher
        self._cache = fetcher.cache
        self._metrics = metrics
        self._resident: frozenset[str] = frozenset()
        self._pinned: frozenset[str] = frozenset()
        self._num_loading: Counter[str] = Counter()  # by tenant
        self._num_pins: Counter[str] = Counter()  # versions by tenant
        self._pin_changes: list[tuple[VersionRecord, bool]] = []
        self._on_load_ended = on_load_ended

    def retain(self, record: VersionRecord) -> None:
        """Keep a version's record, from which `load` reads its delta, until `forget` has been called as often as this.

        The scheduler asks for deltas by digest alone. Each request and each call for a delta retains its record while
        it waits or runs. The bytes of the delta are not kept by this. From now on the version wants its delta.
        """
        self._wanted.add(record)
        self._records.setdefault(record.digest, _RetainedRecord(record)).num_users += 1

    def forget(self, digest: str) -> None:
        """Undo one `retain`. A delta in a slot stays there."""
        retained = self._records[digest]
        retained.num_users -= 1
        if not retained.num_users:
            del self._records[digest]
            self._forget_absent(digest)

    def is_resident(self, digest: str) -> bool:
        """Return whether the delta can be used now."""
        entry = self._entries.get(digest)
        return entry is not None and entry.delta is not None

    def is_loading(self, digest: str) -> bool:
        entry = self._entries.get(digest)
        return entry is not None and entry.delta is None

    def find(self, digest: str) -> ResidentDelta | None:
        """Return the delta if it is resident, else None. Counts as a use."""
        if not self.is_resident(digest):
            return None
        self._entries.move_to_end(digest)
        return self._entries[digest].delta

    def acquire(self, digest: str) -> None:
        """Keep a resident delta in its slot until `release` has been called as often as this. Counts as a use."""
        self._entries[digest].num_users += 1
        self._entries.move_to_end(digest)

    def release(self, digest: str) -> None:
        """Undo one `acquire`. Counts as a use."""
        entry = self._entries[digest]
        entry.num_users -= 1
        self._entries.move_to_end(digest)

    def may_load(self, tenant: str) -> bool:
        """Return whether `load` may begin one more load for a tenant."""
        return self._num_loading[tenant] < MAX_LOADS

    def load(self, digest: str, tenant: str) -> bool:
        """Start to load a retained record's delta, unless it has a slot.

        Return False if no slot can be freed, or if `MAX_LOADS` loads of the tenant are under way.
        """
        if digest in self._entries:
            return True
        if not self.may_load(tenant) or (slot := self._take_slot()) is None:
            return False
        record = self._records[digest].record
        entry = self._entries[digest] = _SlotEntry(record, tenant, slot, self._fetcher.fetch(record, slot))
        self._num_loading[tenant] += 1
        entry.fetch.add_done_callback(lambda _: self._on_load_ended())
        self._publish()
        return True

    def poll_loads(self) -> Iterator[FinishedLoad]:
        """Make finished loads resident, free the slots of failed ones, and yield both."""
        ended = [e for e in self._entries.values() if e.delta is None and e.fetch.done()]
        if ended:
            # A load drives other deltas out of slots and, on its thread, out of the host cache.
            for digest in self._wanted.digests():
                self._forget_absent(digest)
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
            yield FinishedLoad(entry.record.digest, error)

    def evict(self, digest: str, reason: str) -> bool:
        """Free the slot and the host copy of an idle delta. Return False if it is in use or loading."""
        entry = self._entries.get(digest)
        if entry is not None:
            if entry.delta is None or entry.num_users:
                return False
            self._evict_from_slot(entry, reason)
        self._cache.drop(digest, reason)
        return True

    def unload(self, record: VersionRecord) -> bool:
        """Note that a version no longer wants its delta, and evict the delta unless another version wants it.

        Return False if the delta is in use, loading or waited for, and nothing was changed: call again.
        """
        if self._wanted.is_wanted_besides(record.digest, record.label):
            self._wanted.remove(record.digest, record.label)
            return True
        if record.digest in self._records or not self.evict(record.digest, "unload"):
            return False
        self._wanted.forget(record.digest)
        return True

    def pin(self, record: VersionRecord) -> None:
        """Never evict a version's resident delta until `unpin` of the same version.

        Raises:
            InvalidRequest: all other slots are pinned already.
        """
        entry = self._entries[record.digest]
        others = sum(bool(other.pins) for other in self._entries.values() if other is not entry)
        if others + 1 >= self.num_slots:
            raise InvalidRequest(
                "all slots that may be pinned are pinned already: unpin another variant first"
            )
        if record.label not in entry.pins:
            entry.pins[record.label] = record
            self._note_pin(record, is_pinned=True)
        self._publish()

    def unpin(self, record: VersionRecord) -> None:
        """Remove a version's pin, if it has one. The pins of other versions with the same bytes stay."""
        entry = self._entries.get(record.digest)
        if entry is not None and (pinned := entry.pins.pop(record.label, None)) is not None:
            self._note_pin(pinned, is_pinned=False)
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

    def level_of(self, digest: str) -> Level:
        """Return where a delta is now. Any thread may call this; takes no lock."""
        if digest in self._resident:
            return "device"
        return "host" if self._cache.holds(digest) else "disk"

    def is_pinned(self, digest: str) -> bool:
        """Return whether any version pins a delta. Any thread may call this; takes no lock."""
        return digest in self._pinned

    def is_wanted(self, digest: str, label: str) -> bool:
        """Return whether the version of this label wants its delta."""
        return self._wanted.is_wanted_by(digest, label)

    def has_pin(self, digest: str, label: str) -> bool:
        """Return whether the version of this label pins its delta."""
        entry = self._entries.get(digest)
        return entry is not None and label in entry.pins

    def records(self) -> tuple[VersionRecord, ...]:
        """Return a version of each delta in memory, the least recently used first, those in slots last."""
        resident = [entry.record for entry in self._entries.values() if entry.delta is not None]
        copies = [record for record in self._cache.records() if record.digest not in self._resident]
        return (*copies, *resident)

    def wanting(self, digest: str) -> Mapping[str, WantingVersion]:
        """Return versions that want a delta, by label: one if any does, and others within a bound over all deltas."""
        return self._wanted.listed(digest)

    def pinned_records(self) -> tuple[VersionRecord, ...]:
        """Return every version that pins its delta, in the order of the deltas' last use."""
        return tuple(record for entry in self._entries.values() for record in entry.pins.values())

    def close(self) -> None:
        """Wait for running loads, then free their threads and memory."""
        self._fetcher.close()

    def _forget_absent(self, digest: str) -> None:
        """Forget which versions want a delta that has left memory and that nothing waits for."""
        if digest not in self._entries and digest not in self._records and not self._cache.holds(digest):
            self._wanted.forget(digest)

    def _note_pin(self, record: VersionRecord, *, is_pinned: bool) -> None:
        self._num_pins[record.tenant] += 1 if is_pinned else -1
        if not self._num_pins[record.tenant]:
            del self._num_pins[record.tenant]
        self._pin_changes.append((record, is_pinned))

    def _take_slot(self) -> Slot | None:
        if not self._free:
            idle = (e for e in self._entries.values() if e.delta and not e.num_users and not e.pins)
            if (oldest := next(idle, None)) is None:
                return None
            self._evict_from_slot(oldest, "capacity")
            # It was used more recently than any delta that is only in host memory.
            self._cache.touch(oldest.record.digest)
        return self._free.pop()

    def _evict_from_slot(self, entry: _SlotEntry, reason: str) -> None:
        self._free_slot(entry)
        self._metrics.evicted(entry.record.digest, "device", reason)

    def _free_slot(self, entry: _SlotEntry) -> None:
        del self._entries[entry.record.digest]
        for record in entry.pins.values():
            self._note_pin(record, is_pinned=False)
        # Views of the slot are refused from now on.
        entry.slot.generation += 1
        self._free.append(entry.slot)
        self._publish()

    def _publish(self) -> None:
        """Replace the sets that other threads read."""
        self._resident = frozenset(
            digest for digest, entry in self._entries.items() if entry.delta is not None
        )
        self._pinned = frozenset(digest for digest, entry in self._entries.items() if entry.pins)
        self._metrics.slots(len(self._entries), len(self._pinned), len(self._resident))
        self._metrics.pinned(
            (digest, record.name) for digest, entry in self._entries.items() for record in entry.pins.values()
        )
