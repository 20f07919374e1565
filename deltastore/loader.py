"""From a stored object to host memory to a slot: read, verified, copied. Knows files, bytes and devices, no tensors.

A load reads the object in the 4 MiB chunks that its version record has digests of, several at a time; each is copied
on as soon as it has matched, while others are being read. Memory is the caller's, on both sides.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from deltastore.errors import CorruptObject, RegistryError, UsageError
from deltastore.registry.uploads import CHUNK_BYTES

NICENESS = (
    10  # of threads that load; else one of them takes a core from a step that waits for all of its cores
)


@dataclass(frozen=True, slots=True)
class ObjectSource:
    """An object on disk and what its version record says of it. RegistryError where that cannot be true."""

    path: Path
    digest: str  # of the whole file, 64 hex digits
    size_bytes: int
    data_start: int  # bytes before the data section
    device_bytes: int  # bytes of the data section that go to the slot; the variant's files follow them
    chunk_sha256: tuple[str, ...]  # hex, of each 4 MiB of the file; the last may be shorter

    def __post_init__(self) -> None:
        num_chunks = -(-self.size_bytes // CHUNK_BYTES)
        parts = (self.data_start, self.device_bytes, self.size_bytes - self.data_end)
        if min(parts) < 0 or len(self.chunk_sha256) != num_chunks:
            raise RegistryError(
                f"the version record of object {self.digest} contradicts itself: upload it again"
            )

    @property
    def data_end(self) -> int:
        """Where in the file the device's part ends."""
        return self.data_start + self.device_bytes

    def chunk_range(self, index: int) -> tuple[int, int]:
        """First byte of a chunk in the file, and the one after its last."""
        return index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, self.size_bytes)

    def device_range(self, index: int) -> slice:
        """What a chunk holds of the device's part, in bytes from that part's beginning; may be empty."""
        cuts = (min(max(cut - self.data_start, 0), self.device_bytes) for cut in self.chunk_range(index))
        return slice(*cuts)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load moved, and how long it took from open to the ready event."""

    source: Literal["disk", "host"]
    device_bytes: int  # in the slot
    read_s: float  # until every chunk was read and verified; 0 from host memory
    copy_s: float  # from then on: what of the copy no read has hidden
    total_s: float
    header: bytes = b""  # of the object, up to its data section; verified; none from host memory


@dataclass(frozen=True, slots=True)
class _Target:
    """Where one load's bytes go."""

    header: memoryview  # [data_start]
    host: Tensor  # [device_bytes] uint8
    slot: Tensor  # [device_bytes] uint8


def lower_thread_priority() -> None:
    """Let the calling thread run behind those that compute: Linux keeps a niceness for each thread."""
    os.nice(NICENESS)


