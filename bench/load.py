"""Time the load of a delta beside the load of the full checkpoint that it stands for.

Both begin with files on disk and end with every byte in newly allocated memory: `load_file` of safetensors maps lazily
on a CPU, so its tensors are cloned; a delta goes to a slot that was never touched. The delta's bytes are verified on
the way, the checkpoint's are not. A third load is that of a delta in host memory. No model runs and no request is made.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from bench.report import RESULTS, describe, write_result
from bench.synthetic import LlamaShapes, write_checkpoint, write_delta
from deltastore.console import table
from deltastore.loader import Loader
from deltastore.verified_object import ObjectSource
from peraxis.demo.page_cache import drop

FULL = LlamaShapes(num_layers=10)  # 1.17 GB in FP16
SMALL = LlamaShapes(num_layers=2, hidden=512, intermediate=1408, kv=128, vocabulary=8000)
WARM, DROPPED, NOT_DROPPED, NO_FILE = "warm", "dropped", "not dropped", "no file is read"
DELTA, HOST, CHECKPOINT = "delta", "delta in host memory", "full FP16 checkpoint"

Stages = Mapping[str, float]  # seconds by stage, in order; "total" is the last


@dataclass(frozen=True, slots=True)
class LoadSubject:
    """A delta or a checkpoint: its files, its bytes, and a function that loads it once."""

    name: str
    paths: Sequence[Path]
    num_bytes: int
    load: Callable[[], Stages]


@dataclass(frozen=True, slots=True)
class LoadFigure:
    """Medians of one subject in one state of the page cache."""

    subject: str
    cache: str
    num_bytes: int
    seconds: Stages
    plain_copy_s: float  # one copy of as many bytes, already in host memory, to memory that was never touched

    @property
    def ratio(self) -> float:
        return self.seconds["total"] / self.plain_copy_s

    def as_json(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "page_cache": self.cache,
            "bytes": self.num_bytes,
            "seconds": {stage: round(value, 6) for stage, value in self.seconds.items()},
            "plain_copy_s": round(self.plain_copy_s, 6),
            "ratio_to_plain_copy": round(self.ratio, 3),
        }


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        directory = Path(name)
        shapes = SMALL if args.small else FULL
        shards, source = (
            write_checkpoint(directory, shapes),
            write_delta(directory / "delta.safetensors", shapes),
        )
        loader = Loader(device, args.threads)
        try:
            subjects = [*delta_subjects(source, loader, device), checkpoint_subject(shards, device)]
            figures = measure(subjects, args.repeats, device)
        finally:
            loader.close()
    _print(figures, args, device)
    if out := args.out or (None if args.small else RESULTS / "load.json"):
        settings = {"repeats": args.repeats, "threads": args.threads, "statistic": "median"}
        results = [figure.as_json() for figure in figures]
        write_result(
            out, "load", device, {"settings": settings, "results": results, "faster": faster(figures)}
        )


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


def measure(subjects: Sequence[LoadSubject], repeats: int, device: torch.device) -> list[LoadFigure]:
    """Load each subject `repeats` times, page cache warm and dropped, in turns; return the medians.

    A subject that reads no file is measured once, beside the others' warm loads.
    """
    copies = {subject.name: plain_copy_s(subject.num_bytes, repeats, device) for subject in subjects}
    figures = []
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
        figures += [
            LoadFigure(s.name, reached[s.name], s.num_bytes, _medians(runs[s.name]), copies[s.name])
            for s in measured
        ]
    return figures


def plain_copy_s(num_bytes: int, repeats: int, device: torch.device) -> float:
    """Time one copy of so many bytes from host memory, pinned for CUDA, to memory never touched; median seconds."""
    is_cuda = device.type == "cuda"
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_cuda).fill_(1)

    def copy() -> float:
        _give_back_free_memory()
        target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        start = time.perf_counter()
        target.copy_(host, non_blocking=is_cuda)
        if is_cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    return median(copy() for _ in range(repeats + 1))


def faster(figures: Sequence[LoadFigure]) -> dict[str, float]:
    """Return the checkpoint's time over the delta's, by state of the page cache.

    A delta in host memory is compared with the checkpoint in a warm page cache.
    """
    deltas, hosts, full = ([f for f in figures if f.subject == name] for name in (DELTA, HOST, CHECKPOINT))
    pairs = [*zip(deltas, full, strict=True), (hosts[0], full[0])]
    return {
        f"{delta.subject}, {delta.cache}": round(other.seconds["total"] / delta.seconds["total"], 2)
        for delta, other in pairs
    }


def _give_back_free_memory() -> None:
    """Make glibc return free memory, so that the next load does not reuse the pages of the last one."""
    ctypes.CDLL(None).malloc_trim(0)


def _medians(runs: Sequence[Stages]) -> Stages:
    return {stage: median(run[stage] for run in runs) for stage in runs[0]}


def _print(figures: Sequence[LoadFigure], args: argparse.Namespace, device: torch.device) -> None:
    print(f"{describe(device)}; median of {args.repeats}, {args.threads} threads\n")
    head = ("load", "page cache", "MB", "stages, ms", "total, ms", "plain copy, ms", "ratio")
    print(table(head, list(_rows(figures))))
    times = "; ".join(f"{value:.1f} times ({which})" for which, value in faster(figures).items())
    print(f"\nA delta's load is faster than its checkpoint's: {times}.")


def _rows(figures: Sequence[LoadFigure]) -> Iterator[tuple[str, ...]]:
    for figure in figures:
        stages = [f"{name} {1e3 * value:.1f}" for name, value in figure.seconds.items() if name != "total"]
        yield (
            figure.subject,
            figure.cache,
            f"{figure.num_bytes / 1e6:.1f}",
            ", ".join(stages),
            f"{1e3 * figure.seconds['total']:.1f}",
            f"{1e3 * figure.plain_copy_s:.1f}",
            f"{figure.ratio:.2f}",
        )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.load", description=__doc__)
    parser.add_argument(
        "--small", action="store_true", help="a pair of some megabytes; writes JSON only with --out"
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=min(16, len(os.sched_getaffinity(0))))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dir", type=Path, help="where the files are made; a disk, not a file system in memory"
    )
    parser.add_argument("--out", type=Path, help="the JSON file; bench/results/load.json by default")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
