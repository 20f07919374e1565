"""The delta of one matrix: sign planes and an optional low-rank residual. Owns its arithmetic.

Weight = base + plane 0 + plane 1 + ... + left @ right

Each further plane codes the error of the planes before it, at one more bit per weight. A residual of rank r takes 16
bits for each of its ``r * (out + in)`` numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from deltastore.format.sign_plane import Axis, SignPlane


@dataclass(frozen=True, slots=True, eq=False)
class MatrixDelta:
    """The difference of one matrix from the base's, in its stored form.

    Raises:
        ValueError: Planes or factors do not fit each other.
    """

    planes: tuple[SignPlane, ...]  # one or more, of one shape and one axis
    left: Tensor | None = None  # [out, rank] float16
    right: Tensor | None = None  # [rank, in] float16

    def __post_init__(self) -> None:
        if len({(plane.axis, plane.out_features, plane.in_features) for plane in self.planes}) != 1:
            raise ValueError("a matrix delta needs one or more planes of one axis and shape")
        if self.left is None and self.right is None:
            return
        if self.left is None or self.right is None:
            raise ValueError("a low-rank residual needs both factors")
        shapes = (self.out_features, self.rank), (self.rank, self.in_features)
        if (self.left.shape, self.right.shape) != shapes:
            raise ValueError(
                f"factors of shapes {list(self.left.shape)} and {list(self.right.shape)} do not fit"
            )
        if not self.left.dtype == self.right.dtype == torch.float16:
            raise ValueError(f"factors are {self.left.dtype} and {self.right.dtype} and must be float16")

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
        """The rank of the low-rank residual; 0 if there is none."""
        return 0 if self.right is None else len(self.right)

    def dense(self, rows: slice = slice(None)) -> Tensor:  # [len(rows), in] float32
        """Expand rows of the delta: the planes summed in order, then the residual."""
        delta = self.planes[0].dense(rows)
        for plane in self.planes[1:]:
            delta += plane.dense(rows)
        self.add_residual(delta, rows)
        return delta

    def add_residual(self, delta: Tensor, rows: slice) -> None:
        """Add ``left[rows] @ right`` to float32 `delta` ``[len(rows), in]`` in place, one rank after the other.

        A product of two FP16 numbers is exact in float32, so each rank rounds once, with or without fused
        multiply-add. A matrix product of torch would round in an order that depends on the machine.
        """
        if self.left is None or self.right is None:
            return
        for column, row in zip(self.left[rows].T.contiguous().float(), self.right.float(), strict=True):
            delta.addr_(column, row)


def largest_of_plane(gain: float, scales: Iterable[Tensor]) -> float:
    """Bound the magnitudes of a plane: the gain times the largest magnitude of each scale vector."""
    for scale in scales:
        gain *= float(scale.abs().max())
    return gain


def largest_of_residual(left: Tensor, right: Tensor) -> float:
    """Bound the magnitudes of ``left @ right``: the sum over ranks of the products of their largest magnitudes."""
    return float(left.abs().amax(0).double() @ right.abs().amax(1).double())
