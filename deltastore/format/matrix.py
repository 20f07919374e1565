"""The delta of one matrix, or of a stack of experts: sign planes and an optional low-rank residual.

Owns its arithmetic and the packing of signs.

Weight = base + plane 0 + plane 1 + ... + left @ right

Each further plane codes the error of the planes before it, at one more bit per weight. A residual of rank r takes 16
bits for each of its ``r * (out + in)`` numbers.

A sign plane has packed signs, scale vectors and a gain. Its part of the weight is

    gain * scale_out[:, None] * B * scale_in[None, :]

This is the paper's section 2 with both axes at once; B is the sign mask. The gain is a power of two, so that scales of
deltas near 1e-6 stay in FP16's normal range and multiply exactly.

Signs are packed eight to a byte: bit i of byte j is input ``8j + i`` (least significant first); a set bit is +1, a
clear bit -1; pad bits are 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor


def packed_width(in_features: int) -> int:
    """Return the bytes of one output row of `in_features` signs."""
    return (in_features + 7) // 8


def pack_signs(
    positive: Tensor,  # [out, in] bool, or a real dtype where > 0 means +1
) -> Tensor:  # [out, ceil(in / 8)] uint8
    """Pack a sign mask row by row. In a real dtype zero counts as -1; pass a bool mask to choose otherwise."""
    mask = positive if positive.dtype == torch.bool else positive > 0
    return torch.from_numpy(np.packbits(mask.numpy(), axis=-1, bitorder="little"))


def unpack_mask(
    packed: Tensor,  # [out, ceil(in / 8)] uint8
    in_features: int,
) -> Tensor:  # [out, in] bool
    """The inverse of `pack_signs`, as a mask: True where the sign is +1."""
    bits = np.unpackbits(packed.numpy(), axis=-1, count=in_features, bitorder="little")
    return torch.from_numpy(bits).view(torch.bool)


def unpack_signs(
    packed: Tensor,  # [out, ceil(in / 8)] uint8
    in_features: int,
) -> Tensor:  # [out, in] float32, each -1 or +1
    """The inverse of `pack_signs`, as numbers."""
    return unpack_mask(packed, in_features).float().mul_(2).sub_(1)


def num_stray_bits(packed: Tensor, in_features: int) -> int:
    """Count the rows of `packed` that have a pad bit set; a well-formed mask has none."""
    used = in_features % 8
    if used == 0:
        return 0
    return int((packed[:, -1] >> used).count_nonzero())


Axis = Literal["scalar", "out", "in", "both"]
AXES: tuple[Axis, ...] = ("scalar", "out", "in", "both")


@dataclass(frozen=True, slots=True, eq=False)
class SignPlane:
    """One plane of a matrix delta in its stored form: a sign per weight, one or two scale vectors and a gain.

    Raises:
        ValueError: The signs' width, the scales or the gain are not those of a plane.
    """

    signs: Tensor  # [out, ceil(in / 8)] uint8
    in_features: int
    gain: float  # a power of two
    scale_out: Tensor | None = None  # [out] or, for `scalar`, [1]; float16
    scale_in: Tensor | None = None  # [in] float16

    def __post_init__(self) -> None:
        if self.signs.shape[1] != packed_width(self.in_features):
            raise ValueError(f"{self.signs.shape[1]} bytes per row are not {self.in_features} packed signs")
        if self.scale_out is None and self.scale_in is None:
            raise ValueError("a sign plane needs scale_out, scale_in or both")
        if not is_gain(self.gain):
            raise ValueError(f"gain {self.gain} is not a power of two in float32's normal range")

    @property
    def axis(self) -> Axis:
        if self.scale_out is None:
            return "in"
        if self.scale_in is not None:
            return "both"
        return "scalar" if self.scale_out.numel() == 1 and self.out_features != 1 else "out"

    @property
    def out_features(self) -> int:
        return self.signs.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @classmethod
    def from_scales(
        cls,
        signs: Tensor,  # [out, ceil(in / 8)] uint8
        in_features: int,
        scale_out: Tensor | None,  # [out] or [1], any float dtype
        scale_in: Tensor | None,  # [in], any float dtype
    ) -> SignPlane:
        """Normalize float scales into their stored form: FP16 vectors and a power-of-two gain.

        With both scales, `scale_in` is normalized to mean magnitude 1 and `scale_out` is multiplied by the mean. The
        gain is the largest power of two at most the largest magnitude, so stored scales are below 2. A scale of at
        least 2^-14 of its unit (the gain, or 1 for `scale_in` beside `scale_out`) is stored with a relative error of
        at most 2^-11, a smaller one with an error of at most 2^-25 of the unit.

        Raises:
            ValueError: Both scales are None.
        """
        if scale_out is not None and scale_in is not None:
            mean = scale_in.double().abs().mean()
            if mean > 0:
                scale_in = scale_in.double() / mean
                scale_out = scale_out.double() * mean
        carrier = scale_out if scale_out is not None else scale_in
        if carrier is None:
            raise ValueError("a sign plane needs scale_out, scale_in or both")
        gain = _power_of_two_below(float(carrier.double().abs().max()))
        carrier = (carrier.double() / gain).half()
        if scale_out is None:
            return cls(signs, in_features, gain, scale_in=carrier)
        return cls(signs, in_features, gain, carrier, None if scale_in is None else scale_in.half())

    def factor_out(self) -> Tensor:  # [out] float32
        """Return the factor of each output row: gain times `scale_out`, exact in float32, or the gain alone."""
        if self.scale_out is None:
            return torch.full((self.out_features,), self.gain)
        return (self.scale_out.float() * self.gain).expand(self.out_features)

    def dense(self, rows: slice = slice(None)) -> Tensor:  # [len(rows), in] float32
        """Expand rows of the delta, in the order of operations that every kernel keeps."""
        delta = unpack_signs(self.signs[rows], self.in_features) * self.factor_out()[rows, None]
        return delta if self.scale_in is None else delta.mul_(self.scale_in.float())


def is_gain(value: float) -> bool:
    """True if a number may be a gain: a power of two in float32's normal range."""
    return math.isfinite(value) and value >= 2.0**-126 and math.frexp(value)[0] == 0.5


