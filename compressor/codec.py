"""One matrix at one bit per weight, from weights alone: its signs and the scales that least squares gives.

Knows a difference as float32 row blocks that can be read again; nothing of files, names or models. Every method sees
the matrix a block at a time, so what it holds is the packed signs (1/16 of a 16-bit matrix) and a few vectors.

With signs B = sign(D), the error of any scales is that of |D|: ||D - (u v') o B|| = || |D| - u v' ||. So one scale, one
per row and one per column are means of |D|, and both together are its best approximation of rank one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from deltastore.onebit import OneBit
from deltastore.signs import pack_signs, packed_width

Method = Literal["scalar", "per-axis", "both"]
MAX_ALTERNATIONS = 10
CONVERGED = 1e-5  # relative change of a scale vector; what FP16 keeps of it is 5e-4


class Difference(Protocol):
    """A matrix difference that can be read any number of times."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Row blocks from the first row to the last, each float32 and the caller's own to change."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """A coded matrix and how far it is from the difference."""

    delta: OneBit
    num_zeros: int  # differences of exactly zero, coded +1 and -1 in turn so that they cancel
    squared_norm: float  # of the difference
    squared_error: float  # of the difference less the coded one

    @property
    def is_zero(self) -> bool:
        """Whether there is no difference at all."""
        return self.num_zeros == self.delta.out_features * self.delta.in_features

    @property
    def error(self) -> float:
        """Frobenius norm of what is lost over that of the difference; 0 where there is no difference."""
        return math.sqrt(self.squared_error / self.squared_norm) if self.squared_norm else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Survey:
    """What one pass over a difference D gives."""

    signs: Tensor  # [out, ceil(in / 8)] uint8
    row_sums: Tensor  # [out] float64, of |D|
    column_sums: Tensor  # [in] float64, of |D|
    squared_norm: float
    num_zeros: int


def code_matrix(difference: Difference, method: Method) -> Coded:
    """Code a matrix ``[out, in]``: signs of the difference, scales of least weight error.

    Args:
        method: ``scalar`` is one scale; ``per-axis`` one per row or one per column, whichever errs less; ``both`` one
            per row and one per column.
    """
    survey = _survey(difference)
    scale_out, scale_in = _scales(difference, survey, method)
    delta = OneBit.from_scales(survey.signs, difference.shape[1], scale_out, scale_in)
    squared_error = _squared_error(difference, delta) if survey.squared_norm else 0.0
    return Coded(delta, survey.num_zeros, survey.squared_norm, squared_error)


def _survey(difference: Difference) -> _Survey:
    out_features, in_features = difference.shape
    signs = torch.empty(out_features, packed_width(in_features), dtype=torch.uint8)
    row_sums, column_sums = (
        torch.empty(out_features, dtype=torch.float64),
        torch.zeros(in_features, dtype=torch.float64),
    )
    squared_norm, num_zeros = 0.0, 0
    for rows, block in difference.blocks():
        positive = block > 0
        num_zeros += _alternate_zeros(positive, block, rows.start)
        signs[rows] = pack_signs(positive)
        block.abs_()
        row_sums[rows] = block.sum(1).double()
        column_sums += block.sum(0)
        squared_norm += float(torch.linalg.vector_norm(block)) ** 2
    return _Survey(signs, row_sums, column_sums, squared_norm, num_zeros)


def _alternate_zeros(positive: Tensor, block: Tensor, first_row: int) -> int:
    """Make zeros positive where row + column is even, in place; +1 for all of them would shift every output one way."""
    zeros = block == 0
    num_zeros = int(zeros.count_nonzero())
    if num_zeros:
        chosen = torch.arange(block.shape[1]) % 2 == first_row % 2  # columns of the block's first row
        zeros[0::2] &= chosen
        zeros[1::2] &= ~chosen
        positive |= zeros
    return num_zeros


def _scales(difference: Difference, survey: _Survey, method: Method) -> tuple[Tensor | None, Tensor | None]:
    """Scales per output row and per input column, float64; None where the method has none."""
    out_features, in_features = difference.shape
    if method == "scalar":
        return survey.row_sums.sum()[None] / (out_features * in_features), None
    by_row, by_column = survey.row_sums / in_features, survey.column_sums / out_features
    if method == "both":
        return _rank_one(difference, by_column)
    # What a scale explains of the squared norm: its square, once per weight.
    explained_out, explained_in = by_row.square().sum() * in_features, by_column.square().sum() * out_features
    return (by_row, None) if explained_out >= explained_in else (None, by_column)


def _rank_one(
    difference: Difference,
    scale_in: Tensor,  # [in] float64, where to start
) -> tuple[Tensor, Tensor]:  # [out], [in] float64
    """Alternating least squares of u and v in |D| = u v', one pass over the blocks for each alternation.

    |D| has no negative entry, so its leading pair of singular vectors has none, and each step nears it by the square
    of the ratio of its two largest singular values, which for matrices of deltas is some percent.
    """
    scale_out = torch.zeros(difference.shape[0], dtype=torch.float64)
    for _ in range(MAX_ALTERNATIONS):
        if not scale_in.any():
            break
        previous, total = scale_in, torch.zeros_like(scale_in)
        direction = (previous / previous.square().sum()).float()
        for rows, block in difference.blocks():
            part = block.abs_() @ direction
            scale_out[rows] = part.double()
            total += part @ block
        scale_in = total / scale_out.square().sum()
        if (scale_in - previous).norm() <= CONVERGED * scale_in.norm():
            break
    return scale_out, scale_in


def _squared_error(difference: Difference, delta: OneBit) -> float:
    """Of the scales as they are stored, FP16 rounding included."""
    scale_out = delta.factor_out()
    scale_in = torch.ones(delta.in_features) if delta.scale_in is None else delta.scale_in.float()
    total = 0.0
    for rows, block in difference.blocks():
        total += float(torch.linalg.vector_norm(block.abs_().addr_(scale_out[rows], scale_in, alpha=-1))) ** 2
    return total
