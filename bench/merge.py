"""Time the merge of a one-bit delta into 16-bit weights beside a plain copy of the same weights.

Both read and write the same bytes of memory that was touched before. They take turns, so that other work on the machine
slows both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.report import RESULTS, describe, write_result
from compressor.convert.merge_kernel import merge_rows
from deltastore.console import table
from deltastore.format.matrix import SignPlane, packed_width

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))  # the matrices of an 8B Llama
SMALL = ((64, 100),)


@dataclass(frozen=True, slots=True)
class MergeFigure:
    """Medians over pairs of a copy and a merge."""

    shape: tuple[int, int]
    copy_s: float
    merge_s: float
    ratio: float  # of merge to copy, the median over pairs

    def as_json(self) -> dict[str, Any]:
        return {
            "shape": list(self.shape),
            "copy_s": round(self.copy_s, 6),
            "merge_s": round(self.merge_s, 6),
            "merge_over_copy": round(self.ratio, 3),
        }


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    figures = [measure(shape, args.repeats) for shape in (SMALL if args.small else SHAPES)]
    device = torch.device("cpu")
    print(f"{describe(device)}; bfloat16, median of {args.repeats} pairs\n")
    head = ("matrix", "copy, ms", "merge, ms", "merge / copy")
    print(table(head, [_row(figure) for figure in figures]))
    if out := args.out or (None if args.small else RESULTS / "merge.json"):
        settings = {"repeats": args.repeats, "dtype": "bfloat16", "statistic": "median of pairs"}
        write_result(out, "merge", device, {"settings": settings, "results": [f.as_json() for f in figures]})


def measure(shape: tuple[int, int], repeats: int) -> MergeFigure:
    """Copy and merge the same bfloat16 matrix in turns."""
    out_features, in_features = shape
    generator = torch.Generator().manual_seed(0)
    base = torch.empty(shape).normal_(std=0.02, generator=generator).bfloat16()
    packed = (out_features, packed_width(in_features))
    signs = torch.randint(0, 256, packed, dtype=torch.uint8, generator=generator)
    scales = torch.full((out_features,), 0.002), torch.ones(in_features)
    delta, out = SignPlane.from_scales(signs, in_features, *scales), torch.empty_like(base)

    def merge() -> None:
        merge_rows(base, delta, slice(None), out)

    # Compiles, and touches the output.
    merge()
    pairs = [(_seconds(lambda: out.copy_(base)), _seconds(merge)) for _ in range(repeats)]
    copies, merges = zip(*pairs, strict=True)
    return MergeFigure(
        shape, median(copies), median(merges), median(merged / copied for copied, merged in pairs)
    )


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _row(figure: MergeFigure) -> tuple[str, ...]:
    shape = "x".join(map(str, figure.shape))
    return shape, f"{1e3 * figure.copy_s:.2f}", f"{1e3 * figure.merge_s:.2f}", f"{figure.ratio:.2f}"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.merge", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny matrix; writes JSON only with --out")
    parser.add_argument("--repeats", type=int, default=51)
    parser.add_argument("--out", type=Path, help="the JSON file; bench/results/merge.json by default")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
