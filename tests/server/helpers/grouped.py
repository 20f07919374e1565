"""Groups of one-bit matrices for kernels' tests: operands, their addresses, and outputs that must stay untouched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltastore.format.matrix import pack_signs
from server.kernels import reference as onebit_reference

Product = Callable[[Tensor, Tensor, Tensor, Tensor], None]

# In and out: single values; no multiples of a byte, word or tile; exact tiles; many tiles and a remainder.
SHAPES = [(1, 1), (7, 5), (16, 3), (63, 9), (64, 2), (65, 33), (200, 17), (512, 16), (1024, 77), (1091, 31)]
# First rows and ends of groups, with gaps and an empty group.
ROWS = [[(0, 1)], [(1, 3)], [(0, 3), (5, 12)], [(0, 1), (1, 1), (1, 9), (11, 12)], [(1, 2), (2, 39)]]


@dataclass(frozen=True, slots=True)
class Operands:
    """The arguments of a product. Rows of no group hold NaN in `output` and `x`."""

    output: Tensor
    x: Tensor
    plane_ptrs: Tensor
    ranges: Tensor
    matrices: list[tuple[Tensor, Tensor, Tensor | None]]  # keeps alive what `plane_ptrs` points to

    def after(self, product: Product) -> Tensor:
        """Return the output after a product."""
        output = self.output.clone()
        product(output, self.x, self.plane_ptrs, self.ranges)
        return output


def operands(
    in_features: int,
    out_features: int,
    groups: Sequence[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Operands:
    """Draw random matrices. Every second has no `factor_in`; every third group has no matrix."""
    generator = torch.Generator().manual_seed(in_features * 7919 + out_features)
    num_rows = groups[-1][1] + 2
    owned = [row for first, last in groups for row in range(first, last)]
    output, x = (
        torch.full((num_rows, out_features), torch.nan),
        torch.full((num_rows, in_features), torch.nan),
    )
    output[owned] = torch.randn(len(owned), out_features, generator=generator)
    x[owned] = torch.randn(len(owned), in_features, generator=generator)
    matrices: list[tuple[Tensor, Tensor, Tensor | None]] = []
    for number in range(len(groups)):
        signs = pack_signs(torch.randn(out_features, in_features, generator=generator))
        factor_out = torch.randn(out_features, generator=generator).to(device)
        factor_in = None if number % 2 else torch.randn(in_features, generator=generator).to(device)
        matrices.append((signs.to(device), factor_out, factor_in))
    plane_ptrs = [
        (0 if number % 3 == 2 else s.data_ptr(), o.data_ptr(), 0 if i is None else i.data_ptr())
        for number, (s, o, i) in enumerate(matrices)
    ]
    return Operands(
        output.to(device, dtype),
        x.to(device, dtype),
        torch.tensor(plane_ptrs, device=device),
        torch.tensor(groups, dtype=torch.int32, device=device),
        matrices,
    )


def check(product: Product, given: Operands, tolerance: float = 1e-4) -> None:
    """Check that a product equals the reference, and leaves the NaN in rows of no group."""
    got, want = given.after(product), given.after(onebit_reference.add_onebit_matmul)
    owned = torch.zeros(len(got), dtype=torch.bool)
    for first, last in given.ranges.tolist():
        owned[first:last] = True
    assert not want[owned].isnan().any()
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
