"""Residency over a true registry of small random artifacts, without any model; and a disk that can be held up."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from deltastore.errors import PeraxisError
from deltastore.format.artifact import Artifact, ArtifactWriter
from deltastore.format.manifest import Manifest, TensorSpec
from deltastore.format.matrix import MatrixDelta
from deltastore.format.onebit import OneBit
from deltastore.loader import Loader
from deltastore.registry import Registry
from deltastore.registry.records import ArtifactFacts, VersionRecord
from server.deltas.fetcher import Fetcher
from server.deltas.host_cache import HostCache
from server.deltas.residency import Residency
from server.deltas.residency_metrics import ResidencyMetrics
from server.deltas.resident import arena
from server.metrics import Metrics

WAIT_S = 30.0
CPU = torch.device("cpu")
SLOT_BYTES = 65536
NORM, MATRIX = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"


@dataclass(slots=True)
class Residing:
    """A residency, what it stands on, and short ways to use it. The test is its engine thread."""

    residency: Residency
    registry: Registry
    directory: Path
    metrics: CollectorRegistry
    load_ended: threading.Event

    def publish(self, name: str, seed: int, norm_length: int = 10_000) -> VersionRecord:
        """A variant of random content, known to the residency. Its device section has about 2 bytes per norm."""
        path = self.directory / f"{name}-{seed}.safetensors"
        write_artifact(path, seed, norm_length)
        record = publish(self.registry, path, name)
        self.residency.retain(record)
        return record

    def settle(self) -> dict[str, PeraxisError | None]:
        """Wait for every load under way and adopt it: what became of each, by digest."""
        ended: dict[str, PeraxisError | None] = {}
        while any(entry.delta is None for entry in self.residency._entries.values()):
            assert self.load_ended.wait(WAIT_S)
            self.load_ended.clear()
            ended |= {adopted.record.digest: adopted.error for adopted in self.residency.poll_loads()}
        return ended

    def load(self, *records: VersionRecord) -> list[PeraxisError | None]:
        """Load versions at the same time, to the end."""
        for record in records:
            assert self.residency.load(record.digest)
        ended = self.settle()
        return [ended.get(record.digest) for record in records]

    def in_slot(self, record: VersionRecord) -> bytes:
        """The bytes of a resident delta's slot, as many as its device section has."""
        delta = self.residency.find(record.digest)
        assert delta is not None
        return delta.slot.memory[: record.device_bytes].numpy().tobytes()

    def path(self, record: VersionRecord) -> Path:
        return self.registry.object_path(record.digest)

    def section(self, record: VersionRecord) -> bytes:
        """The device section of a stored object."""
        return self.path(record).read_bytes()[record.data_start :][: record.device_bytes]

    def corrupt(self, record: VersionRecord) -> None:
        """Flip one bit of the device section on disk."""
        path = self.path(record)
        path.chmod(0o644)
        raw = bytearray(path.read_bytes())
        raw[record.data_start + record.device_bytes // 2] ^= 1
        path.write_bytes(raw)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.metrics.get_sample_value(f"peraxis_{name}", labels)


@contextmanager
def residing(
    directory: Path, *, num_slots: int = 3, host_cache_bytes: int = 1 << 20, num_loads: int = 2
) -> Iterator[Residing]:
    """A residency over an empty registry under `directory`."""
    registry, metrics = Registry(directory / "registry"), CollectorRegistry()
    told = ResidencyMetrics(Metrics(metrics))
    cache = HostCache(host_cache_bytes, SLOT_BYTES, num_loads, CPU, told, is_staged=True)
    fetcher = Fetcher(Loader(CPU, num_threads=2), cache, registry)
    load_ended = threading.Event()
    residency = Residency(arena(num_slots, SLOT_BYTES, CPU), fetcher, told, load_ended.set)
    try:
        yield Residing(residency, registry, directory, metrics, load_ended)
    finally:
        residency.close()


@dataclass(frozen=True, slots=True)
class HeldDisk:
    """Reads of objects wait until they are let through."""

    reading: threading.Event  # set by the first read that waits
    open: threading.Event


def hold_disk(monkeypatch: pytest.MonkeyPatch) -> HeldDisk:
    """Hold up every read from now on."""
    real, disk = os.preadv, HeldDisk(threading.Event(), threading.Event())

    def wait(fd: int, buffers: list[memoryview], offset: int) -> int:
        disk.reading.set()
        assert disk.open.wait(WAIT_S)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", wait)
    return disk


def publish(registry: Registry, artifact: Path, name: str) -> VersionRecord:
    """What an upload does after its checks."""
    with Artifact.open(artifact) as opened:
        manifest = opened.manifest
        facts = ArtifactFacts(
            opened.header.data_start,
            manifest.device_bytes,
            manifest.base_fingerprint,
            manifest.method,
            manifest.fidelity,
        )
    with registry.open_upload(None) as upload:
        upload.write(artifact.read_bytes())
        return registry.publish(upload.seal(), facts, tenant="default", name=name).record


def write_artifact(path: Path, seed: int, norm_length: int) -> None:
    """An artifact of one random matrix and one random norm, with a file behind them."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 256, (24, 5), dtype=torch.uint8, generator=generator)
    with ArtifactWriter(path) as writer:
        scale = torch.ones(24, dtype=torch.float16)
        writer.add_onebit(MATRIX, MatrixDelta((OneBit(signs, 40, 2.0**-10, scale_out=scale),)))
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
