"""A matrix delta that trains: its scales, its residual and, where they may move, its signs.

Knows weights, and what a gradient of the weights says of each part; nothing of models, losses or optimizers.

The weight is that of `deltastore.matrix`: base + sum of planes u_i B_ij v_j + left @ right. A sign that may move is
that of a latent number, and takes the gradient of the sign itself (the straight-through estimator of Bengio et al.,
2013).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deltastore.matrix import MatrixDelta
from deltastore.onebit import OneBit
from deltastore.signs import pack_signs, unpack_mask

Rows = Tensor | slice  # which rows: ids without repetition, or a range

SMALLEST_LATENT = 1e-3  # so that a sign of nothing still has a sign
LARGEST_LATENT = 4.0  # of an average difference; beyond, no step ever flips a sign


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """A vector or matrix of floats, kept in units of its own mean magnitude where steps are to be relative to it."""

    leaf: Tensor  # float32, what an optimizer moves
    unit: float  # 0 where all numbers are and no relative step moves them

    @classmethod
    def of(cls, value: Tensor, device: torch.device, *, relative: bool) -> Numbers:
        unit = float(value.float().abs().mean()) if relative else 1.0
        return cls(value.float().div(unit or 1.0).to(device).requires_grad_(), unit)

    @property
    def value(self) -> Tensor:
        return self.leaf.detach() * self.unit

    def collect(self, gradient: Tensor, rows: Rows = slice(None)) -> None:
        """Add a gradient with respect to `value`, of some rows."""
        if self.leaf.grad is None:
            self.leaf.grad = torch.zeros_like(self.leaf)
        self.leaf.grad[rows] += gradient * self.unit


@dataclass(slots=True, eq=False)
class Plane:
    """One sign plane."""

    packed: Tensor  # [out, ceil(in / 8)] uint8, on the CPU; what the signs are where there is no latent
    in_features: int
    device: torch.device  # of everything else
    out: Numbers | None  # [out] or [1]
    across: Numbers | None  # [in]
    latent: Tensor | None = None  # [out, in] float32, a leaf

    @classmethod
    def of(cls, plane: OneBit, device: torch.device, *, relative: bool) -> Plane:
        out, across = plane.scale_out, plane.scale_in
        gain_of_across = plane.gain if out is None else 1.0
        return cls(
            plane.signs,
            plane.in_features,
            device,
            None if out is None else Numbers.of(out.float() * plane.gain, device, relative=relative),
            None
            if across is None
            else Numbers.of(across.float() * gain_of_across, device, relative=relative),
        )

    def stored(self) -> OneBit:
        """As it is now, in its stored form."""
        packed = self.packed if self.latent is None else pack_signs(self.latent.detach().cpu() > 0)
        out, across = (None if part is None else part.value.cpu() for part in (self.out, self.across))
        return OneBit.from_scales(packed, self.in_features, out, across)

    def release_signs(self, difference: Tensor) -> None:
        """Let signs move; those of small differences, ``[out, in]``, move first."""
        magnitude = difference.abs()
        magnitude.div_(magnitude.mean().clamp(min=torch.finfo(torch.float32).tiny))
        magnitude.clamp_(SMALLEST_LATENT, LARGEST_LATENT)
        self.latent = self.signs(slice(None)).mul_(magnitude).requires_grad_()

    def signs(self, rows: Rows) -> Tensor:  # [rows, in] float32
        if self.latent is None:
            mask = unpack_mask(self.packed[rows], self.in_features)
            return mask.to(self.device).float().mul_(2).sub_(1)
        return torch.where(self.latent.detach()[rows] > 0, 1.0, -1.0)

    def dense(self, rows: Rows) -> Tensor:  # [rows, in]
        down, across = self._factors(rows)
        return self.signs(rows).mul_(down).mul_(across)

    def collect(self, gradient: Tensor, rows: Rows) -> None:
        """Add what the gradient of the weights ``[rows, in]`` says of scales and signs."""
        down, across = self._factors(rows)
        signed = gradient * self.signs(rows)
        if self.out is not None:
            along = (signed * across).sum(1)
            if len(self.out.leaf) == 1:
                self.out.collect(along.sum()[None])
            else:
                self.out.collect(along, rows)
        if self.across is not None:
            self.across.collect((signed * down).sum(0))
        if self.latent is not None:
            if self.latent.grad is None:
                self.latent.grad = torch.zeros_like(self.latent)
            self.latent.grad[rows] += gradient * down * across

    def _factors(self, rows: Rows) -> tuple[Tensor, Tensor]:  # [rows or 1, 1], [in or 1]
        one = torch.ones(1, device=self.device)
        down, across = (one if part is None else part.value for part in (self.out, self.across))
        return (down if len(down) == 1 else down[rows])[:, None], across


@dataclass(slots=True, eq=False)
class Trainable:
    """One coded matrix while it trains."""

    planes: list[Plane]
    left: Numbers | None  # [out, rank]
    right: Numbers | None  # [rank, in]

    @classmethod
    def of(cls, delta: MatrixDelta, device: torch.device, *, relative: bool) -> Trainable:
        """Start from a stored delta; with `relative`, steps are in units of each vector's mean magnitude."""
        left, right = (
            None if part is None else Numbers.of(part, device, relative=relative)
            for part in (delta.left, delta.right)
        )
        return cls([Plane.of(plane, device, relative=relative) for plane in delta.planes], left, right)

    def stored(self) -> MatrixDelta:
        """As it is now, in its stored form."""
        left, right = (None if part is None else part.value.half().cpu() for part in (self.left, self.right))
        return MatrixDelta(tuple(plane.stored() for plane in self.planes), left, right)

    def numbers(self) -> Iterator[Tensor]:
        """The leaves of scales and residual."""
        parts = [part for plane in self.planes for part in (plane.out, plane.across)]
        return (part.leaf for part in [*parts, self.left, self.right] if part is not None)

    def latents(self) -> Iterator[Tensor]:
        """The leaves of signs that may move."""
        return (plane.latent for plane in self.planes if plane.latent is not None)

    def release_signs(self, difference: Tensor) -> None:
        """Let signs move, those first that are of small numbers: of ``[out, in]`` less what other planes code."""
        for number, plane in enumerate(self.planes):
            if number:
                difference = difference - self.planes[number - 1].dense(slice(None))
            plane.release_signs(difference)

    def dense(self, rows: Rows = slice(None)) -> Tensor:  # [rows, in] float32
        delta = self.planes[0].dense(rows)
        for plane in self.planes[1:]:
            delta += plane.dense(rows)
        if self.left is not None and self.right is not None:
            delta.addmm_(self.left.value[rows], self.right.value)
        return delta

    def collect(self, gradient: Tensor, rows: Rows = slice(None)) -> None:
        """Add what the gradient of the weights ``[rows, in]`` says of every part."""
        for plane in self.planes:
            plane.collect(gradient, rows)
        if self.left is not None and self.right is not None:
            self.left.collect(gradient @ self.right.value.T, rows)
            self.right.collect(self.left.value[rows].T @ gradient)
