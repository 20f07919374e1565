"""Which deltas are in slots: load, keep, evict. Knows digests and bytes; nothing of HTTP, tenants or prompts.

The engine thread owns this object. Loads run on threads of their own, into slots that nobody reads; `adopt` makes what
they finished visible, and the engine calls it between steps, so a delta appears at a step boundary or not at all.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from deltastore.artifact import Artifact
from deltastore.errors import (
    CorruptObject,
    PeraxisError,
    RegistryError,
    VariantNotFound,
    VariantQuarantined,
)
from deltastore.loader import Loader, LoadReport, ObjectSource
from deltastore.records import VersionRecord
from deltastore.registry import Registry
from server.deltas.resident import DeltaPlan, ResidentDelta, Slot
from server.errors import EngineFailed, InvalidRequest


class Observer(Protocol):
    """What residency tells the world; metrics implement it."""

    def loaded(self, record: VersionRecord, report: LoadReport) -> None: ...
    def load_failed(self, record: VersionRecord, error: PeraxisError) -> None: ...
    def evicted(self, record: VersionRecord, reason: str) -> None: ...
    def occupancy(self, num_used: int, num_pinned: int, num_resident: int) -> None: ...


@dataclass(slots=True)
class _Entry:
    """A slot's tenant: what is in it and who needs it there."""

    record: VersionRecord
    slot: Slot
    delta: ResidentDelta | None = None  # None while it loads
    num_users: int = 0
    pinned: bool = False
    started: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Adopted:
    """The end of one load: the delta is resident, or `error` says why it is not."""

    record: VersionRecord
    error: PeraxisError | None
    load_s: float


class Residency:
    """Slots under least-recently-used eviction. A delta that is pinned, in use or loading is never evicted."""

    def __init__(self, slots: list[Slot], loader: Loader, registry: Registry, observer: Observer) -> None:
        self.slot_bytes = slots[0].memory.numel()
        self._free = list(reversed(slots))
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # by digest, least recently used first
        self._loader = loader
        self._registry = registry
        self._observer = observer
        self._pool = ThreadPoolExecutor(loader.num_buffers, thread_name_prefix="delta-load")
        self._loads: dict[str, Future[tuple[DeltaPlan, LoadReport]]] = {}
        self._levels: Mapping[str, str] = {}
        self._pinned: frozenset[str] = frozenset()
        self.on_finished: Callable[[], None] = lambda: None  # called on a loader thread: wakes the engine

    def find(self, digest: str) -> ResidentDelta | None:
        """The delta if it can be used now; counts as a use of it."""
        entry = self._entries.get(digest)
        if entry is None or entry.delta is None:
            return None
        self._entries.move_to_end(digest)
        return entry.delta

    def retain(self, delta: ResidentDelta) -> None:
        """Keep a delta in its slot until `release`."""
        self._entries[delta.digest].num_users += 1

    def release(self, delta: ResidentDelta) -> None:
        self._entries[delta.digest].num_users -= 1

    def load(self, record: VersionRecord) -> bool:
        """Begin to load, unless it is loading or resident already. False when every slot is taken by what must stay."""
        if record.digest in self._entries:
            return True
        slot = self._take_slot()
        if slot is None:
            return False
        self._entries[record.digest] = _Entry(record, slot)
        future = self._pool.submit(self._read, record, slot)
        self._loads[record.digest] = future
        future.add_done_callback(lambda _: self.on_finished())
        self._publish()
        return True

    def adopt(self) -> Iterator[Adopted]:
        """Make finished loads visible, and give back the slots of failed ones."""
        for digest in [digest for digest, future in self._loads.items() if future.done()]:
            future, entry = self._loads.pop(digest), self._entries[digest]
            load_s = time.monotonic() - entry.started
            error = future.exception()
            if error is None:
                plan, report = future.result()
                entry.delta = ResidentDelta.in_slot(plan, entry.slot)
                self._observer.loaded(entry.record, report)
            else:
                self._drop(digest)
                if not isinstance(error, PeraxisError):
                    error = EngineFailed(
                        f"{label(entry.record)} could not be loaded: {type(error).__name__}: {error}"
                    )
                self._observer.load_failed(entry.record, error)
            self._publish()
            yield Adopted(entry.record, error, load_s)

    def evict(self, digest: str, reason: str) -> bool:
        """Free the slot of an idle delta, if it has one; False when it is in use or loading."""
        entry = self._entries.get(digest)
        if entry is None:
            return True
        if entry.delta is None or entry.num_users:
            return False
        self._drop(digest)
        self._observer.evicted(entry.record, reason)
        self._publish()
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

    def level_of(self, digest: str) -> str:
        """``gpu`` or ``disk``; a snapshot that any thread may read."""
        return self._levels.get(digest, "disk")

    def is_pinned(self, digest: str) -> bool:
        """A snapshot that any thread may read."""
        return digest in self._pinned

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._loader.close()

    def _read(self, record: VersionRecord, slot: Slot) -> tuple[DeltaPlan, LoadReport]:
        """On a loader thread: bytes into a slot that nobody reads yet, then their places from the verified header."""
        path, where = self._registry.object_path(record.digest), label(record)
        source = ObjectSource(
            path,
            record.digest,
            record.size_bytes,
            record.data_start,
            record.device_bytes,
            record.chunk_sha256,
        )
        try:
            report = self._loader.load(source, slot.memory)
        except CorruptObject as error:
            self._registry.quarantine(record.digest, str(error))
            raise VariantQuarantined(
                f"{where}: its stored object is corrupt and was quarantined: upload it again"
            ) from error
        except RegistryError as error:
            if path.exists():
                raise
            raise VariantNotFound(
                f"{where}: its object is no longer in the registry: upload it again"
            ) from error
        with Artifact.open(path, where) as artifact:
            return DeltaPlan.of(artifact, record.digest), report

    def _take_slot(self) -> Slot | None:
        if not self._free:
            idle = (
                d
                for d, e in self._entries.items()
                if e.delta is not None and not e.num_users and not e.pinned
            )
            if (oldest := next(idle, None)) is None:
                return None
            self.evict(oldest, "capacity")
        return self._free.pop()

    def _drop(self, digest: str) -> None:
        entry = self._entries.pop(digest)
        entry.slot.generation += 1  # from here on, stale views of it are refused
        self._free.append(entry.slot)

    def _publish(self) -> None:
        """Replace the snapshots that other threads read."""
        self._levels = {digest: "gpu" for digest, entry in self._entries.items() if entry.delta is not None}
        self._pinned = frozenset(digest for digest, entry in self._entries.items() if entry.pinned)
        self._observer.occupancy(len(self._entries), len(self._pinned), len(self._levels))


def label(record: VersionRecord) -> str:
    """What messages call a version."""
    return f"{record.tenant}/{record.name}@{record.version}"
