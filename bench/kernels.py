"""Time the one-bit product of many variants, beside the product of the base and beside a plain copy.

The linear layers of some blocks of a model run in turn, as in a step: once the base's bfloat16 product alone, once with
the grouped one-bit product after each; then the output head in the same way, as rows of its own. The blocks are
larger than any cache.
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
from torch import Tensor, nn

from bench.engine import SHAPES, SMALL
from bench.report import RESULTS, describe, write_result
from deltastore.console import table
from server import kernels
from server.kernels.reference import row_of
from server.model.loader import pack, packable

# Number of groups, and rows of each.
GROUPS = (
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
)
COPY_BYTES = 256 * 2**20
BLOCKS_BYTES = 96 * 2**20  # of the base's weights at least: more than a cache holds
DEFAULT_SHAPES = {"cpu": "158m", "cuda": "8b"}


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


@dataclass(frozen=True, slots=True)
class KernelFigure:
    """Medians over turns, of one block or of the output head."""

    part: str
    groups: int
    rows: int  # of each group
    base_s: float  # the base's products alone
    both_s: float  # with the one-bit products
    num_weights: int
    copy_bytes_s: float

    @property
    def added(self) -> float:
        """Time that one-bit products add, over that of the base's products."""
        return self.both_s / self.base_s - 1

    @property
    def memory(self) -> float:
        """Bytes of signs per second in one-bit products, over the bytes per second of a copy."""
        return self.groups * self.num_weights / 8 / max(self.both_s - self.base_s, 1e-9) / self.copy_bytes_s

    def as_json(self) -> dict[str, Any]:
        return {
            "part": self.part,
            "groups": self.groups,
            "rows_of_each": self.rows,
            "base_s": round(self.base_s, 7),
            "both_s": round(self.both_s, 7),
            "added_over_base": round(self.added, 3),
            "sign_bytes_over_copy": round(self.memory, 3),
        }


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("not measured: there is no CUDA device")
        return
    name = args.shapes or DEFAULT_SHAPES[device.type]
    shapes = SMALL if args.small else SHAPES[name]
    block, head = shapes.linear_layers, ((shapes.vocabulary, shapes.hidden),)
    kernels.prepare(device, {*block, *head}, torch.bfloat16)
    copy_bytes_s = copied(COPY_BYTES // (256 if args.small else 1), args.repeats, device)
    num_blocks = args.blocks or max(2, BLOCKS_BYTES // sum(2 * out * width for out, width in block))
    figures = []
    for part in (MatrixSet("block", block * num_blocks, num_blocks), MatrixSet("output head", head, 1)):
        figures += measure_part(part, args.repeats, copy_bytes_s, device)
    print(
        f"{describe(device)}; one block of {len(block)} linear layers and the output head of {head[0]}, bfloat16; "
        f"medians of {args.repeats} turns"
    )
    print(f"a copy reads and writes {copy_bytes_s / 1e9:.1f} GB/s\n")
    heads = (
        "part",
        "variants x rows",
        "base, ms",
        "with one-bit products, ms",
        "added / base",
        "signs read / copy",
    )
    print(table(heads, [_row(figure) for figure in figures]))
    if out := args.out or (None if args.small else RESULTS / file_name(device.type, name)):
        settings = {"repeats": args.repeats, "blocks": num_blocks, "dtype": "bfloat16"}
        settings |= {"block": block, "output_head": head[0]}
        settings |= {"num_threads": torch.get_num_threads(), "copy_bytes_s": round(copy_bytes_s)}
        write_result(
            out, "kernels", device, {"settings": settings, "results": [f.as_json() for f in figures]}
        )


def file_name(device: str, shapes: str) -> str:
    """Return the name of the result's file; the device's default shapes are not part of it."""
    kind = "" if device == "cpu" else f"-{device}"
    return f"kernels{kind}.json" if shapes == DEFAULT_SHAPES[device] else f"kernels{kind}-{shapes}.json"


def measure_part(
    part: MatrixSet,
    repeats: int,
    copy_bytes_s: float,
    device: torch.device,
) -> list[KernelFigure]:
    """Measure every composition, on layers that are freed afterwards."""
    most, count = max(groups for groups, _ in GROUPS), part.num_blocks
    layers = [CodedLayer.drawn(shape, most, device) for shape in part.shapes]
    num_weights = sum(layer.base.weight.numel() for layer in layers) // count
    figures = []
    for groups, rows in GROUPS:
        base_s, both_s = (seconds / count for seconds in measure(layers, repeats, (groups, rows)))
        figures.append(KernelFigure(part.name, groups, rows, base_s, both_s, num_weights, copy_bytes_s))
    return figures


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
    turns = [(seconds(base, device), seconds(both, device)) for _ in range(repeats)]
    base_s, both_s = (median(times) for times in zip(*turns, strict=True))
    return base_s, both_s


def copied(num_bytes: int, repeats: int, device: torch.device) -> float:
    """Measure the bytes per second that a copy reads and writes."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    times = [seconds(lambda: target.copy_(source), device) for _ in range(repeats)]
    return 2 * num_bytes / median(times)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time `work` until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _row(figure: KernelFigure) -> tuple[str, ...]:
    return (
        figure.part,
        f"{figure.groups} x {figure.rows}",
        f"{1e3 * figure.base_s:.3f}",
        f"{1e3 * figure.both_s:.3f}",
        f"{figure.added:.2f}",
        f"{figure.memory:.2f}",
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--small", action="store_true", help="tiny matrices; writes JSON only with --out")
    parser.add_argument("--shapes", choices=SHAPES, help="whose sizes; 158m by default, 8b on CUDA")
    parser.add_argument("--blocks", type=int, help="of the model; by default, as many as no cache holds")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--out", type=Path, help="the JSON file; under bench/results/ by default")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
