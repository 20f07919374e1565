"""Time the load of a delta beside the load of the full checkpoint that it stands for.

Both begin with files on disk and end with every byte in newly allocated memory: `load_file` of safetensors maps lazily
on a CPU, so its tensors are cloned; a delta goes to a slot that was never touched. The delta's bytes are verified on
the way, the checkpoint's are not. A third load is that of a delta in host memory. No model runs and no request is made.
"""

from __future__ import annotations

import ctypes
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from bench.harness import (
    DEVICE,
    THREADS,
    Bench,
    Report,
    fixed,
    mb,
    ms,
    option,
    rounded,
    seconds,
    table_of,
    text,
)
from bench.synthetic import LlamaShapes, write_checkpoint, write_delta
from deltastore.loader import Loader
from deltastore.verified_object import ObjectSource
from peraxis.demo.page_cache import drop

FULL = LlamaShapes(num_layers=10)  # 1.17 GB in FP16
SMALL = LlamaShapes(num_layers=2, hidden=512, intermediate=1408, kv=128, vocabulary=8000)
WARM, DROPPED, NOT_DROPPED, NO_FILE = "warm", "dropped", "not dropped", "no file is read"
DELTA, HOST, CHECKPOINT = "delta", "delta in host memory", "full FP16 checkpoint"

Stages = Mapping[str, float]  # seconds by stage, in order; "total" is the last
COLUMNS = {
    "load": text("subject"),
    "page cache": text("page_cache"),
    "MB": mb("bytes"),
    "stages, ms": lambda row: ", ".join(
        f"{name} {1e3 * value:.1f}" for name, value in row["seconds"].items() if name != "total"
    ),
    "total, ms": lambda row: f"{1e3 * row['seconds']['total']:.1f}",
    "plain copy, ms": ms("plain_copy_s"),
    "ratio": fixed("ratio_to_plain_copy", 2),
}


@dataclass(frozen=True, slots=True)
class LoadSubject:
    """A delta or a checkpoint: its files, its bytes, and a function that loads it once."""

    name: str
    paths: Sequence[Path]
    num_bytes: int
    load: Callable[[], Stages]


