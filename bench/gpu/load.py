"""Time the load of a delta into its slot, by stage, beside one plain copy and the load of the full checkpoint."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.gpu.measure import (
    FASTER_THAN_CHECKPOINT,
    HOST_TO_READY_MS,
    Blueprint,
    Rows,
    fill,
    once,
    seconds,
    settle,
    tables_of,
)
from deltastore.format.header import encode_header
from deltastore.loader import Loader, LoadReport
from deltastore.registry.uploads import CHUNK_BYTES, ChunkedDigest
from deltastore.verified_object import ObjectSource
from peraxis.demo.page_cache import drop
from server.deltas.resident import DeltaLayout, DeltaTables, ResidentDelta, Slot

SHARD_BYTES = 1 << 30
# Shards that must fit before one is written; other programs use the disk, too.
MIN_FREE_SHARDS = 5
# Time limit for writing the checkpoint. The load of a part is scaled to the whole, with a note.
WRITING_S = 60.0
NUM_THREADS = 16
SECTION = "load"


@dataclass(frozen=True, slots=True)
class DeltaLoad:
    """One delta to be loaded again and again: its bytes in host memory, and its slot."""

    loader: Loader
    drawing: Blueprint
    host: Tensor
    slot: Slot
    tables: DeltaTables
    layout: DeltaLayout

    def adopt(self) -> ResidentDelta:
        return self.tables.adopt(self.layout, self.slot)


def measure_load(
    rows: Rows, weights: Mapping[str, Tensor], drawing: Blueprint, directory: Path, repeats: int
) -> None:
    """Fill the section `load`.

    Args:
        weights: the base's weights by name, on the device.
        drawing: layout of a delta for them.
        directory: a folder on a disk with room for some of the weights.
        repeats: number of runs of all but the checkpoint's load.
    """
    device = next(iter(weights.values())).device
    host = torch.empty(drawing.device_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    slot = Slot(0, torch.empty(drawing.device_bytes, dtype=torch.uint8, device=device))
    fill(slot.memory, drawing, seed=0)
    host.copy_(slot.memory)
    limit = seconds(lambda: slot.memory.copy_(host, non_blocking=True), device, repeats)
    speed = _speed(drawing.device_bytes, limit)
    rows.put(SECTION, "limit: one pinned copy of a delta's bytes", 1e3 * limit, note=speed)
    source = write_delta(directory / "delta.safetensors", drawing, host)
    loader = Loader(device, NUM_THREADS)
    try:
        tables = tables_of({name: tuple(value.shape) for name, value in weights.items()}, 1, device)
        delta = DeltaLoad(loader, drawing, host, slot, tables, drawing.layout(tables))
        ready = _from_host(rows, delta, repeats)
        disk = {cache: _from_disk(rows, delta, source, cache) for cache in ("warm", "dropped")}
    finally:
        loader.close()
    full = _checkpoint(rows, weights, directory)
    if "warm" in full:
        times = full["warm"] / ready
        name = "host to ready, times faster than the checkpoint (warm)"
        rows.put(SECTION, name, times, met=times >= FASTER_THAN_CHECKPOINT)
    if "dropped" in full:
        name = "disk to ready, times faster than the checkpoint (dropped)"
        rows.put(SECTION, name, full["dropped"] / disk["dropped"])


def _from_host(rows: Rows, delta: DeltaLoad, repeats: int) -> float:
    copies, views = [], []
    # The first run warms up.
    for _ in range(repeats + 1):
        copies.append(delta.loader.copy(delta.host, delta.slot.memory).total_s)
        views.append(once(delta.adopt, delta.slot.memory.device))
    copy, ready = median(copies[1:]), median(map(sum, zip(copies[1:], views[1:], strict=True)))
    rows.put(SECTION, "delta, host to slot: copy", 1e3 * copy, note=_speed(delta.drawing.device_bytes, copy))
    rows.put(
        SECTION, "delta, host to ready: copy and tables", 1e3 * ready, met=1e3 * ready <= HOST_TO_READY_MS
    )
    return ready


def _from_disk(rows: Rows, delta: DeltaLoad, source: ObjectSource, cache: str) -> float:
    reports: list[LoadReport] = []
    totals: list[float] = []
    notes = set()
    for _ in range(3):
        if cache == "dropped":
            notes.add("" if drop([source.path]) else "not dropped: the kernel refused")
        start = time.perf_counter()
        reports.append(delta.loader.load(source, delta.host, delta.slot.memory))
        delta.adopt()
        settle(delta.slot.memory.device)
        totals.append(time.perf_counter() - start)
    note = "; ".join(notes - {""})
    stages = {
        "read and verify": median(report.read_s for report in reports),
        "rest of the copy": median(report.copy_s for report in reports),
        "total with views": median(totals),
    }
    for stage, value in stages.items():
        rows.put(SECTION, f"delta, disk, page cache {cache}: {stage}", 1e3 * value, note=note)
    return stages["total with views"]


def write_delta(path: Path, drawing: Blueprint, host: Tensor) -> ObjectSource:
    """Write the delta's bytes behind a header that safetensors reads, without a manifest."""
    header, digest = encode_header(drawing.entries, {}), ChunkedDigest()
    with path.open("wb") as file:
        for data in (memoryview(header), host.numpy().data):
            for start in range(0, len(data), CHUNK_BYTES):
                digest.update(data[start : start + CHUNK_BYTES])
                file.write(data[start : start + CHUNK_BYTES])
    return ObjectSource(
        path, digest.digest(), digest.num_bytes, len(header), len(host), digest.chunk_digests()
    )


