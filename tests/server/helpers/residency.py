"""A residency over a real registry of small random artifacts, and a disk whose reads can be blocked. No model."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from bench.engine import publish
from deltastore.errors import PeraxisError
from deltastore.format.artifact import ArtifactWriter
from deltastore.format.manifest import Manifest, TensorSpec
from deltastore.format.matrix import MatrixDelta, SignPlane
from deltastore.loader import Loader
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from server.deltas.fetcher import Fetcher, HostCache
from server.deltas.residency import Residency
from server.deltas.resident import DeltaTables, arena
from server.metrics.metrics import EngineMetrics, ResidencyMetrics
from tests.server.metrics.helpers.samples import value_of

WAIT_S = 240.0
CPU = torch.device("cpu")
SLOT_BYTES = 65536
NORM, MATRIX = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"


class UnreadTables(DeltaTables):
    """The tables of a model without layers. Artifacts of any sizes are loaded, and nothing reads them."""

    def check(self, manifest: Manifest) -> None:
        pass


@dataclass(slots=True)
class ResidencyHarness:
    """A residency, the parts below it, and shortcuts to use it. The test takes the place of the engine thread."""

    residency: Residency
    registry: Registry
    directory: Path
    metrics: EngineMetrics
    load_ended: threading.Event
    published: set[str] = field(default_factory=set)  # labels of versions

    def publish(self, name: str, seed: int, norm_length: int = 10_000) -> VersionRecord:
        """Publish a variant of random content and retain it. Its device section has about ``2 * norm_length`` bytes."""
        path = self.directory / f"{name}-{seed}.safetensors"
        write_artifact(path, seed, norm_length)
        record = publish(self.registry, path, name)
        self.residency.retain(record)
        self.published.add(record.label)
        return record

    def settle(self) -> dict[str, PeraxisError | None]:
        """Wait for all running loads and make them visible. Return the error of each, or None, by version."""
        ended: dict[str, PeraxisError | None] = {}
        while any(map(self.residency.is_loading, self.published)):
            assert self.load_ended.wait(WAIT_S)
            self.load_ended.clear()
            ended |= {load.version: load.error for load in self.residency.poll_loads()}
        return ended

    def load(self, *records: VersionRecord) -> list[PeraxisError | None]:
        """Load versions at the same time and wait for them. Return the error of each, or None."""
        for record in records:
            # Each for a tenant of its own: those of one tenant take turns.
            assert self.residency.load(record.label, record.label)
        ended = self.settle()
        return [ended.get(record.label) for record in records]

    def in_slot(self, record: VersionRecord) -> bytes:
        """Return the first bytes of a resident delta's slot, as many as its device section has."""
        delta = self.residency.find(record.label)
        assert delta is not None
        return delta.slot.memory[: record.device_bytes].numpy().tobytes()

    def path(self, record: VersionRecord) -> Path:
        return self.registry.object_path(record)

    def section(self, record: VersionRecord) -> bytes:
        """Return the device section of a stored object."""
        return self.path(record).read_bytes()[record.data_start :][: record.device_bytes]

    def corrupt(self, record: VersionRecord) -> None:
        """Flip one bit of the device section on disk."""
        path = self.path(record)
        path.chmod(0o644)
        raw = bytearray(path.read_bytes())
        raw[record.data_start + record.device_bytes // 2] ^= 1
        path.write_bytes(raw)

    def metric(self, name: str, **labels: str) -> float | None:
        return value_of(self.metrics, f"peraxis_{name}", labels)


@contextmanager
def running_residency(
    directory: Path,
    *,
    num_slots: int = 3,
    host_cache_bytes: int = 1 << 20,
    num_loads: int = 2,
    registry: Registry | None = None,
) -> Iterator[ResidencyHarness]:
    """Run a residency over a registry, or an empty one under `directory`."""
    registry, metrics = registry or Registry(directory / "registry"), EngineMetrics()
    residency_metrics = ResidencyMetrics(metrics)
    cache = HostCache(host_cache_bytes, SLOT_BYTES, num_loads, CPU, residency_metrics, is_staged=True)
    tables = UnreadTables()
    tables.allocate(num_slots, CPU)
    fetcher = Fetcher(Loader(CPU, num_threads=2), cache, registry, tables)
    load_ended = threading.Event()
    residency = Residency(arena(num_slots, SLOT_BYTES, CPU), fetcher, residency_metrics, load_ended.set)
    try:
        yield ResidencyHarness(residency, registry, directory, metrics, load_ended)
    finally:
        residency.close()


@dataclass(frozen=True, slots=True)
class BlockedDisk:
    """A disk whose reads of objects wait until `open` is set."""

    reading: threading.Event  # set by the first read that waits
    open: threading.Event


def block_disk(monkeypatch: pytest.MonkeyPatch) -> BlockedDisk:
    """Block every read from now on."""
    real, disk = os.preadv, BlockedDisk(threading.Event(), threading.Event())

    def wait(fd: int, buffers: list[memoryview], offset: int) -> int:
        disk.reading.set()
        assert disk.open.wait(WAIT_S)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", wait)
    return disk


def write_artifact(path: Path, seed: int, norm_length: int) -> None:
    """Write an artifact of one random matrix, one random norm and a chat template."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 256, (24, 5), dtype=torch.uint8, generator=generator)
    with ArtifactWriter(path) as writer:
        scale = torch.ones(24, dtype=torch.float16)
        writer.add_onebit(MATRIX, MatrixDelta((SignPlane(signs, 40, 2.0**-10, scale_out=scale),)))
        writer.add_whole(NORM, torch.randn(norm_length, generator=generator).half())
        writer.add_file("chat_template.jinja", b"{{ messages }}")
        manifest = Manifest(
            base_id="tiny",
            base_fingerprint="5f" * 32,
            method="per-axis",
            tied=False,
            device_bytes=writer.device_bytes,
            config={},
            tensors={
                MATRIX: TensorSpec(codec="onebit", shape=[24, 40], axis="out"),
                NORM: TensorSpec(codec="whole", shape=[norm_length]),
            },
            files=["chat_template.jinja"],
            compressor={},
            fidelity={},
        )
        writer.finish(manifest)
