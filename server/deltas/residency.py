"""Which deltas are in slots: load, keep, evict. Knows digests and bytes; nothing of HTTP, tenants or prompts.

The engine thread owns this object and waits for no file in it. Loads run on threads of their own, into slots that
nobody reads; `adopt` makes what they finished visible, and the engine calls it between steps, so a delta appears at a
step boundary or not at all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from deltastore.errors import PeraxisError
from deltastore.registry.records import VersionRecord
from server.deltas.fetcher import Fetched, Fetcher, label
from server.deltas.residency_metrics import ResidencyMetrics
from server.deltas.resident import ResidentDelta, Slot
from server.errors import EngineFailed, InvalidRequest

Level = Literal["device", "host", "disk"]


@dataclass(slots=True)
class _Entry:
    """A slot's tenant: what is in it and who needs it there."""

    record: VersionRecord
    slot: Slot
    fetch: Future[Fetched]
    delta: ResidentDelta | None = None  # None while it loads
    num_users: int = 0
    pinned: bool = False


@dataclass(slots=True)
class _Known:
    """A version that somebody may ask for by its digest alone."""

    record: VersionRecord
    num_users: int = 0


@dataclass(frozen=True, slots=True)
class FinishedLoad:
    """The end of one load: the delta is resident, or `error` says why it is not."""

    record: VersionRecord
    error: PeraxisError | None


class Residency:
    """Slots under least-recently-used eviction. A delta that is pinned, held or loading is never evicted."""

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
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # by digest, least recently used first
        self._known: dict[str, _Known] = {}
        self._fetcher = fetcher
        self._cache = fetcher.cache
        self._metrics = metrics
        self._resident: frozenset[str] = frozenset()
        self._pinned: frozenset[str] = frozenset()
        self._on_load_ended = on_load_ended

    def retain(self, record: VersionRecord) -> None:
        """Remember what a digest stands for until `forget` was called as often."""
        self._known.setdefault(record.digest, _Known(record)).num_users += 1

    def forget(self, digest: str) -> None:
        known = self._known[digest]
        known.num_users -= 1
        if not known.num_users:
            del self._known[digest]

    def is_resident(self, digest: str) -> bool:
        """Whether the delta can be used now."""
        entry = self._entries.get(digest)
        return entry is not None and entry.delta is not None

    def is_loading(self, digest: str) -> bool:
        entry = self._entries.get(digest)
        return entry is not None and entry.delta is None

    def find(self, digest: str) -> ResidentDelta | None:
        """The delta if it can be used now; counts as a use of it."""
        if not self.is_resident(digest):
            return None
        self._entries.move_to_end(digest)
        return self._entries[digest].delta

    def hold(self, digest: str) -> None:
        """Keep a resident delta in its slot until `let_go` was called as often; counts as a use of it."""
        assert self.is_resident(digest)
        self._entries[digest].num_users += 1
        self._entries.move_to_end(digest)

    def let_go(self, digest: str) -> None:
        """End a hold; the delta has been used until now."""
        entry = self._entries[digest]
        assert entry.num_users
        entry.num_users -= 1
        self._entries.move_to_end(digest)

    def load(self, digest: str) -> bool:
        """Begin to load a known version, unless it is loading or resident. False: all slots hold what must stay."""
        if digest in self._entries:
            return True
        record, slot = self._known[digest].record, self._take_slot()
        if slot is None:
            return False
        entry = self._entries[digest] = _Entry(record, slot, self._fetcher.fetch(record, slot))
        entry.fetch.add_done_callback(lambda _: self._on_load_ended())
        self._publish()
        return True

    def poll_loads(self) -> Iterator[FinishedLoad]:
        """Make finished loads visible, and give back the slots of failed ones."""
        for entry in [e for e in self._entries.values() if e.delta is None and e.fetch.done()]:
            error = entry.fetch.exception()
            if error is None:
                entry.delta = entry.fetch.result().delta
                self._metrics.loaded(entry.record, entry.fetch.result().report)
                self._publish()
            else:
                self._give_back(entry)
                if not isinstance(error, PeraxisError):
                    what = f"{type(error).__name__}: {error}"
                    error = EngineFailed(f"{label(entry.record)} could not be loaded: {what}")
                self._metrics.load_failed(error)
            yield FinishedLoad(entry.record, error)

    def evict(self, digest: str, reason: str) -> bool:
        """Free all memory of an idle delta, that of its host copy too; False when it is held or loading."""
        entry = self._entries.get(digest)
        if entry is not None:
            if entry.delta is None or entry.num_users:
                return False
            self._leave_slot(entry, reason)
        self._cache.drop(digest, reason)
        return True

    def pin(self, digest: str) -> None:
        """Keep a resident delta for good. At least one slot is left to everybody else: InvalidRequest."""
        entry = self._entries[digest]
        others = sum(other.pinned for other in self._entries.values() if other is not entry)
        if others + 1 >= self.num_slots:
            raise InvalidRequest(
                f"{others} of {self.num_slots} slots are pinned already: unpin another variant first"
            )
        entry.pinned = True
        self._publish()

    def unpin(self, digest: str) -> None:
        """Let a delta be evicted again; one that is not there needs nothing."""
        if digest in self._entries:
            self._entries[digest].pinned = False
            self._publish()

    @property
    def num_slots(self) -> int:
        return len(self._free) + len(self._entries)

    def level_of(self, digest: str) -> Level:
        """Where a delta could be used or loaded from now; any thread may ask, no lock is taken."""
        if digest in self._resident:
            return "device"
        return "host" if self._cache.holds(digest) else "disk"

    def is_pinned(self, digest: str) -> bool:
        """A snapshot that any thread may read."""
        return digest in self._pinned

    def close(self) -> None:
        """Let running loads end and give their threads and memory back."""
        self._fetcher.close()

    def _take_slot(self) -> Slot | None:
        if not self._free:
            idle = (e for e in self._entries.values() if e.delta and not e.num_users and not e.pinned)
            if (oldest := next(idle, None)) is None:
                return None
            self._leave_slot(oldest, "capacity")
            self._cache.touch(oldest.record.digest)  # it was in use longer than what has no slot
        return self._free.pop()

    def _leave_slot(self, entry: _Entry, reason: str) -> None:
        self._give_back(entry)
        self._metrics.evicted(entry.record, "device", reason)

    def _give_back(self, entry: _Entry) -> None:
        del self._entries[entry.record.digest]
        entry.slot.generation += 1  # from here on, stale views of it are refused
        self._free.append(entry.slot)
        self._publish()

    def _publish(self) -> None:
        """Replace the snapshots that other threads read."""
        self._resident = frozenset(
            digest for digest, entry in self._entries.items() if entry.delta is not None
        )
        self._pinned = frozenset(digest for digest, entry in self._entries.items() if entry.pinned)
        self._metrics.slots(len(self._entries), len(self._pinned), len(self._resident))