class Loader:
    """Reads objects into slots. Any thread may call it, any number of loads may run at once.

    The device should be able to copy from the host memory that loads are given while it computes: pinned, for CUDA.
    """

    def __init__(self, device: torch.device, num_threads: int) -> None:
        """Take the threads.

        Args:
            device: where the slots are.
            num_threads: how many chunks are read and verified at once, over all loads.
        """
        if num_threads < 1:
            raise UsageError("a loader needs at least one thread")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._readers = ThreadPoolExecutor(num_threads, "delta-read", initializer=lower_thread_priority)

    def load(self, source: ObjectSource, host: Tensor, slot: Tensor) -> LoadReport:
        """Bring an object's device part from disk into host memory and on into a slot, which any stream may read then.

        Args:
            source: the object.
            host: ``[at least device_bytes]`` uint8 in host memory; on the CPU it may be `slot`, and nothing is copied.
            slot: ``[at least device_bytes]`` uint8 on the loader's device.

        Nothing may be reading either. After an error both hold anything, and nothing writes to them any more. Bytes
        behind `device_bytes` stay as they are. The report brings the verified header.

        Raises:
            CorruptObject: truncated, grown, or a chunk that does not match its digest.
            RegistryError: the file cannot be opened or read.
            UsageError: the loader is closed.
        """
        size, header = source.device_bytes, bytearray(source.data_start)
        assert host.dtype == slot.dtype == torch.uint8
        assert size <= min(len(host), len(slot))
        start = time.perf_counter()
        try:
            self._read(source, _Target(memoryview(header), host[:size], slot[:size]))
            read = time.perf_counter()
        finally:
            self._settle()
        ready = time.perf_counter()
        return LoadReport("disk", size, read - start, ready - read, ready - start, bytes(header))

    def copy(self, host: Tensor, slot: Tensor) -> LoadReport:
        """Bring a device part that a load has left in host memory into a slot: one copy, nothing is read or hashed.

        Args:
            host: ``[device_bytes]`` uint8 in host memory.
            slot: ``[at least device_bytes]`` uint8 on the loader's device, which nothing may be reading.
        """
        start = time.perf_counter()
        self._begin_copy(host, slot[: len(host)])
        self._settle()
        seconds = time.perf_counter() - start
        return LoadReport("host", len(host), 0.0, seconds, seconds)

    def close(self) -> None:
        """Wait for running reads and give the threads back. Later loads are refused."""
        self._readers.shutdown()

    def _read(self, source: ObjectSource, target: _Target) -> None:
        """All chunks up to the end of the device's part; the header's too: views of the slot rest on it."""
        reads: list[Future[None]] = []
        with _opened(source) as fd:
            try:
                for index in range(-(-source.data_end // CHUNK_BYTES)):
                    reads.append(self._submit(fd, source, index, target))
                for read in reads:
                    read.result()
            finally:
                for read in reads:
                    read.cancel()
                wait(reads)  # one that runs still writes to memory that is about to be somebody else's

    def _submit(self, fd: int, source: ObjectSource, index: int, target: _Target) -> Future[None]:
        try:
            return self._readers.submit(self._read_chunk, fd, source, index, target)
        except RuntimeError as error:  # what an executor says after its shutdown
            raise UsageError("the loader is closed: nothing can be loaded any more") from error

    def _read_chunk(self, fd: int, source: ObjectSource, index: int, target: _Target) -> None:
        part = source.device_range(index)
        head = target.header[slice(*source.chunk_range(index))]
        _read_verified(fd, source, index, head, target.host[part].numpy().data)
        self._begin_copy(target.host[part], target.slot[part])

    def _begin_copy(self, host: Tensor, slot: Tensor) -> None:
        """On the side stream, without waiting; on a CPU it has ended on return."""
        if host.data_ptr() == slot.data_ptr():
            return
        if self._stream is None:
            np.copyto(
                slot.numpy(), host.numpy()
            )  # torch's copy would start threads that spin beside the engine's
        else:
            with torch.cuda.stream(self._stream):
                slot.copy_(host, non_blocking=True)

    def _settle(self) -> None:
        """Wait for the copies that were begun."""
        if self._stream is not None:
            ready = torch.cuda.Event(blocking=True)
            ready.record(self._stream)
            ready.synchronize()


@contextlib.contextmanager
def _opened(source: ObjectSource) -> Iterator[int]:
    """A descriptor of the object's file, which has the recorded size."""
    try:
        fd = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if (size_bytes := os.fstat(fd).st_size) != source.size_bytes:
                raise CorruptObject(
                    f"object {source.digest} has {size_bytes} bytes where its record says {source.size_bytes}"
                    ": upload it again"
                )
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        raise RegistryError(
            f"object {source.digest} cannot be read: {error.strerror or error}: "
            "check the registry's disk and rights"
        ) from error


def _read_verified(fd: int, source: ObjectSource, index: int, head: memoryview, part: memoryview) -> None:
    """Read one chunk and compare its digest: its bytes of the header into `head`, those of the device into `part`,
    the others into memory that is dropped.
    """
    start, end = source.chunk_range(index)
    rest = memoryview(bytearray(end - start - len(head) - len(part)))
    pieces = [piece for piece in (head, part, rest) if len(piece)]
    _fill(fd, pieces, source, index)
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    if digest.hexdigest() != source.chunk_sha256[index]:
        raise CorruptObject(
            f"object {source.digest} is corrupt: chunk {index} does not match its SHA-256: upload it again"
        )


def _fill(fd: int, pieces: list[memoryview], source: ObjectSource, index: int) -> None:
    left = list(pieces)
    position, _ = source.chunk_range(index)
    while left:
        count = os.preadv(fd, left, position)
        if count == 0:
            raise CorruptObject(
                f"object {source.digest} is truncated: chunk {index} ends at byte {position}: upload it again"
            )
        position += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]
