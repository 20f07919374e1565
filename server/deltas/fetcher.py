"""Loads deltas into slots on threads of its own, from the registry or from copies in host memory.

The host cache is one allocation made at start, pinned for CUDA: pinning during a load would take longer than the load.
Several loader threads use it at the same time.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from deltastore.console import size_text
from deltastore.errors import ArtifactTooLarge, SettingsError
from deltastore.format.header import Header, parse_verified_header
from deltastore.format.manifest import Manifest
from deltastore.loader import Loader, LoadReport
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from deltastore.threads import lower_thread_priority
from deltastore.verified_object import ObjectSource, read_verified
from server.deltas.resident import ResidentDelta, Slot
from server.metrics.metrics import ResidencyMetrics

PAGE_BYTES = 4096
UNITS_PER_SLOT = 8


@dataclass(frozen=True, slots=True, eq=False)
class HostCopy:
    """The verified device section of one artifact in host memory."""

    record: VersionRecord
    layout: Any  # as the tables gave it
    memory: Tensor  # [device_bytes] uint8


@dataclass(slots=True, eq=False)
class HostBuffer:
    """A range of the cache's memory. It is freed when it has no users and holds no copy."""

    memory: Tensor  # [device_bytes] uint8
    start: int
    num_bytes: int  # a whole number of units
    num_users: int = 1
    copy: HostCopy | None = None


