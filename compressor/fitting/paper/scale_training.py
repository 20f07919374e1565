"""The paper's layer stage, faithfully: AdamW on one scale vector over cached activations, and the choice of its axis.

Algorithms 5 and 6 (`train_scales`, `choose_axis`) with the candidates' initial scales. Knows one layer and its caches;
how the caches are filled (Algorithms 1 and 4) and what follows end to end (Algorithms 2 and 3) is other files' part.

=============  ==========================================  ============================================
ours           one scale per                               the paper's text; its Algorithm 6 and files
=============  ==========================================  ============================================
``out``        output feature, a row of ``W[out, in]``     ``row``; ``col``: mean of |delta| over axis 1
``in``         input feature, a column of ``W[out, in]``   ``col``; ``row``: mean of |delta| over axis 0
``scalar``     matrix                                      BitDelta's coefficient
=============  ==========================================  ============================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

PaperAxis = Literal["scalar", "out", "in"]
EndLoss = Callable[[PaperAxis, Tensor], float]  # of the whole model with a candidate's scales in this layer


@dataclass(frozen=True, slots=True, eq=False)
class Cache:
    """What forward hooks keep of one layer, in BF16, at least one row."""

    x: Tensor  # [n, in] bfloat16: what reaches the layer in the student
    y: Tensor  # [n, out] bfloat16: what leaves it in the fine-tune, without the bias

    def __post_init__(self) -> None:
        assert self.x.dtype == self.y.dtype == torch.bfloat16
        assert len(self.x) == len(self.y) > 0

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows in order, `size` at a time and the rest last, float32."""
        for start in range(0, len(self.x), size):
            yield self.x[start : start + size].float(), self.y[start : start + size].float()


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """A layer's calibration rows: those that train and those that judge."""

    train: Cache
    held_out: Cache


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """What stays frozen while scales train."""

    base: Tensor  # [out, in] any real dtype
    signs: Tensor  # [out, in] bool, True where +1


@dataclass(frozen=True, slots=True)
class Recipe:
    """The budget that every candidate gets; the defaults are the paper's."""

    batch_rows: int  # of one step: the tokens of one cached batch
    epochs: int = 5
    lr: float = 1e-4
    cosine: bool = False
    scalar: bool = False  # whether a single scale is among the candidates, too


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The axis chosen, its trained scales, and what each candidate lost by."""

    axis: PaperAxis
    scale: Tensor  # [out], [in] or [1] float32
    losses: dict[PaperAxis, float]


def initial_scale(
    delta: Tensor,  # [out, in] float32
    axis: PaperAxis,
) -> Tensor:  # [out], [in] or, for `scalar` (BitDelta's coefficient), [1]; float32
    """Mean magnitude of the delta over what shares a scale: the least weight error that the delta's signs allow."""
    magnitude = delta.float().abs()
    if axis == "scalar":
        return magnitude.mean()[None]
    return magnitude.mean(1 if axis == "out" else 0)


def train_scales(
    layer: Layer,
    init: Tensor,  # [out], [in] or [1]
    axis: PaperAxis,
    cache: Cache,
    recipe: Recipe,
) -> Tensor:  # as init, float32
    """Algorithm 5: the scales after `recipe.epochs` passes over the cache, one AdamW step on squared error per batch.

    The cosine schedule, where asked for, falls to zero over all steps. Rows are taken in the cache's order.
    """
    base, signs = _frozen(layer)
    scale = init.float().clone().requires_grad_()
    optimizer = AdamW([scale], lr=recipe.lr)
    num_steps = recipe.epochs * math.ceil(len(cache.x) / recipe.batch_rows)
    schedule = CosineAnnealingLR(optimizer, num_steps) if recipe.cosine else None
    with torch.enable_grad():
        for _ in range(recipe.epochs):
            for x, y in cache.batches(recipe.batch_rows):
                optimizer.zero_grad()
                loss = F.mse_loss(F.linear(x, base) + _delta_output(x, signs, scale, axis), y)
                torch.autograd.backward(loss)
                optimizer.step()
                if schedule is not None:
                    schedule.step()
    return scale.detach()


@torch.no_grad()
def layer_error(
    layer: Layer,
    scale: Tensor,  # [out], [in] or [1]
    axis: PaperAxis,
    cache: Cache,
    batch_rows: int,
) -> float:
    """Mean squared error of the layer's outputs over a cache: the paper's held-out loss of a candidate."""
    base, signs = _frozen(layer)
    total = 0.0
    for x, y in cache.batches(batch_rows):
        output = F.linear(x, base) + _delta_output(x, signs, scale.float(), axis)
        total += float(F.mse_loss(output, y, reduction="sum"))
    return total / cache.y.numel()


def choose_axis(
    layer: Layer,
    delta: Tensor,  # [out, in] float32
    shards: Shards,
    recipe: Recipe,
    end_loss: EndLoss | None = None,
) -> Choice:
    """Algorithm 6: train each candidate under the same budget and keep the one that loses least.

    Args:
        end_loss: judges a candidate as Algorithm 6 does, by the whole model; without it the layer's held-out error
            does, as in the paper's text. On a tie `in` wins, as in Algorithm 6.
    """
    candidates: tuple[PaperAxis, ...] = ("in", "out", "scalar") if recipe.scalar else ("in", "out")
    scales: dict[PaperAxis, Tensor] = {}
    losses: dict[PaperAxis, float] = {}
    for axis in candidates:
        scale = scales[axis] = train_scales(layer, initial_scale(delta, axis), axis, shards.train, recipe)
        if end_loss is None:
            losses[axis] = layer_error(layer, scale, axis, shards.held_out, recipe.batch_rows)
        else:
            losses[axis] = end_loss(axis, scale)
    chosen = min(candidates, key=losses.__getitem__)
    return Choice(chosen, scales[chosen], losses)


def _frozen(layer: Layer) -> tuple[Tensor, Tensor]:  # base and signs as numbers, [out, in] float32
    return layer.base.float(), layer.signs.float().mul_(2).sub_(1)


def _delta_output(x: Tensor, signs: Tensor, scale: Tensor, axis: PaperAxis) -> Tensor:  # [n, out]
    return F.linear(x * scale, signs) if axis == "in" else F.linear(x, signs) * scale
