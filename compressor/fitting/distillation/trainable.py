"""A matrix delta that trains: its scales, its residual and, where they may move, its signs.

Knows weights, and what a gradient of the weights says of each part; nothing of models or losses.

The weight is that of `deltastore.format.matrix`:
base + sum of planes u_i B_ij v_j + left @ right. A sign that may move is
that of a latent number, and takes the gradient of the sign itself (the straight-through estimator of Bengio et al.,
2013). Latents rest in float16 in host memory, two bytes each; during a step those of one matrix are float32 on the
device, and their signs are packed anew after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from compressor.io.row_blocks import row_blocks
from deltastore.format.matrix import MatrixDelta
from deltastore.format.onebit import OneBit
from deltastore.format.signs import pack_signs, unpack_mask

Rows = Tensor | slice  # which rows: ids without repetition, or a range

SMALLEST_LATENT = 1e-3  # so that a sign of nothing still has a sign
LARGEST_LATENT = 4.0  # of an average difference; beyond, no step ever flips a sign
CHUNK_NUMEL = 1 << 24  # of a matrix, whose temporaries are there at a time


@dataclass(frozen=True, slots=True, eq=False)
class ScaledParameter:
    """A vector or matrix of floats, kept in units of its own mean magnitude where steps are to be relative to it."""

    leaf: Tensor  # float32, what an optimizer moves
    unit: float  # 0 where all numbers are and no relative step moves them

    @classmethod
    def of(cls, value: Tensor, device: torch.device, *, relative: bool) -> ScaledParameter:
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
class Latents:
    """The numbers behind signs that move."""

    values: Tensor  # [out, in] float16, on the CPU
    leaf: Tensor  # float32, what an optimizer moves; empty but during a step
    gradient: Tensor | None = None  # [out, in] float32, on the leaf's device

    @classmethod
    def of(cls, values: Tensor, device: torch.device) -> Latents:
        return cls(values, torch.empty(0, device=device, requires_grad=True))

    def collect(self, gradient: Tensor, rows: Rows) -> None:
        """Add a gradient of some rows; that of all rows is taken over where it is the first."""
        if self.gradient is None and len(gradient) == len(self.values):
            self.gradient = gradient
            return
        if self.gradient is None:
            self.gradient = gradient.new_zeros(self.values.shape)
        self.gradient[rows] += gradient

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Have values and gradient in the leaf for an optimizer's step; afterwards the gradient is gone."""
        leaf, empty = self.leaf, self.leaf.data
        leaf.data = self.values.to(leaf.device, torch.float32)
        leaf.grad, self.gradient = self.gradient, None
        yield
        self.values.copy_(leaf.data)
        leaf.grad, leaf.data = None, empty


