"""The paper's formulas in float64: AdamW, the loss of a layer, and the training of its scales (Algorithm 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compressor.fit.paper import ActivationCache, FrozenLayer, PaperAxis, ScaleTrainingSettings

BETAS, EPSILON, DECAY = (0.9, 0.999), 1e-8, 0.01  # torch's defaults


@dataclass
class AdamW64:
    """AdamW of one tensor."""

    decay: float = DECAY
    num_steps: int = 0
    mean: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    square: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def stepped(self, value: Tensor, gradient: Tensor, lr: float) -> Tensor:
        self.num_steps += 1
        self.mean = BETAS[0] * self.mean + (1 - BETAS[0]) * gradient
        self.square = BETAS[1] * self.square + (1 - BETAS[1]) * gradient.square()
        unbiased = self.mean / (1 - BETAS[0] ** self.num_steps)
        spread = (self.square / (1 - BETAS[1] ** self.num_steps)).sqrt() + EPSILON
        return value * (1 - lr * self.decay) - lr * unbiased / spread


def coded(signs: Tensor, scale: Tensor, axis: PaperAxis) -> Tensor:  # [out, in] float64
    """Return v o B, from a mask and scales."""
    return torch.where(signs, 1.0, -1.0).double() * (scale[:, None] if axis == "out" else scale)


def squared_error(layer: FrozenLayer, scale: Tensor, axis: PaperAxis, x: Tensor, y: Tensor) -> Tensor:
    output = x.double() @ (layer.base.double() + coded(layer.signs, scale, axis)).T
    return (output - y.double()).square().mean()


def trained_scales(
    layer: FrozenLayer, init: Tensor, axis: PaperAxis, cache: ActivationCache, settings: ScaleTrainingSettings
) -> Tensor:
    """Return the scales that Algorithm 4 trains."""
    scale, optimizer = init.double(), AdamW64()
    starts = range(0, len(cache.x), settings.batch_rows)
    num_steps = settings.epochs * len(starts)
    for step in range(num_steps):
        first = starts[step % len(starts)]
        x, y = (t[first : first + settings.batch_rows] for t in (cache.x, cache.y))
        variable = scale.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(squared_error(layer, variable, axis, x, y), variable)
        lr = settings.lr * ((1 + math.cos(math.pi * step / num_steps)) / 2 if settings.cosine else 1)
        scale = optimizer.stepped(scale, gradient, lr)
    return scale
