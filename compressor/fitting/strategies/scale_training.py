"""The paper's Algorithms 5 and 6: AdamW on one scale vector over cached activations, and the choice of its axis.

Trains one layer from its caches (`train_scales`, `choose_axis`). `paper.py` fills the caches (Algorithms 1 and 4) and
has Algorithm 3; `distillation/distill.py` runs Algorithm 2.

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
# Loss of the whole model with a candidate's scales in this layer.
CandidateLoss = Callable[[PaperAxis, Tensor], float]


@dataclass(frozen=True, slots=True, eq=False)
class ActivationCache:
    """Inputs and outputs of one layer in BF16 (Algorithm 4).

    Raises:
        ValueError: no rows, unequal numbers of them, or another dtype.
    """

    x: Tensor  # [n, in] bfloat16: the layer's inputs in the student
    y: Tensor  # [n, out] bfloat16: its outputs in the fine-tune, without the bias

    def __post_init__(self) -> None:
        if not (self.x.dtype == self.y.dtype == torch.bfloat16 and len(self.x) == len(self.y) > 0):
            raise ValueError(
                f"inputs {tuple(self.x.shape)} {self.x.dtype} and outputs {tuple(self.y.shape)} {self.y.dtype} are no "
                "cache of one layer"
            )

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows in order as float32, `size` at a time; the last batch may have fewer."""
        for start in range(0, len(self.x), size):
            yield self.x[start : start + size].float(), self.y[start : start + size].float()


@dataclass(frozen=True, slots=True, eq=False)
class LayerCaches:
    """A layer's calibration rows, split into those that train and those that choose the axis."""

    train: ActivationCache
    validation: ActivationCache


@dataclass(frozen=True, slots=True, eq=False)
class FrozenLayer:
    """The parts of a layer that stay frozen while its scales train."""

    base: Tensor  # [out, in] any real dtype
    signs: Tensor  # [out, in] bool, True where +1


@dataclass(frozen=True, slots=True)
class ScaleTrainingSettings:
    """The training budget of every candidate; the defaults are the paper's."""

    batch_rows: int  # of one step: the tokens of one cached batch
    epochs: int = 5
    lr: float = 1e-4
    cosine: bool = False
    scalar: bool = False  # also try a single scale


@dataclass(frozen=True, slots=True, eq=False)
class AxisChoice:
    """The axis chosen, its trained scales, and the loss of each candidate."""

    axis: PaperAxis
    scale: Tensor  # [out], [in] or [1] float32
    losses: dict[PaperAxis, float]


def initial_scale(
    difference: Tensor,  # [out, in] float32
    axis: PaperAxis,
) -> Tensor:  # [out], [in] or [1]; float32
    """Mean magnitude of the difference over the weights that share a scale: the least weight error for its signs.

    For `scalar` this is BitDelta's coefficient.
    """
    magnitude = difference.float().abs()
    if axis == "scalar":
        return magnitude.mean()[None]
    return magnitude.mean(1 if axis == "out" else 0)


def train_scales(
    layer: FrozenLayer,
    init: Tensor,  # [out], [in] or [1]
    axis: PaperAxis,
    cache: ActivationCache,
    settings: ScaleTrainingSettings,
) -> Tensor:  # as init, float32
    """Algorithm 5: train scales for `settings.epochs` passes over the cache.

    Each batch, in the cache's order, is one AdamW step on squared error. With `cosine` the rate falls to zero over all
    steps.
    """
    base, signs = _frozen(layer)
    scale = init.float().clone().requires_grad_()
    optimizer = AdamW([scale], lr=settings.lr)
    num_steps = settings.epochs * math.ceil(len(cache.x) / settings.batch_rows)
    schedule = CosineAnnealingLR(optimizer, num_steps) if settings.cosine else None
    with torch.enable_grad():
        for _ in range(settings.epochs):
            for x, y in cache.batches(settings.batch_rows):
                optimizer.zero_grad()
                loss = F.mse_loss(F.linear(x, base) + _delta_output(x, signs, scale, axis), y)
                torch.autograd.backward(loss)
                optimizer.step()
                if schedule is not None:
                    schedule.step()
    return scale.detach()


@torch.no_grad()
def layer_error(
    layer: FrozenLayer,
    scale: Tensor,  # [out], [in] or [1]
    axis: PaperAxis,
    cache: ActivationCache,
    batch_rows: int,
) -> float:
    """Mean squared error of the layer's outputs over a cache, the paper's validation loss of a candidate."""
    base, signs = _frozen(layer)
    total = 0.0
    for x, y in cache.batches(batch_rows):
        output = F.linear(x, base) + _delta_output(x, signs, scale.float(), axis)
        total += float(F.mse_loss(output, y, reduction="sum"))
    return total / cache.y.numel()


def choose_axis(
    layer: FrozenLayer,
    difference: Tensor,  # [out, in] float32
    caches: LayerCaches,
    settings: ScaleTrainingSettings,
    candidate_loss: CandidateLoss | None = None,
) -> AxisChoice:
    """Algorithm 6: train each candidate under the same budget and keep the one of least loss.

    Args:
        candidate_loss: the whole model's loss with a candidate, as in Algorithm 6; by default the layer's validation
            error decides, as in the paper's text. On a tie `in` wins, as in Algorithm 6.
    """
    candidates: tuple[PaperAxis, ...] = ("in", "out", "scalar") if settings.scalar else ("in", "out")
    scales: dict[PaperAxis, Tensor] = {}
    losses: dict[PaperAxis, float] = {}
    for axis in candidates:
        scale = scales[axis] = train_scales(
            layer, initial_scale(difference, axis), axis, caches.train, settings
        )
        if candidate_loss is None:
            losses[axis] = layer_error(layer, scale, axis, caches.validation, settings.batch_rows)
        else:
            losses[axis] = candidate_loss(axis, scale)
    chosen = min(candidates, key=losses.__getitem__)
    return AxisChoice(chosen, scales[chosen], losses)


def _frozen(layer: FrozenLayer) -> tuple[Tensor, Tensor]:  # base and signs as numbers, [out, in] float32
    return layer.base.float(), layer.signs.float().mul_(2).sub_(1)


def _delta_output(x: Tensor, signs: Tensor, scale: Tensor, axis: PaperAxis) -> Tensor:  # [n, out]
    return F.linear(x * scale, signs) if axis == "in" else F.linear(x, signs) * scale
