"""One sign plane of a matrix: packed signs, scale vectors and a gain. Owns its arithmetic.

Weight = base + gain * scale_out[:, None] * B * scale_in[None, :]

This is the paper's section 2 with both axes at once; B is the sign mask. The gain is a power of two, so that scales of
deltas near 1e-6 stay in FP16's normal range and multiply exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deltastore.format.signs import packed_width, unpack_signs

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


def _power_of_two_below(magnitude: float) -> float:
    """Return the largest power of two at most `magnitude`, within float32's normal range; 1 for zero, NaN or inf."""
    if magnitude == 0 or not math.isfinite(magnitude):
        return 1.0
    exponent = math.frexp(magnitude)[1] - 1
    return math.ldexp(1.0, max(-126, min(127, exponent)))
