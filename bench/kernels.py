"""Time the one-bit product of many variants, beside the product of the base and beside a plain copy.

The linear layers of some blocks of a model run in turn, as in a step: once the base's bfloat16 product alone, once with
the grouped one-bit product after each; then the output head in the same way, as rows of its own. The blocks are
larger than any cache.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from bench.engine import SHAPES, SMALL
from bench.harness import Bench, Report, fixed, in_turns, ms, option, seconds, table_of, text
from server import kernels
from server.kernels.reference import row_of
from server.model.loader import pack, packable, widen, widenable

# Number of groups, and rows of each.
GROUPS = (
    *(
        (1, 1),
        (1, 2),
        (1, 4),
        (1, 16),
        (2, 1),
        (4, 1),
        (8, 1),
        (2, 8),
        (4, 4),
        (8, 2),
        (16, 1),
        (1, 64),
        (1, 256),
    ),
)
COPY_BYTES = 256 * 2**20
BLOCKS_BYTES = 96 * 2**20  # of the base's weights at least: more than a cache holds
DEFAULT_SHAPES = {"cpu": "158m", "cuda": "8b"}
COLUMNS = {
    "part": text("part"),
    "variants x rows": lambda row: f"{row['groups']} x {row['rows_of_each']}",
    "base, ms": ms("base_s", 3),
    "with one-bit products, ms": ms("both_s", 3),
    "added / base": fixed("added_over_base", 2),
    "signs read / copy": fixed("sign_bytes_over_copy", 2),
}


@dataclass(frozen=True, slots=True)
class CodedLayer:
    """A layer of the base as it is served, and each variant's signs and factors for it."""

    base: nn.Linear  # bfloat16, no bias
    signs: Tensor  # [variants, out, in / 8] uint8
    scales: tuple[Tensor, Tensor, Tensor]  # [out], [in] float16 and a gain: all variants'

    @classmethod
    def drawn(cls, shape: tuple[int, int], num_variants: int, device: torch.device) -> CodedLayer:
        out_features, in_features = shape
        base = nn.Linear(in_features, out_features, bias=False, dtype=torch.bfloat16, device=device)
        for layer in packable(base):
            pack(layer)
        for layer in widenable(base):
            widen(layer)
        packed = (num_variants, out_features, in_features // 8)
        signs = torch.randint(0, 256, packed, dtype=torch.uint8, device=device)
        scale_out, scale_in = (torch.ones(size, dtype=torch.float16, device=device) for size in shape)
        return cls(base, signs, (scale_out, scale_in, torch.full((1,), 2.0**-9, device=device)))

    def table(self, num_variants: int) -> Tensor:
        """Return the table of the first variants, [1, variants, FIELDS]."""
        rows = [row_of([(signs, *self.scales)]) for signs in self.signs[:num_variants]]
        return torch.stack(rows)[None].to(self.signs.device)


@dataclass(frozen=True, slots=True)
class MatrixSet:
    """Shapes of a part of the model, repeated for a number of blocks."""

    name: str
    shapes: Sequence[tuple[int, int]]
    num_blocks: int


def measure_part(
    part: MatrixSet, repeats: int, copy_bytes_s: float, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield a row for every composition, on layers that are freed afterwards; times are of one block or the head."""
    most, count = max(groups for groups, _ in GROUPS), part.num_blocks
    layers = [CodedLayer.drawn(shape, most, device) for shape in part.shapes]
    num_weights = sum(layer.base.weight.numel() for layer in layers) // count
    for groups, rows in GROUPS:
        base_s, both_s = (median_s / count for median_s in measure(layers, repeats, (groups, rows)))
        # Of the one-bit products alone.
        sign_bytes_s = groups * num_weights / 8 / max(both_s - base_s, 1e-9)
        yield {
            "part": part.name,
            "groups": groups,
            "rows_of_each": rows,
            "base_s": round(base_s, 7),
            "both_s": round(both_s, 7),
            "added_over_base": round(both_s / base_s - 1, 3),
            "sign_bytes_over_copy": round(sign_bytes_s / copy_bytes_s, 3),
        }


@torch.inference_mode()
def measure(layers: Sequence[CodedLayer], repeats: int, each: tuple[int, int]) -> tuple[float, float]:
    """Time all layers without and with one-bit products, in turns; return both medians in seconds."""
    num_groups, rows = each
    device = layers[0].signs.device
    tables = [layer.table(num_groups) for layer in layers]
    bounds = [(group * rows, (group + 1) * rows) for group in range(num_groups)]
    ranges = torch.tensor(bounds, dtype=torch.int32, device=device)
    order = torch.arange(num_groups * rows, dtype=torch.int32, device=device)
    widths = {layer.base.in_features for layer in layers}
    x = {width: torch.randn(num_groups * rows, width, device=device).bfloat16() for width in widths}

    def base() -> None:
        for layer in layers:
            layer.base(x[layer.base.in_features])

    def both() -> None:
        for layer, own in zip(layers, tables, strict=True):
            inputs, width = x[layer.base.in_features], layer.base.out_features
            kernels.add_planes(layer.base(inputs), inputs, own, order, ranges, [width])

    both()
    base_s, both_s = map(median, in_turns({"base": base, "both": both}, repeats, device).values())
    return base_s, both_s


def copied(num_bytes: int, repeats: int, device: torch.device) -> float:
    """Measure the bytes per second that a copy reads and writes."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    times = [seconds(partial(target.copy_, source), device) for _ in range(repeats)]
    return 2 * num_bytes / median(times)


def report(args: Namespace) -> Report | None:
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("not measured: there is no CUDA device")
        return None
    shapes = SMALL if args.small else SHAPES[_shapes(args)]
    block, head = shapes.linear_layers, ((shapes.vocabulary, shapes.hidden),)
    kernels.prepare(device, {*block, *head}, torch.bfloat16)
    copy_bytes_s = copied(COPY_BYTES // (256 if args.small else 1), args.repeats, device)
    num_blocks = args.blocks or max(2, BLOCKS_BYTES // sum(2 * out * width for out, width in block))
    parts = (MatrixSet("block", block * num_blocks, num_blocks), MatrixSet("output head", head, 1))
    results = [row for part in parts for row in measure_part(part, args.repeats, copy_bytes_s, device)]
    settings = {
        "repeats": args.repeats,
        "blocks": num_blocks,
        "dtype": "bfloat16",
        "block": block,
        "output_head": head[0],
        "num_threads": torch.get_num_threads(),
        "copy_bytes_s": round(copy_bytes_s),
    }
    conditions = (
        f"one block of {len(block)} linear layers and the output head of {head[0]}, bfloat16; medians of "
        f"{args.repeats} turns; a copy reads and writes {copy_bytes_s / 1e9:.1f} GB/s"
    )
    return Report(settings, results, [table_of(COLUMNS, results)], conditions=conditions, device=device)


def _shapes(args: Namespace) -> str:
    return str(args.shapes or DEFAULT_SHAPES[args.device])


def _file(args: Namespace) -> str:
    """Name the document; the device's default shapes are not part of it."""
    kind = "" if args.device == "cpu" else f"-{args.device}"
    shapes = "" if _shapes(args) == DEFAULT_SHAPES[args.device] else f"-{_shapes(args)}"
    return f"kernels{kind}{shapes}.json"


OPTIONS = (
    option("--device", "cpu", choices=("cpu", "cuda")),
    option("--shapes", None, "whose sizes; 158m by default, 8b on CUDA", choices=SHAPES),
    option("--blocks", None, "of the model; by default, as many as no cache holds", type=int),
    option("--repeats", 21),
)
main = Bench("kernels", __doc__, report, OPTIONS, small="tiny matrices", file=_file)

if __name__ == "__main__":
    sys.exit(main())
