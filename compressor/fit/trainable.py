"""A matrix delta in training: its scales, its low-rank residual and, where they may move, its signs.

Turns gradients of the weights into gradients of each part; independent of models and losses.

The weight is that of `deltastore.format.matrix`: base + sum of planes u_i B_ij v_j + left @ right. A sign that may move
is that of a latent number, and takes the gradient of the sign itself (the straight-through estimator of Bengio et al.,
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

from compressor.codec import row_blocks
from deltastore.format.matrix import MatrixDelta, SignPlane, pack_signs, unpack_mask

Rows = Tensor | slice  # ids without repetition, or a range

SMALLEST_LATENT = 1e-3  # so that the latent of a zero difference has a sign
LARGEST_LATENT = 4.0  # of an average difference; beyond, no step ever flips a sign
CHUNK_NUMEL = 1 << 24  # weights of a matrix whose temporaries exist at a time


@dataclass(frozen=True, slots=True, eq=False)
class ScaledParameter:
    """A vector or matrix of floats, kept in units of its own mean magnitude where steps are to be relative to it."""

    leaf: Tensor  # float32, moved by an optimizer
    unit: float  # 0 where all numbers are, which no relative step moves

    @classmethod
    def of(cls, value: Tensor, device: torch.device, *, relative: bool) -> ScaledParameter:
        unit = float(value.float().abs().mean()) if relative else 1.0
        return cls(value.float().div(unit or 1.0).to(device).requires_grad_(), unit)

    @property
    def value(self) -> Tensor:
        return self.leaf.detach() * self.unit

    def accumulate_grad(self, gradient: Tensor, rows: Rows = slice(None)) -> None:
        """Add a gradient with respect to some rows of `value`."""
        if self.leaf.grad is None:
            self.leaf.grad = torch.zeros_like(self.leaf)
        self.leaf.grad[rows] += gradient * self.unit


@dataclass(slots=True, eq=False)
class Latents:
    """The numbers whose signs are the signs of a plane."""

    values: Tensor  # [out, in] float16, on the CPU
    leaf: Tensor  # float32, moved by an optimizer; empty except during a step
    gradient: Tensor | None = None  # [out, in] float32, on the leaf's device

    @classmethod
    def of(cls, values: Tensor, device: torch.device) -> Latents:
        return cls(values, torch.empty(0, device=device, requires_grad=True))

    def accumulate_grad(self, gradient: Tensor, rows: Rows) -> None:
        """Add a gradient of some rows. The first gradient of all rows is taken over, not copied."""
        if self.gradient is None and len(gradient) == len(self.values):
            self.gradient = gradient
            return
        if self.gradient is None:
            self.gradient = gradient.new_zeros(self.values.shape)
        self.gradient[rows] += gradient

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Hold values and gradient in the leaf during an optimizer's step; drop the gradient afterwards."""
        leaf, empty = self.leaf, self.leaf.data
        leaf.data = self.values.to(leaf.device, torch.float32)
        leaf.grad, self.gradient = self.gradient, None
        yield
        self.values.copy_(leaf.data)
        leaf.grad, leaf.data = None, empty


