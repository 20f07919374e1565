"""Code one matrix at one bit per weight, from weights alone: its signs and the scales of least squares.

Reads a weight difference D = W_f - W_b as float32 row blocks, any number of times; independent of files, names and
models. Memory holds one row block per thread, the packed signs (1/16 of a 16-bit matrix) and a few vectors.

With the sign mask B = sign(D), the error of any scales is that of |D|: ||D - (u v') o B|| = || |D| - u v' ||. So one
scale, one per row and one per column are means of |D|, and both together are its best approximation of rank one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from compressor.config import Method
from deltastore.format.matrix import MatrixDelta, SignPlane, StackDelta, pack_signs, packed_width

T = TypeVar("T")

BLOCK_NUMEL = 1 << 18  # 1 MiB as float32: a block and its temporaries stay in a core's cache
MAX_WORKERS = 8  # each holds some 6 MB of blocks and temporaries


class Map(Protocol):
    """The builtin `map` over row blocks, or a parallel one that keeps their order."""

    def __call__(self, work: Callable[[slice], T], blocks: Iterable[slice], /) -> Iterator[T]: ...


def row_blocks(shape: tuple[int, ...], block_numel: int = BLOCK_NUMEL) -> Iterator[slice]:
    """Yield blocks of a tensor's first dimension; they depend on its shape alone, so sums round the same everywhere."""
    if not shape:
        yield slice(None)
        return
    step = max(1, block_numel * shape[0] // max(1, math.prod(shape)))
    for first in range(0, shape[0], step):
        yield slice(first, min(first + step, shape[0]))


@contextmanager
def workers() -> Iterator[Map]:
    """Yield a parallel map whose threads each run torch on one core, because row blocks are too small for more."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(MAX_WORKERS, len(os.sched_getaffinity(0)))) as pool:
            yield pool.map
    finally:
        torch.set_num_threads(num_threads)


MAX_ALTERNATIONS = 10
# Relative change of a scale vector. FP16 rounds it by 5e-4.
CONVERGED = 1e-5


class Difference(Protocol):
    """A weight difference that can be read any number of times."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def row_block(self, rows: slice) -> Tensor:
        """Return some rows in float32, in memory that the caller may change."""
        ...


D = TypeVar("D", SignPlane, MatrixDelta, StackDelta)
M = TypeVar("M", SignPlane, MatrixDelta)


@dataclass(frozen=True, slots=True, eq=False)
class Coded(Generic[D]):
    """A coded matrix and its error."""

    delta: D
    num_zeros: int  # differences of exactly zero, coded +1 and -1 in turn so that they cancel
    squared_norm: float  # of the difference
    squared_error: float  # squared norm of the difference less the coded matrix

    @property
    def is_zero(self) -> bool:
        """True if every difference is zero."""
        return self.num_zeros == math.prod(self.delta.shape)

    @property
    def error(self) -> float:
        """Frobenius norm of the error over that of the difference; 0 where there is no difference."""
        return math.sqrt(self.squared_error / self.squared_norm) if self.squared_norm else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _SignsAndSums:
    """Signs and sums of a difference D, from one pass."""

    signs: Tensor  # [out, ceil(in / 8)] uint8
    row_sums: Tensor  # [out] float64, of |D|
    column_sums: Tensor  # [in] float64, of |D|
    squared_norm: float
    num_zeros: int


def code_matrix(difference: Difference, method: Method, each: Map = map) -> Coded[SignPlane]:
    """Code a matrix ``[out, in]``: signs of the difference, scales of least weight error.

    Args:
        method: ``scalar`` is one scale; ``per-axis`` one per row or one per column, whichever errs less; ``both`` one
            per row and one per column.
        each: maps a function over the row blocks; sums are taken in their order, so the result does not depend on it.
    """
    sums = _signs_and_sums(difference, each)
    by_row = _is_by_row([(sums, difference.shape)])
    scale_out, scale_in = _scales(difference, sums, method, each, by_row)
    delta = SignPlane.from_scales(sums.signs, difference.shape[1], scale_out, scale_in)
    squared_error = _squared_error(difference, delta, each) if sums.squared_norm else 0.0
    return Coded(delta, sums.num_zeros, sums.squared_norm, squared_error)


def code_stack(
    experts: Sequence[Difference], method: Method, *, transposed: bool, each: Map = map
) -> Coded[StackDelta]:
    """Code the matrices of a stack of experts ``[rows, columns]``, each with signs and scales of its own.

    Args:
        method: as for `code_matrix`; `per-axis` takes the axis that errs less over all experts.
        transposed: rows are inputs.
        each: as for `code_matrix`, over the row blocks of one expert.
    """
    sums = [_signs_and_sums(expert, each) for expert in experts]
    by_row = _is_by_row((own, expert.shape) for own, expert in zip(sums, experts, strict=True))
    planes, squared_error = [], 0.0
    for expert, own in zip(experts, sums, strict=True):
        scale_out, scale_in = _scales(expert, own, method, each, by_row)
        planes.append(SignPlane.from_scales(own.signs, expert.shape[1], scale_out, scale_in))
        squared_error += _squared_error(expert, planes[-1], each) if own.squared_norm else 0.0
    num_zeros, squared_norm = sum(own.num_zeros for own in sums), sum(own.squared_norm for own in sums)
    return Coded(StackDelta(tuple(planes), transposed), num_zeros, squared_norm, squared_error)


def measured(difference: Difference, delta: M, each: Map = map) -> Coded[M]:
    """Return a matrix that was coded by other means, with its error."""
    sums = _signs_and_sums(difference, each)
    return Coded(delta, sums.num_zeros, sums.squared_norm, _squared_distance(difference, delta, each))


def _signs_and_sums(difference: Difference, each: Map) -> _SignsAndSums:
    out_features, in_features = difference.shape
    signs = torch.empty(out_features, packed_width(in_features), dtype=torch.uint8)
    row_sums = torch.empty(out_features, dtype=torch.float64)

    def block_sums(rows: slice) -> tuple[Tensor, float, int]:
        block = difference.row_block(rows)
        positive = block > 0
        num_zeros = _alternate_zeros(positive, block, rows.start)
        signs[rows] = pack_signs(positive)
        block.abs_()
        row_sums[rows] = block.sum(1).double()
        return block.sum(0), _squared(block), num_zeros

    column_sums, squared_norm, num_zeros = torch.zeros(in_features, dtype=torch.float64), 0.0, 0
    for columns, squared, zeros in each(block_sums, row_blocks(difference.shape)):
        column_sums += columns
        squared_norm += squared
        num_zeros += zeros
    return _SignsAndSums(signs, row_sums, column_sums, squared_norm, num_zeros)


def _alternate_zeros(positive: Tensor, block: Tensor, first_row: int) -> int:
    """Make zeros positive where row + column is even, in place; +1 for all of them would bias every output."""
    zeros = block == 0
    num_zeros = int(zeros.count_nonzero())
    if num_zeros:
        chosen = torch.arange(block.shape[1]) % 2 == first_row % 2  # columns of the row block's first row
        zeros[0::2] &= chosen
        zeros[1::2] &= ~chosen
        positive |= zeros
    return num_zeros


def _is_by_row(matrices: Iterable[tuple[_SignsAndSums, tuple[int, ...]]]) -> bool:
    """True if one scale per row of each matrix explains at least as much of all differences as one per column."""
    explained_out = explained_in = torch.zeros((), dtype=torch.float64)
    for sums, (out_features, in_features) in matrices:
        # A scale explains its square of the squared norm, once per weight.
        explained_out = explained_out + (sums.row_sums / in_features).square().sum() * in_features
        explained_in = explained_in + (sums.column_sums / out_features).square().sum() * out_features
    return bool(explained_out >= explained_in)


def _scales(
    difference: Difference, sums: _SignsAndSums, method: Method, each: Map, by_row: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Scales per output row and per input column, float64; None where the method has none.

    Args:
        by_row: of the method `per-axis`: the axis.
    """
    out_features, in_features = difference.shape
    if method == "scalar":
        return sums.row_sums.sum()[None] / (out_features * in_features), None
    of_rows, of_columns = sums.row_sums / in_features, sums.column_sums / out_features
    if method == "both":
        return _rank_one(difference, of_columns, each)
    return (of_rows, None) if by_row else (None, of_columns)


def _rank_one(
    difference: Difference,
    scale_in: Tensor,  # [in] float64, where to start
    each: Map,
) -> tuple[Tensor, Tensor]:  # [out], [in] float64
    """Alternating least squares of u and v in |D| = u v', one pass over the row blocks for each alternation.

    |D| has no negative entry, so its leading pair of singular vectors has none. Each step reduces the distance to it by
    the squared ratio of the two largest singular values, which for deltas is a few percent.
    """
    scale_out = torch.zeros(difference.shape[0], dtype=torch.float64)
    for _ in range(MAX_ALTERNATIONS):
        if not scale_in.any():
            break
        direction = (scale_in / scale_in.square().sum()).float()

        def fit_block(rows: slice, direction: Tensor = direction) -> Tensor:
            block = difference.row_block(rows).abs_()
            fitted = block @ direction
            scale_out[rows] = fitted.double()
            return fitted @ block

        previous, total = scale_in, torch.zeros_like(scale_in)
        for part in each(fit_block, row_blocks(difference.shape)):
            total += part
        scale_in = total / scale_out.square().sum()
        if (scale_in - previous).norm() <= CONVERGED * scale_in.norm():
            break
    return scale_out, scale_in


def _squared_error(difference: Difference, delta: SignPlane, each: Map) -> float:
    """Squared error of a coding by own signs, with the scales as stored, FP16 rounding included."""
    scale_out = delta.factor_out()
    scale_in = torch.ones(delta.in_features) if delta.scale_in is None else delta.scale_in.float()

    def block_error(rows: slice) -> float:
        return _squared(difference.row_block(rows).abs_().addr_(scale_out[rows], scale_in, alpha=-1))

    return sum(each(block_error, row_blocks(difference.shape)))


def _squared_distance(difference: Difference, delta: SignPlane | MatrixDelta, each: Map) -> float:
    """Squared error of a delta with any signs and scales."""
    return sum(
        each(
            lambda rows: _squared(difference.row_block(rows).sub_(delta.dense(rows))),
            row_blocks(difference.shape),
        )
    )


def _squared(block: Tensor) -> float:
    return float(torch.linalg.vector_norm(block)) ** 2