class HostCache:
    """Host copies of whole deltas. The tenant with the most bytes loses its least recently used one that is not in use.

    A copy is one contiguous range, so a load from it is one copy to the slot. Ranges are multiples of an eighth of a
    slot: deltas of nearly the same size can replace each other, and the memory does not fragment.

    Staged loads need host memory. If the limit is too small for all loads that can run at once, memory beyond the limit
    is allocated at start and never keeps a copy. Loads that are not staged read into the slot if no buffer is free.
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
        is_shared: bool = False,
    ) -> None:
        """Allocate the memory.

        Args:
            limit_bytes: bytes of copies to keep, at most; 0 keeps none.
            slot_bytes: bytes of the largest delta.
            num_loads: loads that can always run at the same time.
            device: the device of the slots.
            metrics: counts arrivals and evictions.
            is_staged: loads must go through host memory, as copies to CUDA do.
            is_shared: processes of this user may map the memory, by `path`.

        Raises:
            SettingsError: the memory cannot be allocated.
        """
        self.num_loads = num_loads
        self.limit_bytes = limit_bytes
        self.slot_bytes = slot_bytes
        self._unit_bytes = _rounded_up(-(-slot_bytes // UNITS_PER_SLOT), PAGE_BYTES)
        self._is_staged = is_staged
        staging = num_loads * UNITS_PER_SLOT * self._unit_bytes if is_staged else 0
        size = max(limit_bytes, staging)
        self._descriptor: int | None = None
        if is_shared:
            self._pool, self._descriptor = _allocate_shared(size)
        else:
            self._pool = _allocate(size, device)
        self._pinned = device.type == "cuda" and not is_shared
        self._free = FreeList(size)
        self._kept: OrderedDict[str, HostBuffer] = OrderedDict()  # by version, least recently used first
        self._num_kept_bytes = 0
        self._changed = threading.Condition()
        self._metrics = metrics

    @property
    def path(self) -> str:
        """The path by which processes of this user map the memory, until it is closed."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def holds(self, version: str) -> bool:
        """Return whether there is a copy of a delta now. Takes no lock."""
        return version in self._kept

    def records(self) -> list[VersionRecord]:
        """Return a version of each delta that has a copy, the least recently used first."""
        with self._changed:
            return [buffer.copy.record for buffer in self._kept.values() if buffer.copy is not None]

    def touch(self, version: str) -> None:
        """Mark a copy, if there is one, as most recently used."""
        with self._changed:
            if version in self._kept:
                self._kept.move_to_end(version)

    @contextmanager
    def copy_of(self, version: str) -> Iterator[HostCopy | None]:
        """Yield the copy of a delta, or None; it is not freed inside the block. Counts as a use."""
        with self._changed:
            if (buffer := self._kept.get(version)) is not None:
                buffer.num_users += 1
                self._kept.move_to_end(version)
                copy = buffer.copy
        if buffer is None:
            yield None
            return
        try:
            yield copy
        finally:
            self._release(buffer)

    @contextmanager
    def buffer(self, device_bytes: int) -> Iterator[HostBuffer | None]:
        """Yield memory to read a delta into; evict idle copies for it. A staged load waits until other loads end.

        Args:
            device_bytes: bytes of the delta's device section, at most a slot's.

        Yields:
            The buffer, or None if a load that is not staged finds no free memory and must read into its slot.
        """
        num_bytes = _rounded_up(max(device_bytes, 1), self._unit_bytes)
        if (start := self._reserve(num_bytes)) is None:
            yield None
            return
        buffer = HostBuffer(self._pool[start : start + device_bytes], start, num_bytes)
        try:
            yield buffer
        finally:
            self._release(buffer)

    def keep(self, buffer: HostBuffer, record: VersionRecord, layout: Any) -> None:
        """Keep a filled buffer as the copy of its delta, unless the limit or copies in use leave no memory for it."""
        with self._changed:
            if buffer.num_bytes > self.limit_bytes:
                return
            while self._num_kept_bytes + buffer.num_bytes > self.limit_bytes:
                if not self._evict_idle():
                    return
            buffer.copy = HostCopy(record, layout, buffer.memory)
            self._kept[record.label] = buffer
            self._num_kept_bytes += buffer.num_bytes
            self._metrics.arrived(record, "host")
            self._publish()

    def drop(self, version: str, reason: str) -> None:
        """Drop a copy, if there is one. A load that copies from it now continues."""
        with self._changed:
            if (buffer := self._kept.pop(version, None)) is None:
                return
            assert buffer.copy is not None
            self._num_kept_bytes -= buffer.num_bytes
            self._metrics.evicted(buffer.copy.record, "host", reason)
            self._publish()
            buffer.copy = None
            self._free_if_unused(buffer)

    def close(self) -> None:
        """Free the memory. No load may use it any more."""
        if self._pinned:
            torch.cuda.check_error(_cudart().cudaHostUnregister(self._pool.data_ptr()))
            self._pinned = False
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._kept.clear()
        self._pool = torch.empty(0, dtype=torch.uint8)

    def _reserve(self, num_bytes: int) -> int | None:
        """Allocate a range. If none is free, staged loads wait for one and others get None."""
        with self._changed:
            if num_bytes > self.limit_bytes and not self._is_staged:
                return None
            while (start := self._free.allocate(num_bytes)) is None:
                if self._evict_idle():
                    continue
                if not self._is_staged:
                    return None
                self._changed.wait()
            return start

    def _evict_idle(self) -> bool:
        """Evict a copy without users. Return False if there is none."""
        held, idle = Counter[str](), list[VersionRecord]()
        for buffer in self._kept.values():
            assert buffer.copy is not None
            held[buffer.copy.record.tenant] += buffer.num_bytes
            if not buffer.num_users:
                idle.append(buffer.copy.record)
        # Of equals the first.
        chosen = max(idle, key=lambda record: held[record.tenant], default=None)
        if chosen is None:
            return False
        self.drop(chosen.label, "capacity")
        return True

    def _release(self, buffer: HostBuffer) -> None:
        with self._changed:
            buffer.num_users -= 1
            self._free_if_unused(buffer)

    def _free_if_unused(self, buffer: HostBuffer) -> None:
        if not buffer.num_users:
            if buffer.copy is None:
                self._free.free(buffer.start, buffer.num_bytes)
            self._changed.notify_all()

    def _publish(self) -> None:
        self._metrics.host_cache(len(self._kept), self._num_kept_bytes)