def are_gains(values: Tensor) -> Tensor:
    """Return for each float32 number if it may be a gain, as `is_gain` does."""
    mantissa, _ = torch.frexp(values)
    return values.isfinite() & (values >= 2.0**-126) & (mantissa == 0.5)


def _power_of_two_below(magnitude: float) -> float:
    """Return the largest power of two at most `magnitude`, within float32's normal range; 1 for zero, NaN or inf."""
    if magnitude == 0 or not math.isfinite(magnitude):
        return 1.0
    exponent = math.frexp(magnitude)[1] - 1
    return math.ldexp(1.0, max(-126, min(127, exponent)))


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
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

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


@dataclass(frozen=True, slots=True, eq=False)
class StackDelta:
    """The difference of a stack of experts ``[experts, rows, columns]``: a sign plane of its own for each expert.

    A plane's `scale_out` belongs to the rows as they are stored. In a transposed stack rows are inputs.

    Raises:
        ValueError: There is no expert, or their planes have other axes or shapes.
    """

    experts: tuple[SignPlane, ...]
    transposed: bool = False  # stored as ``[experts, in, out]``

    def __post_init__(self) -> None:
        forms = {(len(plane.signs), plane.in_features, *map(_size, _scales(plane))) for plane in self.experts}
        if len(forms) != 1:
            raise ValueError("a stack needs one or more experts of one axis and shape")

    @property
    def shape(self) -> tuple[int, int, int]:
        first = self.experts[0]
        return len(self.experts), first.out_features, first.in_features

    @property
    def axis(self) -> Axis:
        """The axis by the features of the layer, which a transposed stack has the other way round."""
        return turned(self.experts[0].axis) if self.transposed else self.experts[0].axis

    def dense(self, experts: slice = slice(None)) -> Tensor:  # [len(experts), rows, columns] float32
        """Expand some experts' deltas."""
        return torch.stack([plane.dense() for plane in self.experts[experts]])


def turned(axis: Axis) -> Axis:
    """Return the axis of a transposed matrix."""
    other: dict[Axis, Axis] = {"out": "in", "in": "out"}
    return other.get(axis, axis)


def _scales(plane: SignPlane) -> tuple[Tensor | None, Tensor | None]:
    return plane.scale_out, plane.scale_in


def _size(scale: Tensor | None) -> int | None:
    return None if scale is None else scale.numel()