def _checkpoint(rows: Rows, weights: Mapping[str, Tensor], directory: Path) -> dict[str, float]:
    """Time the load of the whole checkpoint; seconds by state of the page cache."""
    device = next(iter(weights.values())).device
    paths, written = _write_checkpoint(weights, directory)
    total = sum(tensor.nbytes for tensor in weights.values())
    if not written:
        rows.explain(SECTION, "the disk had no room for a checkpoint")
        return {}
    found = {}
    for cache in ("warm", "dropped"):
        note = "" if written == total else f"SCALED from {written / 1e9:.1f} of {total / 1e9:.1f} GB"
        if cache == "dropped" and not drop(paths):
            note += " not dropped: the kernel refused"
        else:
            for path in paths if cache == "warm" else ():
                _touch(path)
        found[cache] = once(lambda: _load_all(paths, device), device) * total / written
        if device.type == "cuda":
            torch.cuda.empty_cache()
        rows.put(
            SECTION,
            f"full checkpoint, stock safetensors, page cache {cache}",
            1e3 * found[cache],
            note=f"{_speed(total, found[cache])} {note}".strip(),
        )
    return found


def _load_all(paths: Sequence[Path], device: torch.device) -> None:
    """Load all tensors into memory of their own; on a CPU safetensors only maps them."""
    held = []
    for path in paths:
        tensors = load_file(path, device=str(device))
        held.append(tensors if device.type == "cuda" else {name: tensors[name].clone() for name in tensors})


def _touch(path: Path) -> None:
    with path.open("rb") as file:
        while file.read(CHUNK_BYTES):
            pass


def _write_checkpoint(weights: Mapping[str, Tensor], directory: Path) -> tuple[list[Path], int]:
    """Write as many shards of the weights as disk and time allow; return them and their bytes."""
    paths: list[Path] = []
    written, start = 0, time.perf_counter()
    for number, shard in enumerate(_shards(weights)):
        num_bytes = sum(tensor.nbytes for tensor in shard.values())
        has_room = shutil.disk_usage(directory).free > MIN_FREE_SHARDS * num_bytes
        if not has_room or time.perf_counter() - start > WRITING_S:
            break
        paths.append(directory / f"model-{number:05}.safetensors")
        save_file(shard, paths[-1], metadata={"format": "pt"})
        with paths[-1].open("rb") as file:
            # Counts as part of writing, and lets its pages be dropped.
            os.fsync(file.fileno())
        written += num_bytes
    return paths, written


def _shards(weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        shard[name] = tensor
        if sum(own.nbytes for own in shard.values()) >= SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


def _speed(num_bytes: int, spent_s: float) -> str:
    return f"{num_bytes / 1e9 / spent_s:.1f} GB/s"