@dataclass(slots=True, eq=False)
class TrainablePlane:
    """One sign plane in training."""

    packed: Tensor  # [out, ceil(in / 8)] uint8, on the CPU; replaced and never changed
    in_features: int
    device: torch.device  # of everything else
    scale_out: ScaledParameter | None  # [out] or [1]
    scale_in: ScaledParameter | None  # [in]
    latents: Latents | None = None

    @classmethod
    def of(cls, plane: SignPlane, device: torch.device, *, relative: bool) -> TrainablePlane:
        gain_of_in = plane.gain if plane.scale_out is None else 1.0
        scale_out, scale_in = (
            None if scale is None else ScaledParameter.of(scale.float() * gain, device, relative=relative)
            for scale, gain in ((plane.scale_out, plane.gain), (plane.scale_in, gain_of_in))
        )
        return cls(plane.signs, plane.in_features, device, scale_out, scale_in)

    def stored(self) -> SignPlane:
        """Return the present plane in its stored form."""
        scales = (None if scale is None else scale.value.cpu() for scale in (self.scale_out, self.scale_in))
        return SignPlane.from_scales(self.packed, self.in_features, *scales)

    def unfreeze_signs(self, difference: Tensor) -> None:
        """Let signs move, those of small differences first; `difference` ``[out, in]`` is overwritten."""
        magnitude = difference.abs_()
        magnitude.div_(magnitude.mean().clamp(min=torch.finfo(torch.float32).tiny))
        magnitude.clamp_(SMALLEST_LATENT, LARGEST_LATENT)
        values = torch.empty(magnitude.shape, dtype=torch.float16)
        for rows in row_blocks(tuple(magnitude.shape), CHUNK_NUMEL):
            values[rows] = self.signs(rows).mul_(magnitude[rows])
        self.latents = Latents.of(values, self.device)

    def restore_signs(self, values: Tensor) -> None:
        """Continue from latents ``[out, in]`` float16 on the CPU, which are taken over."""
        self.latents = Latents.of(values, self.device)
        self.packed = pack_signs(values > 0)

    def step_signs(self, optimizer: Optimizer) -> None:
        """Step the latents by their accumulated gradient, if any, and pack their signs anew."""
        if self.latents is None or self.latents.gradient is None:
            return
        with self.latents.loaded():
            optimizer.step()
        self.packed = pack_signs(self.latents.values > 0)

    def signs(self, rows: Rows) -> Tensor:  # [rows, in] float32
        packed = self.packed[rows]
        if self.device.type == "cpu":
            mask = unpack_mask(packed, self.in_features)
        else:
            # Unpacked on the device: an eighth of the bytes to copy.
            bits = torch.arange(8, dtype=torch.uint8, device=self.device)
            mask = (packed.to(self.device)[:, :, None] >> bits & 1).flatten(1)[:, : self.in_features]
        return mask.float().mul_(2).sub_(1)

    def dense(self, rows: Rows) -> Tensor:  # [rows, in]
        scale_out, scale_in = self._scales(rows)
        return self.signs(rows).mul_(scale_out).mul_(scale_in)

    def accumulate_scale_grad(self, gradient: Tensor, rows: Rows) -> None:
        """Add the gradient of the scales, from that of the weights ``[rows, in]``."""
        scale_out, scale_in = self._scales(rows)
        signed = gradient * self.signs(rows)
        if self.scale_out is not None:
            of_rows = (signed * scale_in).sum(1)
            if len(self.scale_out.leaf) == 1:
                self.scale_out.accumulate_grad(of_rows.sum()[None])
            else:
                self.scale_out.accumulate_grad(of_rows, rows)
        if self.scale_in is not None:
            self.scale_in.accumulate_grad((signed * scale_out).sum(0))

    def accumulate_sign_grad(self, gradient: Tensor, rows: Rows) -> None:
        """Add the gradient of the signs, from that of the weights ``[rows, in]``, which is taken over."""
        if self.latents is not None:
            scale_out, scale_in = self._scales(rows)
            self.latents.accumulate_grad(gradient.mul_(scale_out).mul_(scale_in), rows)

    def _scales(self, rows: Rows) -> tuple[Tensor, Tensor]:  # [rows or 1, 1], [in or 1]
        one = torch.ones(1, device=self.device)
        scale_out, scale_in = (
            one if part is None else part.value for part in (self.scale_out, self.scale_in)
        )
        return (scale_out if len(scale_out) == 1 else scale_out[rows])[:, None], scale_in


@dataclass(slots=True, eq=False)
class Trainable:
    """One coded matrix in training."""

    planes: list[TrainablePlane]
    left: ScaledParameter | None  # [out, rank]
    right: ScaledParameter | None  # [rank, in]

    @classmethod
    def of(cls, delta: MatrixDelta, device: torch.device, *, relative: bool) -> Trainable:
        """Start from a stored delta; with `relative`, steps are in units of each vector's mean magnitude."""
        left, right = (
            None if part is None else ScaledParameter.of(part, device, relative=relative)
            for part in (delta.left, delta.right)
        )
        planes = [TrainablePlane.of(plane, device, relative=relative) for plane in delta.planes]
        return cls(planes, left, right)

    def stored(self) -> MatrixDelta:
        """Return the present delta in its stored form."""
        left, right = (None if part is None else part.value.half().cpu() for part in (self.left, self.right))
        return MatrixDelta(tuple(plane.stored() for plane in self.planes), left, right)

    def parameters(self) -> Iterator[Tensor]:
        """Yield the leaves of scales and residual."""
        parts = [part for plane in self.planes for part in (plane.scale_out, plane.scale_in)]
        return (part.leaf for part in [*parts, self.left, self.right] if part is not None)

    def latents(self) -> Iterator[Latents]:
        """Yield the latents of planes whose signs may move."""
        return (plane.latents for plane in self.planes if plane.latents is not None)

    def unfreeze_signs(self, difference: Tensor) -> None:
        """Let signs move, those of small numbers first.

        A plane's numbers are `difference` ``[out, in]`` less the planes before it. `difference` is overwritten.
        """
        last = len(self.planes) - 1
        for number, plane in enumerate(self.planes):
            if number:
                difference -= self.planes[number - 1].dense(slice(None))
            plane.unfreeze_signs(difference if number == last else difference.clone())

    def step_signs(self, optimizer: Optimizer) -> None:
        """Step the signs of every plane by their accumulated gradients."""
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

    def accumulate_grad(self, gradient: Tensor, rows: Rows = slice(None)) -> None:
        """Add the gradient of every part, from that of the weights ``[rows, in]``, which is overwritten."""
        if rows == slice(None):
            for part in row_blocks(tuple(gradient.shape), CHUNK_NUMEL):
                self._accumulate_parameter_grads(gradient[part], part)
        else:
            self._accumulate_parameter_grads(gradient, rows)
        *others, last = self.planes
        for plane in others:
            plane.accumulate_sign_grad(gradient.clone(), rows)
        last.accumulate_sign_grad(gradient, rows)

    def _accumulate_parameter_grads(self, gradient: Tensor, rows: Rows) -> None:
        for plane in self.planes:
            plane.accumulate_scale_grad(gradient, rows)
        if self.left is not None and self.right is not None:
            self.left.accumulate_grad(gradient @ self.right.value.T, rows)
            self.right.accumulate_grad(self.left.value[rows].T @ gradient)