@dataclass(slots=True, eq=False)
class Plane:
    """One sign plane."""

    packed: Tensor  # [out, ceil(in / 8)] uint8, on the CPU; replaced and never changed
    in_features: int
    device: torch.device  # of everything else
    out: ScaledParameter | None  # [out] or [1]
    across: ScaledParameter | None  # [in]
    latents: Latents | None = None

    @classmethod
    def of(cls, plane: OneBit, device: torch.device, *, relative: bool) -> Plane:
        out, across = plane.scale_out, plane.scale_in
        gain_of_across = plane.gain if out is None else 1.0
        return cls(
            plane.signs,
            plane.in_features,
            device,
            None if out is None else ScaledParameter.of(out.float() * plane.gain, device, relative=relative),
            None
            if across is None
            else ScaledParameter.of(across.float() * gain_of_across, device, relative=relative),
        )

    def stored(self) -> OneBit:
        """As it is now, in its stored form."""
        out, across = (None if part is None else part.value.cpu() for part in (self.out, self.across))
        return OneBit.from_scales(self.packed, self.in_features, out, across)

    def release_signs(self, difference: Tensor) -> None:
        """Let signs move; those of small differences, ``[out, in]``, move first. The differences are overwritten."""
        magnitude = difference.abs_()
        magnitude.div_(magnitude.mean().clamp(min=torch.finfo(torch.float32).tiny))
        magnitude.clamp_(SMALLEST_LATENT, LARGEST_LATENT)
        values = torch.empty(magnitude.shape, dtype=torch.float16)
        for rows in row_blocks(tuple(magnitude.shape), CHUNK_NUMEL):
            values[rows] = self.signs(rows).mul_(magnitude[rows])
        self.latents = Latents.of(values, self.device)

    def adopt(self, values: Tensor) -> None:
        """Go on from latents ``[out, in]`` as `Latents` keeps them, which are taken over."""
        self.latents = Latents.of(values, self.device)
        self.packed = pack_signs(values > 0)

    def step_signs(self, optimizer: Optimizer) -> None:
        """Move the latents by the gradient that was collected, if any, and let the signs follow."""
        if self.latents is None or self.latents.gradient is None:
            return
        with self.latents.at_hand():
            optimizer.step()
        self.packed = pack_signs(self.latents.values > 0)

    def signs(self, rows: Rows) -> Tensor:  # [rows, in] float32
        packed = self.packed[rows]
        if self.device.type == "cpu":
            mask = unpack_mask(packed, self.in_features)
        else:  # an eighth of the bytes to copy
            bits = torch.arange(8, dtype=torch.uint8, device=self.device)
            mask = (packed.to(self.device)[:, :, None] >> bits & 1).flatten(1)[:, : self.in_features]
        return mask.float().mul_(2).sub_(1)

    def dense(self, rows: Rows) -> Tensor:  # [rows, in]
        down, across = self._factors(rows)
        return self.signs(rows).mul_(down).mul_(across)

    def collect_scales(self, gradient: Tensor, rows: Rows) -> None:
        """Add what the gradient of the weights ``[rows, in]`` says of scales."""
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

    def collect_signs(self, gradient: Tensor, rows: Rows) -> None:
        """Add what the gradient of the weights ``[rows, in]`` says of signs; the gradient is taken over."""
        if self.latents is not None:
            down, across = self._factors(rows)
            self.latents.collect(gradient.mul_(down).mul_(across), rows)

    def _factors(self, rows: Rows) -> tuple[Tensor, Tensor]:  # [rows or 1, 1], [in or 1]
        one = torch.ones(1, device=self.device)
        down, across = (one if part is None else part.value for part in (self.out, self.across))
        return (down if len(down) == 1 else down[rows])[:, None], across


@dataclass(slots=True, eq=False)
class Trainable:
    """One coded matrix while it trains."""

    planes: list[Plane]
    left: ScaledParameter | None  # [out, rank]
    right: ScaledParameter | None  # [rank, in]

    @classmethod
    def of(cls, delta: MatrixDelta, device: torch.device, *, relative: bool) -> Trainable:
        """Start from a stored delta; with `relative`, steps are in units of each vector's mean magnitude."""
        left, right = (
            None if part is None else ScaledParameter.of(part, device, relative=relative)
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

    def latents(self) -> Iterator[Latents]:
        """Those of signs that may move."""
        return (plane.latents for plane in self.planes if plane.latents is not None)

    def release_signs(self, difference: Tensor) -> None:
        """Let signs move, those first that are of small numbers: of ``[out, in]`` less what other planes code."""
        last = len(self.planes) - 1
        for number, plane in enumerate(self.planes):
            if number:
                difference -= self.planes[number - 1].dense(slice(None))
            plane.release_signs(difference if number == last else difference.clone())

    def step_signs(self, optimizer: Optimizer) -> None:
        """Move signs by the gradients that were collected for them."""
        for plane in self.planes:
            plane.step_signs(optimizer)

    def dense(self, rows: Rows = slice(None)) -> Tensor:  # [rows, in] float32
        delta = self.planes[0].dense(rows)
        for plane in self.planes[1:]:
            delta += plane.dense(rows)
        if self.left is not None and self.right is not None:
            delta.addmm_(self.left.value[rows], self.right.value)
        return delta

    def add_to(self, weight: Tensor) -> None:  # [out, in] float32, on the device
        """Add the delta to a weight, in place."""
        for rows in row_blocks(tuple(weight.shape), CHUNK_NUMEL):
            weight[rows] += self.dense(rows)

    def collect(self, gradient: Tensor, rows: Rows = slice(None)) -> None:
        """Add what the gradient of the weights ``[rows, in]`` says of every part. The gradient is overwritten."""
        if rows == slice(None):
            for part in row_blocks(tuple(gradient.shape), CHUNK_NUMEL):
                self._collect_numbers(gradient[part], part)
        else:
            self._collect_numbers(gradient, rows)
        *others, last = self.planes
        for plane in others:
            plane.collect_signs(gradient.clone(), rows)
        last.collect_signs(gradient, rows)

    def _collect_numbers(self, gradient: Tensor, rows: Rows) -> None:
        for plane in self.planes:
            plane.collect_scales(gradient, rows)
        if self.left is not None and self.right is not None:
            self.left.collect(gradient @ self.right.value.T, rows)
            self.right.collect(self.left.value[rows].T @ gradient)
