"""From a stored object to its slot: read, verified, copied. Knows files, bytes and devices, and no tensors.

A load reads the object in the 4 MiB chunks that its version record has digests of, several at a time, into
memory that was taken once at start; only when every chunk has matched does one copy fill the slot.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from deltastore.errors import ArtifactTooLarge, CorruptObject, RegistryError, UsageError
from deltastore.uploads import CHUNK_BYTES


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


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load moved, and how long it took from open to the ready event, without waiting for a buffer."""

    size_bytes: int  # of the object
    device_bytes: int  # of it in the slot
    read_s: float  # read and verified
    copy_s: float  # from host memory to the slot
    total_s: float
    source: Literal["disk"] = "disk"


class Loader:
    """Reads objects into slots. Any thread may call `load`; as many loads run at once as there are buffers.

    Holds `num_buffers * staging_bytes` of host memory from start to `close`, pinned where the device is CUDA:
    pinning during a load would take longer than the load.
    """

    def __init__(
        self, device: torch.device, staging_bytes: int, num_threads: int, num_buffers: int = 2
    ) -> None:
        """Take the memory and the threads.

        Args:
            device: where the slots are.
            staging_bytes: the largest device part that can be loaded: the size of a slot.
            num_threads: how many chunks are read and verified at once, over all loads.
            num_buffers: how many loads can run at once.
        """
        if min(staging_bytes, num_threads, num_buffers) < 1:
            raise UsageError("a loader needs at least one byte of staging, one thread and one buffer")
        self.num_buffers = num_buffers
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        pool = torch.empty(num_buffers, staging_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._idle: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()  # a None after `close`
        for buffer in pool:
            self._idle.put(buffer)
        self._readers = ThreadPoolExecutor(num_threads, thread_name_prefix="delta-read")
        self._closed = False

    def load(self, source: ObjectSource, slot: Tensor) -> LoadReport:
        """Bring an object's device part into a slot, and return when the slot may be read from any stream.

        Args:
            source: the object.
            slot: ``[slot_bytes]`` uint8 on the loader's device, which nothing may be reading. It is written
                to only after every chunk has matched; bytes behind `device_bytes` stay as they are.

        Raises:
            CorruptObject: truncated, grown, or a chunk that does not match its digest.
            RegistryError: the file cannot be opened or read.
            ArtifactTooLarge: larger than the slot or the staging buffer.
            UsageError: the loader is closed.
        """
        assert slot.dtype == torch.uint8
        assert slot.is_contiguous()
        with self._buffer() as buffer:
            room = min(len(slot), len(buffer))
            if source.device_bytes > room:
                raise ArtifactTooLarge(
                    f"object {source.digest} needs {source.device_bytes} bytes on the device and a slot has "
                    f"{room}: compress it with a smaller budget, or serve with larger slots"
                )
            staging = buffer[: source.device_bytes]
            start = time.perf_counter()
            self._read(source, staging.numpy().data)
            read = time.perf_counter()
            self._copy(staging, slot[: source.device_bytes])
            ready = time.perf_counter()
        return LoadReport(source.size_bytes, source.device_bytes, read - start, ready - read, ready - start)

    def close(self) -> None:
        """Wait for running loads and release threads and memory. Loads that wait for a buffer are refused."""
        if self._closed:
            return
        self._closed = True
        for _ in range(self.num_buffers):
            self._idle.get()
        self._idle.put(None)
        self._readers.shutdown()

    @contextlib.contextmanager
    def _buffer(self) -> Iterator[Tensor]:
        buffer = None if self._closed else self._idle.get()
        if buffer is None:
            self._idle.put(None)  # for the next one that waits
            raise UsageError("the loader is closed: nothing can be loaded any more")
        try:
            yield buffer
        finally:
            self._idle.put(buffer)

    def _read(self, source: ObjectSource, staging: memoryview) -> None:
        """All chunks up to the end of the device's part; the header's too: views of the slot rest on it."""
        with _opened(source) as fd:
            num_chunks = -(-source.data_end // CHUNK_BYTES)
            reads = [
                self._readers.submit(_read_chunk, fd, source, index, staging) for index in range(num_chunks)
            ]
            try:
                for read in reads:
                    read.result()
            finally:
                for read in reads:
                    read.cancel()
                wait(reads)  # one that runs still writes to the buffer, which is about to be somebody else's

    def _copy(self, staging: Tensor, slot: Tensor) -> None:
        if self._stream is None:
            slot.copy_(staging)
            return
        ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            slot.copy_(staging, non_blocking=True)
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


def _read_chunk(fd: int, source: ObjectSource, index: int, staging: memoryview) -> None:
    """Read one chunk, the device's part of it to its place in `staging`, and compare its digest."""
    pieces = _pieces(source, index, staging)
    _fill(fd, pieces, source, index)
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    if digest.hexdigest() != source.chunk_sha256[index]:
        raise CorruptObject(
            f"object {source.digest} is corrupt: chunk {index} does not match its SHA-256: upload it again"
        )


def _pieces(source: ObjectSource, index: int, staging: memoryview) -> list[memoryview]:
    """Where a chunk's bytes go, in order: what the device does not need goes to memory that is dropped."""
    start, end = source.chunk_range(index)
    first, last = (min(max(cut, start), end) for cut in (source.data_start, source.data_end))
    data = staging[first - source.data_start : last - source.data_start] if first < last else staging[:0]
    pieces = (memoryview(bytearray(first - start)), data, memoryview(bytearray(end - last)))
    return [piece for piece in pieces if len(piece)]


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
