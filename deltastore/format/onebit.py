"""One coded matrix: packed signs, its scale vectors and a gain. Knows the arithmetic of a delta and nothing of files.

Weight = base + gain * out[:, None] * B * in[None, :]    (paper, section 2, with both axes at once; B is the sign mask)

The gain is a power of two, so that scales of deltas near 1e-6 stay in FP16's normal range and multiply exactly.
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
class OneBit:
    """A matrix delta at one bit per weight, as it is stored."""

    signs: Tensor  # [out, ceil(in / 8)] uint8
    in_features: int
    gain: float  # a power of two
    scale_out: Tensor | None = None  # [out] or, for `scalar`, [1]; float16
    scale_in: Tensor | None = None  # [in] float16

    def __post_init__(self) -> None:
        assert self.signs.shape[1] == packed_width(self.in_features)
        assert self.scale_out is not None or self.scale_in is not None
        assert is_gain(self.gain)

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
    ) -> OneBit:
        """Normalise float scales into their stored form: FP16 vectors and a power-of-two gain.

        With both scales, `scale_in` is given mean magnitude 1 and `scale_out` takes up the rest. The gain is the
        largest power of two that is not above the largest magnitude, so that stored scales lie at or below 2. A scale
        of at least 2^-14 of its unit (the gain, or 1 for `scale_in` beside `scale_out`) is stored within 2^-11 of
        itself, a smaller one within 2^-25 of the unit.
        """
        if scale_out is not None and scale_in is not None:
            mean = scale_in.double().abs().mean()
            if mean > 0:
                scale_in = scale_in.double() / mean
                scale_out = scale_out.double() * mean
        carrier = scale_out if scale_out is not None else scale_in
        assert carrier is not None
        gain = _power_of_two_below(float(carrier.double().abs().max()))
        carrier = (carrier.double() / gain).half()
        if scale_out is None:
            return cls(signs, in_features, gain, scale_in=carrier)
        return cls(signs, in_features, gain, carrier, None if scale_in is None else scale_in.half())

    def factor_out(self) -> Tensor:  # [out] float32
        """What multiplies each output row: gain times `scale_out` (exact in float32), or the gain alone."""
        if self.scale_out is None:
            return torch.full((self.out_features,), self.gain)
        return (self.scale_out.float() * self.gain).expand(self.out_features)

    def dense(self, rows: slice = slice(None)) -> Tensor:  # [len(rows), in] float32
        """The delta of the chosen rows as numbers, in the order of operations that every kernel keeps."""
        delta = unpack_signs(self.signs[rows], self.in_features) * self.factor_out()[rows, None]
        return delta if self.scale_in is None else delta.mul_(self.scale_in.float())


def is_gain(value: float) -> bool:
    """Whether a number may be a gain: a power of two in float32's normal range."""
    return math.isfinite(value) and value >= 2.0**-126 and math.frexp(value)[0] == 0.5


def _power_of_two_below(magnitude: float) -> float:
    """Largest power of two at most `magnitude`, within float32's normal range; 1 for a magnitude of zero."""
    if magnitude == 0 or not math.isfinite(magnitude):
        return 1.0
    exponent = math.frexp(magnitude)[1] - 1
    return math.ldexp(1.0, max(-126, min(127, exponent)))