def delta_subjects(source: ObjectSource, loader: Loader, device: torch.device) -> list[LoadSubject]:
    """Make the server's loads from disk and from host memory, into a slot that was never touched."""
    host = torch.empty(source.device_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def slot() -> Tensor:
        return torch.empty(source.device_bytes, dtype=torch.uint8, device=device)

    def from_disk() -> Stages:
        report = loader.load(source, host, slot())
        return {"read and verify": report.read_s, "rest of copy": report.copy_s, "total": report.total_s}

    def from_host() -> Stages:
        report = loader.copy(host, slot())
        return {"copy": report.copy_s, "total": report.total_s}

    return [
        LoadSubject(DELTA, [source.path], source.device_bytes, from_disk),
        LoadSubject(HOST, [], source.device_bytes, from_host),
    ]


def checkpoint_subject(shards: Sequence[Path], device: torch.device) -> LoadSubject:
    """Make the load of a checkpoint with safetensors, all bytes copied into memory of their own."""

    def load() -> Stages:
        start = time.perf_counter()
        tensors: dict[str, Tensor] = {}
        for shard in shards:
            tensors.update(load_file(shard, device=str(device)))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            return {"load_file": (end := time.perf_counter()) - start, "total": end - start}
        mapped = time.perf_counter()
        # Bound to a name, so that no clone reuses the memory of another.
        owned = [tensor.clone() for tensor in tensors.values()]
        end = time.perf_counter()
        del owned
        return {"load_file": mapped - start, "clone": end - mapped, "total": end - start}

    num_bytes = sum(tensor.nbytes for shard in shards for tensor in load_file(shard).values())
    return LoadSubject(CHECKPOINT, shards, num_bytes, load)


def measure(subjects: Sequence[LoadSubject], repeats: int, device: torch.device) -> list[dict[str, Any]]:
    """Load each subject `repeats` times, page cache warm and dropped, in turns; return the medians.

    A subject that reads no file is measured once, beside the others' warm loads. A plain copy is of as many bytes,
    already in host memory, to memory that was never touched.
    """
    copies = {subject.name: plain_copy_s(subject.num_bytes, repeats, device) for subject in subjects}
    results: list[dict[str, Any]] = []
    for wish in (WARM, DROPPED):
        measured = [subject for subject in subjects if subject.paths or wish == WARM]
        runs: dict[str, list[Stages]] = {subject.name: [] for subject in measured}
        reached = {subject.name: wish if subject.paths else NO_FILE for subject in measured}
        for subject in measured:
            # Not counted: fills the page cache and host memory.
            subject.load()
        for _ in range(repeats):
            for subject in measured:
                _give_back_free_memory()
                if wish == DROPPED and not drop(subject.paths):
                    reached[subject.name] = NOT_DROPPED
                runs[subject.name].append(subject.load())
        for subject in measured:
            medians = {
                stage: median(run[stage] for run in runs[subject.name]) for stage in runs[subject.name][0]
            }
            results.append(
                {
                    "subject": subject.name,
                    "page_cache": reached[subject.name],
                    "bytes": subject.num_bytes,
                    "seconds": rounded(medians),
                    "plain_copy_s": round(copies[subject.name], 6),
                    "ratio_to_plain_copy": round(medians["total"] / copies[subject.name], 3),
                }
            )
    return results


def plain_copy_s(num_bytes: int, repeats: int, device: torch.device) -> float:
    """Time one copy of so many bytes from host memory, pinned for CUDA, to memory never touched; median seconds."""
    is_cuda = device.type == "cuda"
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_cuda).fill_(1)

    def copy() -> float:
        _give_back_free_memory()
        target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return seconds(lambda: target.copy_(host, non_blocking=is_cuda), device)

    return median(copy() for _ in range(repeats + 1))


def faster(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the checkpoint's time over the delta's, by state of the page cache.

    A delta in host memory is compared with the checkpoint in a warm page cache.
    """
    deltas, hosts, full = (
        [row for row in results if row["subject"] == name] for name in (DELTA, HOST, CHECKPOINT)
    )
    return {
        f"{delta['subject']}, {delta['page_cache']}": round(
            other["seconds"]["total"] / delta["seconds"]["total"], 2
        )
        for delta, other in [*zip(deltas, full, strict=True), (hosts[0], full[0])]
    }


def _give_back_free_memory() -> None:
    """Make glibc return free memory, so that the next load does not reuse the pages of the last one."""
    ctypes.CDLL(None).malloc_trim(0)


def report(args: Namespace) -> Report:
    device, shapes = torch.device(args.device), SMALL if args.small else FULL
    shards = write_checkpoint(args.directory, shapes)
    source = write_delta(args.directory / "delta.safetensors", shapes)
    loader = Loader(device, args.threads)
    try:
        subjects = [*delta_subjects(source, loader, device), checkpoint_subject(shards, device)]
        loads = measure(subjects, args.repeats, device)
    finally:
        loader.close()
    times = "; ".join(f"{value:.1f} times ({which})" for which, value in faster(loads).items())
    return Report(
        {"repeats": args.repeats, "threads": args.threads, "statistic": "median"},
        {"loads": loads, "faster": faster(loads)},
        [table_of(COLUMNS, loads), f"A delta's load is faster than its checkpoint's: {times}."],
        conditions=f"median of {args.repeats}, {args.threads} threads",
        device=device,
    )


OPTIONS = [option("--repeats", 10), THREADS, DEVICE]
main = Bench(
    "load",
    __doc__,
    report,
    OPTIONS,
    small="a pair of some megabytes",
    folder="for the files: a disk, not memory",
)

if __name__ == "__main__":
    sys.exit(main())
