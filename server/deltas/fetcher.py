"""Loads deltas into slots on threads of its own, from the host cache or the registry."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from deltastore.errors import ArtifactTooLarge
from deltastore.format.header import parse_verified_header
from deltastore.format.manifest import Manifest
from deltastore.loader import Loader, LoadReport
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from deltastore.thread_priority import lower_thread_priority
from deltastore.verified_object import ObjectSource, read_verified
from server.deltas.host_cache import HostCache
from server.deltas.resident import DeltaLayout, ResidentDelta, Slot

# Simultaneous downloads; each has several parts under way.
NUM_DOWNLOADS = 4


class _Load(NamedTuple):
    """A load that one thread after the other works on."""

    record: VersionRecord
    slot: Slot
    ended: Future[tuple[ResidentDelta, LoadReport]]
    begun_s: float | None = None  # when its download began; None before


class Fetcher:
    """Fills slots. Loads from host memory, from local files and from a store each have threads of their own.

    So those from host memory never wait for a disk, and those from local files never wait for a download.
    """

    def __init__(self, loader: Loader, cache: HostCache, registry: Registry) -> None:
        self.cache = cache
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
            MemoryError, RuntimeError: no memory is left for the delta's factors or a read buffer.
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
                report = self._loader.copy(copy.memory, slot.memory)
                return ResidentDelta.in_slot(copy.layout, slot), report
        layout, report = read_verified(self._registry, record, lambda: self._read(record, slot))
        return ResidentDelta.in_slot(layout, slot), report

    def _read(self, record: VersionRecord, slot: Slot) -> tuple[DeltaLayout, LoadReport]:
        """Read a delta from disk, through the host cache if it has memory, and take its layout from its header."""
        source = ObjectSource.of(self._registry, record)
        if record.device_bytes > len(slot.memory):
            raise ArtifactTooLarge(
                f"it needs {record.device_bytes} bytes on the device and a slot has {len(slot.memory)}: compress it "
                "with a smaller --budget, or raise the server's --slot-headroom"
            )
        with self.cache.buffer(record.device_bytes) as buffer:
            memory = slot.memory if buffer is None else buffer.memory
            report = self._loader.load(source, memory, slot.memory)
            header = parse_verified_header(report.header)
            layout = DeltaLayout.of(
                header,
                Manifest.from_verified_metadata(header.metadata, f"object {record.digest}"),
                record.digest,
            )
            if buffer is not None:
                self.cache.keep(buffer, record, layout)
        return layout, report
