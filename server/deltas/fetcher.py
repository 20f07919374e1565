"""Loads deltas into slots on threads of its own, from the host cache or the registry's disk. Knows no requests."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deltastore.errors import (
    ArtifactError,
    ArtifactTooLarge,
    CorruptObject,
    RegistryError,
    VariantNotFound,
    VariantQuarantined,
)
from deltastore.format.header import parse_verified_header
from deltastore.format.manifest import Manifest
from deltastore.loader import Loader, LoadReport, ObjectSource, lower_thread_priority
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from server.deltas.host_cache import HostCache
from server.deltas.resident import DeltaPlan, ResidentDelta, Slot


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """A finished load: the delta in its slot, complete and verified."""

    delta: ResidentDelta
    report: LoadReport


class Fetcher:
    """Fills slots. Loads from host memory have a thread of their own, so that they never wait for a disk."""

    def __init__(self, loader: Loader, cache: HostCache, registry: Registry) -> None:
        self.cache = cache
        self._loader = loader
        self._registry = registry
        self._disk = ThreadPoolExecutor(cache.num_loads, "delta-load", initializer=lower_thread_priority)
        self._host = ThreadPoolExecutor(1, "delta-copy", initializer=lower_thread_priority)

    def fetch(self, record: VersionRecord, slot: Slot) -> Future[Fetched]:
        """Start to fill a slot that no batch reads.

        The future raises:
            VariantQuarantined: the stored object is corrupt; it was quarantined.
            VariantNotFound: the stored object is gone.
            ArtifactTooLarge: the delta does not fit the slot.
            RegistryError: reading the disk failed.
            MemoryError, RuntimeError: no memory is left for the delta's factors or a read buffer.
        """
        threads = self._host if self.cache.holds(record.digest) else self._disk
        return threads.submit(self._fetch, record, slot)

    def close(self) -> None:
        """Wait for running loads, cancel queued ones, and free threads and memory."""
        for threads in (self._disk, self._host):
            threads.shutdown(wait=False, cancel_futures=True)
        for threads in (self._disk, self._host):
            threads.shutdown(wait=True)
        self._loader.close()
        self.cache.close()

    def _fetch(self, record: VersionRecord, slot: Slot) -> Fetched:
        with self.cache.copy_of(record.digest) as copy:
            if copy is not None:
                report = self._loader.copy(copy.memory, slot.memory)
                return Fetched(ResidentDelta.in_slot(copy.plan, slot), report)
        plan, report = self._read(record, slot)
        return Fetched(ResidentDelta.in_slot(plan, slot), report)

    def _read(self, record: VersionRecord, slot: Slot) -> tuple[DeltaPlan, LoadReport]:
        """Read a delta from disk, through the host cache if it has memory, and plan it by its verified header."""
        path = self._registry.object_path(record.digest)
        source = ObjectSource(
            path,
            record.digest,
            record.size_bytes,
            record.data_start,
            record.device_bytes,
            record.chunk_sha256,
        )
        if record.device_bytes > len(slot.memory):
            raise ArtifactTooLarge(
                f"{label(record)} needs {record.device_bytes} bytes on the device and a slot has {len(slot.memory)}"
                ": compress it with a smaller budget, or serve with larger slots"
            )
        with self._explained(record, path), self.cache.buffer(record.device_bytes) as buffer:
            memory = slot.memory if buffer is None else buffer.memory
            report = self._loader.load(source, memory, slot.memory)
            header = parse_verified_header(report.header)
            plan = DeltaPlan.of(
                header, Manifest.from_verified_metadata(header.metadata, label(record)), record.digest
            )
            if buffer is not None:
                self.cache.keep(buffer, record, plan)
        return plan, report

    @contextmanager
    def _explained(self, record: VersionRecord, path: Path) -> Iterator[None]:
        """Turn a failed read into its cause: quarantine a corrupt object, report a deleted one as missing."""
        try:
            yield
        except CorruptObject as error:
            self._registry.quarantine(record.digest, str(error))
            raise VariantQuarantined(
                f"{label(record)}: its stored object is corrupt and was quarantined: upload it again"
            ) from error
        except (RegistryError, ArtifactError) as error:
            if path.exists():
                raise
            raise VariantNotFound(
                f"{label(record)}: its object is no longer in the registry: upload it again"
            ) from error


def label(record: VersionRecord) -> str:
    """Return the name of a version in messages: ``tenant/name@version``."""
    return f"{record.tenant}/{record.name}@{record.version}"
