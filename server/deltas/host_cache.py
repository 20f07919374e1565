"""Recently used deltas in host memory: verified device sections, and the memory that loads read into.

All of it is one allocation made at start, pinned for CUDA: pinning during a load would take longer than the load. Knows
stretches of bytes; nothing of files or slots. Loads on several threads share it.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltastore.errors import SettingsError
from deltastore.registry.records import VersionRecord
from server.deltas.residency_metrics import ResidencyMetrics
from server.deltas.resident import DeltaPlan

PAGE_BYTES = 4096
UNITS_PER_SLOT = 8


@dataclass(frozen=True, slots=True, eq=False)
class HostCopy:
    """A delta as its artifact has it, verified."""

    record: VersionRecord
    plan: DeltaPlan
    memory: Tensor  # [device_bytes] uint8


@dataclass(slots=True, eq=False)
class Room:
    """A stretch of the cache's memory. It is free again when nobody uses it and it keeps no copy."""

    memory: Tensor  # [device_bytes] uint8
    start: int
    num_bytes: int  # whole units
    num_users: int = 1
    copy: HostCopy | None = None  # what it is kept for


class HostCache:
    """Host copies under least-recently-used eviction, whole ones. What is being read or copied from is never evicted.

    Each is one stretch, so that it is one copy to a slot. Stretches come in eighths of a slot: deltas of nearly the
    same size can take each other's place, and the memory does not fall into pieces too small for any.
    Staged loads need host memory: where the limit is too small for those that run at once, it is taken beside it and
    given up after each load. Other loads read what has no place below the limit straight into its slot.
    """

    def __init__(
        self,
        limit_bytes: int,
        slot_bytes: int,
        num_loads: int,
        device: torch.device,
        metrics: ResidencyMetrics,
        *,
        is_staged: bool,
    ) -> None:
        """Take the memory.

        Args:
            limit_bytes: how much is kept at most; 0 keeps nothing.
            slot_bytes: the largest delta.
            num_loads: how many loads can always run at once.
            device: where the slots are.
            is_staged: loads must go through host memory, as copies to CUDA do.

        Raises:
            SettingsError: there is not so much memory.
        """
        self.num_loads = num_loads
        self.limit_bytes = limit_bytes
        self._unit_bytes = _rounded_up(-(-slot_bytes // UNITS_PER_SLOT), PAGE_BYTES)
        self._is_staged = is_staged
        staging = num_loads * UNITS_PER_SLOT * self._unit_bytes if is_staged else 0
        size = max(limit_bytes, staging)
        self._pool = _allocate(size, device)
        self._pinned = device.type == "cuda"
        self._holes = Holes(size)
        self._kept: OrderedDict[str, Room] = OrderedDict()  # by digest, least recently used first
        self._num_kept_bytes = 0
        self._changed = threading.Condition()
        self._metrics = metrics

    def holds(self, digest: str) -> bool:
        """Whether there is a copy of a delta now. Takes no lock."""
        return digest in self._kept

    def touch(self, digest: str) -> None:
        """Count a use of a copy, if there is one."""
        with self._changed:
            if digest in self._kept:
                self._kept.move_to_end(digest)

    @contextmanager
    def copy_of(self, digest: str) -> Iterator[HostCopy | None]:
        """The copy of a delta, which stays while the block runs, or None; counts as a use of it."""
        with self._changed:
            if (room := self._kept.get(digest)) is not None:
                room.num_users += 1
                self._kept.move_to_end(digest)
                copy = room.copy
        if room is None:
            yield None
            return
        try:
            yield copy
        finally:
            self._leave(room)

    @contextmanager
    def room(self, device_bytes: int) -> Iterator[Room | None]:
        """Memory to read a delta into. Idle copies make place; where that is not enough, staged loads wait for others.

        Args:
            device_bytes: at most a slot's.

        Yields:
            The memory, or None where a load that is not staged finds no place and reads straight into its slot.
        """
        num_bytes = _rounded_up(max(device_bytes, 1), self._unit_bytes)
        if (start := self._reserve(num_bytes)) is None:
            yield None
            return
        room = Room(self._pool[start : start + device_bytes], start, num_bytes)
        try:
            yield room
        finally:
            self._leave(room)

    def keep(self, room: Room, record: VersionRecord, plan: DeltaPlan) -> None:
        """Make what was read into a room a copy of its own, unless the limit or copies in use leave no place for it."""
        with self._changed:
            assert record.digest not in self._kept
            if room.num_bytes > self.limit_bytes:
                return
            while self._num_kept_bytes + room.num_bytes > self.limit_bytes:
                if not self._evict_idle():
                    return
            room.copy = HostCopy(record, plan, room.memory)
            self._kept[record.digest] = room
            self._num_kept_bytes += room.num_bytes
            self._metrics.arrived(record, "host")
            self._publish()

    def drop(self, digest: str, reason: str) -> None:
        """Forget a copy, if there is one. Whoever copies from it now goes on."""
        with self._changed:
            if (room := self._kept.pop(digest, None)) is None:
                return
            assert room.copy is not None
            self._num_kept_bytes -= room.num_bytes
            self._metrics.evicted(room.copy.record, "host", reason)
            self._publish()
            room.copy = None
            self._free_if_unused(room)

    def close(self) -> None:
        """Give the memory back. Nothing may use it any more."""
        if self._pinned:
            torch.cuda.check_error(_cudart().cudaHostUnregister(self._pool.data_ptr()))
            self._pinned = False
        self._kept.clear()
        self._pool = torch.empty(0, dtype=torch.uint8)

    def _reserve(self, num_bytes: int) -> int | None:
        """Take a stretch; where there is none, staged loads wait for one and others get None."""
        with self._changed:
            if num_bytes > self.limit_bytes and not self._is_staged:
                return None
            while (start := self._holes.take(num_bytes)) is None:
                if self._evict_idle():
                    continue
                if not self._is_staged:
                    return None
                self._changed.wait()
            return start

    def _evict_idle(self) -> bool:
        """Evict the least recently used copy that nobody uses. False where there is none."""
        idle = next((digest for digest, room in self._kept.items() if not room.num_users), None)
        if idle is None:
            return False
        self.drop(idle, "capacity")
        return True

    def _leave(self, room: Room) -> None:
        with self._changed:
            room.num_users -= 1
            self._free_if_unused(room)

    def _free_if_unused(self, room: Room) -> None:
        if not room.num_users:
            if room.copy is None:
                self._holes.give(room.start, room.num_bytes)
            self._changed.notify_all()

    def _publish(self) -> None:
        self._metrics.host_cache(len(self._kept), self._num_kept_bytes)


class Holes:
    """The free stretches of some memory: first fit, neighbours merged."""

    def __init__(self, num_bytes: int) -> None:
        self._holes = [(0, num_bytes)]  # start and end, in order

    def take(self, num_bytes: int) -> int | None:
        """Where a stretch of so many bytes begins, which is no hole any more; None where no hole is as large."""
        for index, (start, end) in enumerate(self._holes):
            if end - start >= num_bytes:
                left = (start + num_bytes, end)
                self._holes[index : index + 1] = [left] if left[0] < end else []
                return start
        return None

    def give(self, start: int, num_bytes: int) -> None:
        """Make a stretch a hole again."""
        insort(self._holes, (start, start + num_bytes))
        merged: list[tuple[int, int]] = []
        for hole in self._holes:
            if merged and merged[-1][1] == hole[0]:
                merged[-1] = (merged[-1][0], hole[1])
            else:
                merged.append(hole)
        self._holes = merged


def _rounded_up(num_bytes: int, unit_bytes: int) -> int:
    return -(-num_bytes // unit_bytes) * unit_bytes


def _allocate(num_bytes: int, device: torch.device) -> Tensor:
    """Host memory, registered with CUDA where that is the device: torch's own pinned memory comes in powers of two."""
    try:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        if device.type == "cuda":
            torch.cuda.check_error(_cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0))
    except RuntimeError as error:
        raise SettingsError(
            f"{num_bytes / 1e9:.1f} GB of host memory for deltas cannot be had: lower --max-host-cache-gb ({error})"
        ) from error
    return memory


def _cudart() -> Any:
    return torch.cuda.cudart()
