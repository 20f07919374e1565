"""The delta of one matrix: sign planes, and a low-rank residual where there is one. Knows arithmetic, nothing of files.

Weight = base + plane 0 + plane 1 + ... + left @ right

A second plane codes what the first one loses, at one more bit per weight; a residual of rank r takes 16 bits for each
of its ``r * (out + in)`` numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from deltastore.format.onebit import Axis, OneBit


@dataclass(frozen=True, slots=True, eq=False)
class MatrixDelta:
    """What one matrix of the fine-tune adds to the base's, as it is stored."""

    planes: tuple[OneBit, ...]  # one or more, of one shape and one axis
    left: Tensor | None = None  # [out, rank] float16
    right: Tensor | None = None  # [rank, in] float16

    def __post_init__(self) -> None:
        assert len({(plane.axis, plane.out_features, plane.in_features) for plane in self.planes}) == 1
        assert (self.left is None) == (self.right is None)
        if self.left is not None and self.right is not None:
            assert self.left.dtype == self.right.dtype == torch.float16
            assert self.left.shape == (self.out_features, self.rank)
            assert self.right.shape == (self.rank, self.in_features)

    @property
    def axis(self) -> Axis:
        return self.planes[0].axis

    @property
    def out_features(self) -> int:
        return self.planes[0].out_features

    @property
    def in_features(self) -> int:
        return self.planes[0].in_features

    @property
    def num_planes(self) -> int:
        return len(self.planes)

    @property
    def rank(self) -> int:
        """Of the low-rank residual; 0 where there is none."""
        return 0 if self.right is None else len(self.right)

    def dense(self, rows: slice = slice(None)) -> Tensor:  # [len(rows), in] float32
        """The delta of the chosen rows as numbers: the planes in their order, then the residual."""
        delta = self.planes[0].dense(rows)
        for plane in self.planes[1:]:
            delta += plane.dense(rows)
        self.add_residual(delta, rows)
        return delta

    def add_residual(self, delta: Tensor, rows: slice) -> None:
        """Add ``left[rows] @ right`` to float32 `delta` ``[len(rows), in]`` in place, one rank after the other.

        A product of two FP16 numbers is exact in float32, so each rank rounds once and in one place, with or without
        fused instructions; a library's matrix product would round in an order of its own.
        """
        if self.left is None or self.right is None:
            return
        for column, row in zip(self.left[rows].T.contiguous().float(), self.right.float(), strict=True):
            delta.addr_(column, row)


def largest_of_plane(gain: float, scales: Iterable[Tensor]) -> float:
    """What no number of a plane exceeds: the gain times the largest magnitude of each scale vector."""
    for scale in scales:
        gain *= float(scale.abs().max())
    return gain


def largest_of_residual(left: Tensor, right: Tensor) -> float:
    """What no number of ``left @ right`` exceeds: over ranks, the sum of the products of their largest magnitudes."""
    return float(left.abs().amax(0).double() @ right.abs().amax(1).double())
