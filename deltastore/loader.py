"""The loader: reads a stored object into host memory, verifies it and copies it into a slot.

`verified_object.py` reads and verifies the chunks, several at a time. Each chunk is copied to the slot as soon as its
digest matches, while others are being read. The caller owns the memory on both sides. Must not know what tensors the
bytes hold.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from deltastore.errors import UsageError
from deltastore.registry.uploads import CHUNK_BYTES
from deltastore.threads import lower_thread_priority
from deltastore.verified_object import ObjectFile, ObjectSource


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Bytes and times of one load, from open to the ready event."""

    source: Literal["store", "disk", "host"]  # "store" for an object that was downloaded first
    device_bytes: int
    read_s: float  # until every chunk was read and verified; 0 from host memory
    copy_s: float  # copy time not overlapped with reads
    total_s: float
    fetch_s: float = 0.0  # download of the object, and the wait for the read after it; part of total_s
    header: bytes = b""  # the verified bytes before the object's data section; empty from host memory


@dataclass(frozen=True, slots=True)
class _Target:
    """The destinations of one load."""

    header: memoryview  # [data_start]
    host: Tensor  # [device_bytes] uint8
    slot: Tensor  # [device_bytes] uint8


class Loader:
    """Reads objects into slots. Any thread may call it, and loads may run concurrently.

    For CUDA, the host memory that loads are given should be pinned, so that copies overlap with computation.
    """

    def __init__(self, device: torch.device, num_threads: int) -> None:
        """Start the reader threads.

        Args:
            device: The slots' device.
            num_threads: The number of chunks that are read and verified at once, over all loads.

        Raises:
            UsageError: `num_threads` is below 1.
        """
        if num_threads < 1:
            raise UsageError("a loader needs at least one thread")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._readers = ThreadPoolExecutor(num_threads, "delta-read", initializer=lower_thread_priority)
        # Held while a load hands all its chunks to the readers, so that `close` refuses it whole or not at all.
        self._submitting = threading.Lock()

    def load(self, source: ObjectSource, host: Tensor, slot: Tensor) -> LoadReport:
        """Read an object's device section into host memory and copy it into a slot; on return any stream may read it.

        Nothing may read `host` or `slot` meanwhile. After an error their contents are undefined and no write is
        pending. Bytes after `device_bytes` are left unchanged.

        Args:
            source: The object.
            host: ``[at least device_bytes]`` uint8 in host memory. On the CPU it may be `slot`; then nothing is copied.
            slot: ``[at least device_bytes]`` uint8 on the loader's device.

        Returns:
            Times, bytes and the object's verified header.

        Raises:
            CorruptObject: The file has another size than recorded, or a chunk does not match its digest.
            RegistryError: The file cannot be opened or read.
            UsageError: The loader is closed.
            ValueError: `host` or `slot` is too short or not uint8.
        """
        size, header = source.device_bytes, bytearray(source.data_start)
        if not host.dtype == slot.dtype == torch.uint8 or size > min(len(host), len(slot)):
            raise ValueError(
                f"object {source.digest} needs {size} uint8 bytes, got {host.dtype} {len(host)} and "
                f"{slot.dtype} {len(slot)}"
            )
        start = time.perf_counter()
        try:
            self._read(source, _Target(memoryview(header), host[:size], slot[:size]))
            read = time.perf_counter()
        finally:
            self._wait_for_copies()
        ready = time.perf_counter()
        return LoadReport("disk", size, read - start, ready - read, ready - start, header=bytes(header))

    def copy(self, host: Tensor, slot: Tensor) -> LoadReport:
        """Copy a device section that an earlier load left in host memory into a slot. Nothing is read or hashed.

        Args:
            host: ``[device_bytes]`` uint8 in host memory.
            slot: ``[at least device_bytes]`` uint8 on the loader's device; nothing may read it meanwhile.
        """
        start = time.perf_counter()
        self._begin_copy(host, slot[: len(host)])
        self._wait_for_copies()
        seconds = time.perf_counter() - start
        return LoadReport("host", len(host), 0.0, seconds, seconds)

    def close(self) -> None:
        """Wait for running loads' reads and end the reader threads. Later loads raise UsageError."""
        with self._submitting:
            self._readers.shutdown(wait=False)
        self._readers.shutdown()

    def _read(self, source: ObjectSource, target: _Target) -> None:
        """Read all chunks up to the end of the device section, the header's included."""
        reads: list[Future[None]] = []
        with ObjectFile(source) as file:
            try:
                with self._submitting:
                    for index in range(-(-source.data_end // CHUNK_BYTES)):
                        reads.append(self._submit(file, index, target))
                for read in reads:
                    read.result()
            finally:
                for read in reads:
                    read.cancel()
                # A running read still writes to memory that the caller may reuse after an error.
                wait(reads)

    def _submit(self, file: ObjectFile, index: int, target: _Target) -> Future[None]:
        try:
            return self._readers.submit(self._read_chunk, file, index, target)
        except RuntimeError as error:
            # ThreadPoolExecutor raises it after its shutdown.
            raise UsageError("the loader is closed: make another one to load again") from error

    def _read_chunk(self, file: ObjectFile, index: int, target: _Target) -> None:
        section = file.source.device_range(index)
        head = target.header[slice(*file.source.chunk_range(index))]
        file.read_chunk(index, head, target.host[section].numpy().data)
        self._begin_copy(target.host[section], target.slot[section])

    def _begin_copy(self, host: Tensor, slot: Tensor) -> None:
        """Copy on the side stream without waiting; on the CPU the copy has ended on return."""
        if host.data_ptr() == slot.data_ptr():
            return
        if self._stream is None:
            # torch's copy would start OpenMP threads that spin beside the engine's.
            np.copyto(slot.numpy(), host.numpy())
        else:
            with torch.cuda.stream(self._stream):
                slot.copy_(host, non_blocking=True)

    def _wait_for_copies(self) -> None:
        """Wait for the copies on the side stream."""
        if self._stream is not None:
            ready = torch.cuda.Event(blocking=True)
            ready.record(self._stream)
            ready.synchronize()