class FreeList:
    """The free ranges of a block of memory: first fit, neighbours merged."""

    def __init__(self, num_bytes: int) -> None:
        self._ranges = [(0, num_bytes)]  # start and end, ascending

    def allocate(self, num_bytes: int) -> int | None:
        """Take a range of `num_bytes` and return its start; None if no free range is as large."""
        for index, (start, end) in enumerate(self._ranges):
            if end - start >= num_bytes:
                left = (start + num_bytes, end)
                self._ranges[index : index + 1] = [left] if left[0] < end else []
                return start
        return None

    def free(self, start: int, num_bytes: int) -> None:
        """Give a range back."""
        insort(self._ranges, (start, start + num_bytes))
        merged: list[tuple[int, int]] = []
        for free in self._ranges:
            if merged and merged[-1][1] == free[0]:
                merged[-1] = (merged[-1][0], free[1])
            else:
                merged.append(free)
        self._ranges = merged


def _rounded_up(num_bytes: int, unit_bytes: int) -> int:
    return -(-num_bytes // unit_bytes) * unit_bytes


def _allocate(num_bytes: int, device: torch.device) -> Tensor:
    """Allocate host memory, registered with CUDA for that device: torch's own pinned memory comes in powers of two."""
    try:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        if device.type == "cuda":
            torch.cuda.check_error(_cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0))
    except RuntimeError as error:
        raise SettingsError(
            f"{size_text(num_bytes)} of host memory for deltas is not available: lower --max-host-cache-gb ({error})"
        ) from error
    return memory


def _allocate_shared(num_bytes: int) -> tuple[Tensor, int]:
    """Allocate host memory that other processes of this user may map, and return it with its file descriptor."""
    # /dev/shm, where such memory is kept otherwise, has 64 MB in a container.
    descriptor = os.memfd_create("peraxis-deltas")
    try:
        os.ftruncate(descriptor, num_bytes)
        memory = np.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=np.uint8)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{size_text(num_bytes)} of host memory for deltas is not available: lower --max-host-cache-gb ({error})"
        ) from error
    return torch.from_numpy(memory), descriptor


def mapped(path: str) -> Tensor:
    """Map the shared host memory of another process."""
    with open(path, "r+b") as file:
        return torch.from_numpy(np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8))


def _cudart() -> Any:
    return torch.cuda.cudart()


# Simultaneous downloads; each has several parts under way.
NUM_DOWNLOADS = 4


class _Load(NamedTuple):
    """A load that one thread after the other works on."""

    record: VersionRecord
    slot: Slot
    ended: Future[tuple[ResidentDelta, LoadReport]]
    begun_s: float | None = None  # when its download began; None before


class SlotTables(Protocol):
    """The tables in which deltas in slots are entered: one device's, or those of all ranks of a model."""

    # False if a slot is filled from the device section in host memory, which `adopt` does then.
    in_place: bool

    def layout(self, header: Header, manifest: Manifest, digest: str) -> Any:
        """Plan where an artifact's tensors lie in a slot."""

    def adopt(self, layout: Any, slot: Slot, section: Tensor) -> ResidentDelta:
        """Enter a delta, whose device section is in host memory, and in its slot if that is in place."""


