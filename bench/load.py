"""How long is the load of a delta, beside the load of the full checkpoint that it stands for?

Both begin with files on disk and end with every byte in memory that was taken for this load: stock `load_file`
maps lazily on a CPU, so its tensors are cloned; a delta goes to a slot that was never touched. The delta's bytes are
verified on the way, the checkpoint's are not. Load alone is measured: no request, no model.
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
from deltastore.loader import Loader, ObjectSource
from demo.page_cache import drop
from demo.table import table

FULL = LlamaShapes(num_layers=10)  # 1.17 GB in FP16
SMALL = LlamaShapes(num_layers=2, hidden=512, intermediate=1408, kv=128, vocabulary=8000)
WARM, DROPPED, NOT_DROPPED = "warm", "dropped", "not dropped"

Stages = Mapping[str, float]  # seconds by stage, in order; "total" is the last


@dataclass(frozen=True, slots=True)
class Subject:
    """Something to be loaded: its files, its bytes, and one load of it."""

    name: str
    paths: Sequence[Path]
    num_bytes: int
    load: Callable[[], Stages]


@dataclass(frozen=True, slots=True)
class Figure:
    """The medians of one subject in one state of the page cache."""

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
        loader = Loader(device, source.device_bytes, args.threads, num_buffers=1)
        try:
            subjects = [delta_subject(source, loader, device), checkpoint_subject(shards, device)]
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


def delta_subject(source: ObjectSource, loader: Loader, device: torch.device) -> Subject:
    """A load as the server does it, into a slot that nothing has touched."""

    def load() -> Stages:
        slot = torch.empty(source.device_bytes, dtype=torch.uint8, device=device)
        report = loader.load(source, slot)
        return {"read and verify": report.read_s, "copy": report.copy_s, "total": report.total_s}

    return Subject("delta", [source.path], source.device_bytes, load)


def checkpoint_subject(shards: Sequence[Path], device: torch.device) -> Subject:
    """A load with the stock library, all bytes in memory of their own."""

    def load() -> Stages:
        start = time.perf_counter()
        tensors: dict[str, Tensor] = {}
        for shard in shards:
            tensors.update(load_file(shard, device=str(device)))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            return {"load_file": (end := time.perf_counter()) - start, "total": end - start}
        mapped = time.perf_counter()
        owned = [tensor.clone() for tensor in tensors.values()]
        end = time.perf_counter()
        assert len(owned) == len(tensors)
        return {"load_file": mapped - start, "clone": end - mapped, "total": end - start}

    num_bytes = sum(tensor.nbytes for shard in shards for tensor in load_file(shard).values())
    return Subject("full FP16 checkpoint", shards, num_bytes, load)


def measure(subjects: Sequence[Subject], repeats: int, device: torch.device) -> list[Figure]:
    """Median of `repeats` loads of each subject, page cache warm and dropped; subjects take turns."""
    copies = {subject.name: plain_copy_s(subject.num_bytes, repeats, device) for subject in subjects}
    figures = []
    for wish in (WARM, DROPPED):
        runs: dict[str, list[Stages]] = {subject.name: [] for subject in subjects}
        reached = dict.fromkeys(runs, wish)
        for subject in subjects:
            subject.load()  # fills the cache and touches the staging buffer; not counted
        for _ in range(repeats):
            for subject in subjects:
                _give_back_free_memory()
                if wish == DROPPED and not drop(subject.paths):
                    reached[subject.name] = NOT_DROPPED
                runs[subject.name].append(subject.load())
        figures += [
            Figure(s.name, reached[s.name], s.num_bytes, _medians(runs[s.name]), copies[s.name])
            for s in subjects
        ]
    return figures


def plain_copy_s(num_bytes: int, repeats: int, device: torch.device) -> float:
    """Median seconds of one copy of so many bytes from host memory, pinned for CUDA, to memory never touched."""
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


def faster(figures: Sequence[Figure]) -> dict[str, float]:
    """How many times faster the delta is there than the checkpoint, by state of the page cache."""
    return {
        delta.cache: round(full.seconds["total"] / delta.seconds["total"], 2)
        for delta, full in zip(figures[::2], figures[1::2], strict=True)
    }


def _give_back_free_memory() -> None:
    """Make glibc return what is free, so that the next load gets fresh pages and not those of the load before."""
    ctypes.CDLL(None).malloc_trim(0)


def _medians(runs: Sequence[Stages]) -> Stages:
    return {stage: median(run[stage] for run in runs) for stage in runs[0]}


def _print(figures: Sequence[Figure], args: argparse.Namespace, device: torch.device) -> None:
    print(f"{describe(device)}; median of {args.repeats}, {args.threads} threads\n")
    head = ("load", "page cache", "MB", "stages, ms", "total, ms", "plain copy, ms", "ratio")
    print(table(head, list(_rows(figures))))
    times = ", ".join(f"{value:.1f} times ({cache})" for cache, value in faster(figures).items())
    print(f"\nA delta's load is faster than its checkpoint's: {times}.")


def _rows(figures: Sequence[Figure]) -> Iterator[tuple[str, ...]]:
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
