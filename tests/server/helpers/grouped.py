"""Deltas of one layer for kernels' tests: their terms, a table of them, and outputs that must stay untouched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltastore.format.matrix import pack_signs
from server.kernels import reference
from server.kernels.reference import FIELDS, WHOLE_DTYPES, row_of

Product = Callable[..., None]

# In and out: single values; no multiples of a byte, word or tile; exact tiles; many tiles and a remainder.
SHAPES = [(1, 1), (7, 5), (16, 3), (63, 9), (64, 2), (65, 33), (200, 17), (512, 16), (1024, 77), (1091, 31)]
# First rows and ends of slots' rows, with gaps and a slot without rows.
ROWS = [[(0, 1)], [(1, 3)], [(0, 3), (5, 12)], [(0, 1), (1, 1), (1, 9), (11, 12)], [(1, 2), (2, 39)]]
# What a delta of `mixed` has, by slot.
KINDS = (
    "plane",
    "nothing",
    "four planes",
    "low rank",
    "whole",
    "bias",
    "scalar",
    "no scale_in",
    "two planes",
)
Plane = tuple[Tensor, Tensor, Tensor | None, Tensor]


@dataclass(frozen=True, slots=True)
class Operands:
    """The arguments of a product. Rows of no slot hold NaN in `output` and `x`."""

    output: Tensor
    x: Tensor
    table: Tensor
    order: Tensor
    ranges: Tensor
    ends: list[int]
    # Of the first plane of each slot; they and `others` keep alive what the table points to.
    planes: list[Plane]
    others: list[Tensor]

    def after(self, product: Product) -> Tensor:
        """Return the output after a product."""
        output = self.output.clone()
        product(output, self.x, self.table, self.order, self.ranges, self.ends)
        return output

    @property
    def owned(self) -> Tensor:
        """The rows that belong to a slot, [rows] bool."""
        owned = torch.zeros(len(self.output), dtype=torch.bool)
        for first, last in self.ranges.tolist():
            owned[self.order[first:last].long()] = True
        return owned


def drawn_plane(
    out_features: int, in_features: int, generator: torch.Generator, device: str = "cpu"
) -> Plane:
    """Draw signs, `scale_out`, `scale_in` and gain."""
    signs = pack_signs(torch.randn(out_features, in_features, generator=generator))
    scale_out, scale_in = (
        torch.randn(n, generator=generator).half().to(device) for n in (out_features, in_features)
    )
    return signs.to(device), scale_out, scale_in, torch.tensor([0.5], device=device)


def operands(
    in_features: int,
    out_features: int,
    groups: Sequence[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Operands:
    """Draw random planes. Every second slot has no `scale_in`; every third has no delta."""
    generator = torch.Generator().manual_seed(in_features * 7919 + out_features)
    num_rows = groups[-1][1] + 2
    owned = [row for first, last in groups for row in range(first, last)]
    output, x = (
        torch.full((num_rows, out_features), torch.nan),
        torch.full((num_rows, in_features), torch.nan),
    )
    output[owned] = torch.randn(len(owned), out_features, generator=generator)
    x[owned] = torch.randn(len(owned), in_features, generator=generator)
    planes: list[Plane] = []
    table = torch.zeros(1, len(groups), FIELDS, dtype=torch.int64)
    for number in range(len(groups)):
        signs, scale_out, scale_in, gain = drawn_plane(out_features, in_features, generator, device)
        planes.append((signs, scale_out, None if number % 2 else scale_in, gain))
        if number % 3 != 2:
            table[0, number] = row_of([planes[-1]])
    return Operands(
        output.to(device, dtype),
        x.to(device, dtype),
        table.to(device),
        torch.arange(num_rows, dtype=torch.int32, device=device),
        torch.tensor(groups, dtype=torch.int32, device=device),
        [out_features],
        planes,
        [],
    )


def mixed(
    in_features: int,
    sizes: Sequence[int],  # outputs of each part
    num_rows: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Operands:
    """Draw deltas of every kind in several parts, whose rows lie in any order between those of the base."""
    generator = torch.Generator().manual_seed(in_features * 7919 + num_rows)
    num_slots = len(KINDS)
    table = torch.zeros(len(sizes), num_slots, FIELDS, dtype=torch.int64)
    planes: list[Plane] = []
    others: list[Tensor] = []

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        others.append(torch.randn(shape, generator=generator).to(dtype).to(device))
        return others[-1]

    for part, out_features in enumerate(sizes):
        base_bias = draw(out_features)
        for slot in range(num_slots):
            kind = KINDS[(slot + part) % num_slots]
            count = {"nothing": 0, "whole": 0, "bias": 0, "two planes": 2, "four planes": 4}.get(kind, 1)
            own = [drawn_plane(out_features, in_features, generator, device) for _ in range(count)]
            if kind == "no scale_in":
                own = [(signs, scale_out, None, gain) for signs, scale_out, _, gain in own]
            if kind == "scalar":
                own = [(signs, scale_out[:1].clone(), None, gain) for signs, scale_out, _, gain in own]
            planes += own
            half = torch.float16
            table[part, slot] = row_of(
                own,
                (draw(out_features, 3, dtype=half), draw(3, in_features, dtype=half))
                if kind == "low rank"
                else None,
                draw(out_features, in_features, dtype=WHOLE_DTYPES[slot % 3]) if kind == "whole" else None,
                draw(out_features) if kind in ("bias", "low rank") else None,
                base_bias,
            )
    slots = torch.randint(-1, num_slots, (num_rows,), generator=generator)
    # One slot has many rows.
    slots[: num_rows // 2] = slots[0]
    counts = torch.bincount(slots[slots >= 0], minlength=num_slots)
    ends = counts.cumsum(0)
    x, output = (torch.randn(num_rows, n, generator=generator) for n in (in_features, sum(sizes)))
    return Operands(
        output.to(device, dtype),
        x.to(device, dtype),
        table.to(device),
        slots.argsort(stable=True)[int((slots < 0).sum()) :].int().to(device),
        torch.stack([ends - counts, ends], 1).int().contiguous().to(device),
        torch.tensor(sizes).cumsum(0).tolist(),
        planes,
        others,
    )


def check(product: Product, given: Operands, tolerance: float = 1e-4) -> None:
    """Check that a product equals the reference, and leaves the NaN in rows of no slot."""
    got, want = given.after(product), given.after(reference.add_planes)
    assert not want[given.owned].isnan().any()
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