class Fetcher:
    """Fills slots. Loads from host memory, from local files and from a store each have threads of their own.

    So those from host memory never wait for a disk, and those from local files never wait for a download.
    """

    def __init__(self, loader: Loader, cache: HostCache, registry: Registry, tables: SlotTables) -> None:
        self.cache = cache
        self._tables = tables
        self._loader = loader
        self._registry = registry
        self._disk = ThreadPoolExecutor(cache.num_loads, "delta-load", initializer=lower_thread_priority)
        self._store = ThreadPoolExecutor(NUM_DOWNLOADS, "delta-fetch", initializer=lower_thread_priority)
        self._host = ThreadPoolExecutor(1, "delta-copy", initializer=lower_thread_priority)

    def fetch(self, record: VersionRecord, slot: Slot) -> Future[tuple[ResidentDelta, LoadReport]]:
        """Start to fill a slot that no batch reads. The delta is complete and verified when the future has it.

        The future raises, without the name of the version:
            VariantQuarantined: the stored object is corrupt; it was quarantined.
            VariantNotFound: the stored object is gone.
            ArtifactTooLarge: the delta does not fit the slot.
            RegistryError: reading the disk or the download failed.
            MemoryError, RuntimeError: no memory is left for a read buffer.
        """
        load = _Load(record, slot, Future())
        threads = self._host if self.cache.holds(record.label) else self._disk
        self._submit(threads, self._run, load)
        return load.ended

    def close(self) -> None:
        """Wait for running loads, cancel queued ones, and free threads and memory."""
        pools = (self._store, self._disk, self._host)
        for threads in pools:
            threads.shutdown(wait=False, cancel_futures=True)
        for threads in pools:
            threads.shutdown(wait=True)
        self._loader.close()
        self.cache.close()

    def _submit(self, threads: ThreadPoolExecutor, work: Callable[[_Load], None], load: _Load) -> None:
        """Let a thread work on a load. What the work raises ends the load, and so does `close` before it began."""

        def stopped(future: Future[None]) -> None:
            if future.cancelled():
                load.ended.cancel()
            elif error := future.exception():
                load.ended.set_exception(error)

        threads.submit(work, load).add_done_callback(stopped)

    def _run(self, load: _Load) -> None:
        """Do a load from this machine's memory or files; leave a download to the threads for it, once."""
        record, begun_s = load.record, load.begun_s
        if begun_s is None:
            if not self.cache.holds(record.label) and not self._registry.is_local(record):
                self._submit(self._store, self._download, load)
                return
            load.ended.set_result(self._fetch(record, load.slot))
            return
        fetch_s = time.perf_counter() - begun_s
        delta, report = self._fetch(record, load.slot)
        total_s = fetch_s + report.total_s
        load.ended.set_result((delta, replace(report, source="store", fetch_s=fetch_s, total_s=total_s)))

    def _download(self, load: _Load) -> None:
        begun = load._replace(begun_s=time.perf_counter())
        self._registry.object_path(load.record)
        if self._registry.is_local(load.record):
            self._submit(self._disk, self._run, begun)
        else:
            # It is missing, or was evicted at once: this may ask the store again.
            self._run(begun)

    def _fetch(self, record: VersionRecord, slot: Slot) -> tuple[ResidentDelta, LoadReport]:
        with self.cache.copy_of(record.label) as copy:
            if copy is not None:
                report = self._loader.copy(copy.memory, self._target(copy.memory, slot))
                return self._adopt(copy.layout, slot, copy.memory, report)
        return read_verified(self._registry, record, lambda: self._read(record, slot))

    def _read(self, record: VersionRecord, slot: Slot) -> tuple[ResidentDelta, LoadReport]:
        """Read a delta from disk, through the host cache if it has memory, and take its layout from its header."""
        source = ObjectSource.of(self._registry, record)
        slot_bytes = len(slot.memory) if self._tables.in_place else self.cache.slot_bytes
        if record.device_bytes > slot_bytes:
            raise ArtifactTooLarge(
                f"it needs {record.device_bytes} bytes on the device and a slot has {slot_bytes}: compress it "
                "with a smaller --budget, or raise the server's --slot-headroom"
            )
        with self.cache.buffer(record.device_bytes) as buffer:
            memory = slot.memory if buffer is None else buffer.memory
            report = self._loader.load(source, memory, self._target(memory, slot))
            header = parse_verified_header(report.header)
            manifest = Manifest.from_verified_metadata(header.metadata, f"object {record.digest}")
            layout = self._tables.layout(header, manifest, record.digest)
            if buffer is not None:
                self.cache.keep(buffer, record, layout)
            return self._adopt(layout, slot, memory, report)

    def _target(self, memory: Tensor, slot: Slot) -> Tensor:
        """Return the memory to which the loader copies: host memory itself where nothing is to be copied."""
        return slot.memory if self._tables.in_place else memory

    def _adopt(
        self, layout: Any, slot: Slot, memory: Tensor, report: LoadReport
    ) -> tuple[ResidentDelta, LoadReport]:
        began = time.perf_counter()
        delta = self._tables.adopt(layout, slot, memory)
        seconds = time.perf_counter() - began
        return delta, replace(report, copy_s=report.copy_s + seconds, total_s=report.total_s + seconds)
