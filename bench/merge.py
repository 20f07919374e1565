"""Time the merge of a one-bit delta into 16-bit weights beside a plain copy of the same weights.

Both read and write the same bytes of memory that was touched before. They take turns, so that other work on the machine
slows both.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import partial
from statistics import median
from typing import Any

import torch

from bench.harness import Bench, Report, fixed, in_turns, ms, option, table_of
from compressor.convert.merge_kernel import merge_rows
from deltastore.format.matrix import SignPlane, packed_width

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))  # the matrices of an 8B Llama
SMALL = ((64, 100),)
COLUMNS = {
    "matrix": lambda row: "x".join(map(str, row["shape"])),
    "copy, ms": ms("copy_s", 2),
    "merge, ms": ms("merge_s", 2),
    "merge / copy": fixed("merge_over_copy", 2),
}


def measure(shape: tuple[int, int], repeats: int) -> dict[str, Any]:
    """Copy and merge the same bfloat16 matrix in turns."""
    out_features, in_features = shape
    generator = torch.Generator().manual_seed(0)
    base = torch.empty(shape).normal_(std=0.02, generator=generator).bfloat16()
    packed = (out_features, packed_width(in_features))
    signs = torch.randint(0, 256, packed, dtype=torch.uint8, generator=generator)
    scales = torch.full((out_features,), 0.002), torch.ones(in_features)
    delta, out = SignPlane.from_scales(signs, in_features, *scales), torch.empty_like(base)
    merge = partial(merge_rows, base, delta, slice(None), out)
    # Compiles, and touches the output.
    merge()
    copies, merges = in_turns({"copy": partial(out.copy_, base), "merge": merge}, repeats).values()
    ratio = median(merged / copied for copied, merged in zip(copies, merges, strict=True))
    return {
        "shape": list(shape),
        "copy_s": round(median(copies), 6),
        "merge_s": round(median(merges), 6),
        "merge_over_copy": round(ratio, 3),
    }


def report(args: Namespace) -> Report:
    results = [measure(shape, args.repeats) for shape in (SMALL if args.small else SHAPES)]
    settings = {"repeats": args.repeats, "dtype": "bfloat16", "statistic": "median of pairs"}
    conditions = f"bfloat16, median of {args.repeats} pairs"
    return Report(settings, results, [table_of(COLUMNS, results)], conditions=conditions)


main = Bench("merge", __doc__, report, [option("--repeats", 51)], small="a tiny matrix")

if __name__ == "__main__":
    sys.exit(main())
