"""The recipe of the paper, and of BitDelta: Algorithms 1 to 6 in the paper's order.

AdamW trains scales on squared error, in each layer and then end to end.

===  ===================================================  ============================================
no.  in the paper                                         here
===  ===================================================  ============================================
1    layer-wise compression with cached activations       `recipe`; its loop: `layerwise.Layerwise.run`
2    end-to-end calibration of all vectors                `end_to_end_settings`; `distill.Distillation`
3    calibration caches of a layer                        `gather_inputs` and `calibration_caches`
4    training of a layer's scaling vector                 `train_scales` and `layer_error`
5    end-to-end validation loss                           `EndLoss`
6    compression of a layer, with the choice of its axis  `compress_layer` and `choose_axis`
7    application of a saved file                          `peraxis import per-axis` and `peraxis merge`
===  ===================================================  ============================================

A layer of base weights W_b and fine-tuned weights W_f ``[out, in]`` becomes ``W_b + v * B``: the sign mask
``B = sign(W_f - W_b)``, and scales v, which alone train.

==========  =================================  ================================================
axis        one scale per                      the paper's text; its Algorithm 6 and files
==========  =================================  ================================================
``out``     output feature, a row of W         ``row``; ``col``: mean of |W_f - W_b| over axis 1
``in``      input feature, a column of W       ``col``; ``row``: mean of |W_f - W_b| over axis 0
``scalar``  matrix                             BitDelta's coefficient
==========  =================================  ================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from compressor.config import FitSettings, Method
from compressor.decoder.decoder import Decoder
from compressor.decoder.weights import Overlay, Weights, weight_with_delta
from compressor.fidelity import last_hiddens
from compressor.fit.calibration import batched
from compressor.fit.distill import DistillSettings
from compressor.fit.layerwise import LayerStage, StudentBlock
from compressor.fit.recipe import LayerStageContext, Recipe
from compressor.pairs import TensorPair
from compressor.resume import FittedMatrix
from deltastore.errors import UsageError
from deltastore.format.matrix import MatrixDelta, SignPlane, pack_signs

PaperAxis = Literal["scalar", "out", "in"]
# Loss of the whole model with a candidate's scales in this layer.
CandidateLoss = Callable[[PaperAxis, Tensor], float]

VECTOR_EPOCHS, SCALAR_EPOCHS = 5, 1  # the paper's, and its BitDelta's
WEIGHT_DECAY = 0.01  # AdamW's default
LAYER_PART = 4  # the paper: 50 of 200 samples for its layers, 150 for the end
BATCH_SEQUENCES = 4


def recipe(settings: FitSettings, method: Method) -> Recipe:
    """Algorithm 1: layer-wise compression with cached activations, then end-to-end training of all vectors.

    Stages 1 and 2, the caches and the compression of each layer, take turns in forward order, so that a layer's inputs
    come from the coded layers before it (section 2). They see the first quarter of the training sequences, and stage 3
    the others. Both keep validation text apart. BitDelta, which is `scalar`, has stage 3 alone.

    Raises:
        UsageError: `both`, which is not the paper's.
    """
    if method == "both":
        raise UsageError(
            "`recipe='paper'` trains one vector or one number per matrix: give `method='per-axis'` or "
            "`method='scalar'` with it"
        )
    return Recipe(
        batch_tokens=BATCH_SEQUENCES * settings.calibration.length,
        min_samples=8,
        split=_split,
        layer_stage=None if method == "scalar" else partial(layer_stage, settings),
        distillation=end_to_end_settings(settings, method),
        settings={
            "rate": settings.rate,
            "cosine": settings.cosine,
            "axis_loss": settings.axis_loss,
            "with_scalar": settings.with_scalar,
        },
        solve_bytes=_solve_bytes,
    )


def layer_stage(settings: FitSettings, context: LayerStageContext) -> LayerStage:
    """Stages 1 and 2 of Algorithm 1 for one run: Algorithm 3 gathers, and Algorithm 6 solves."""
    training = ScaleTrainingSettings(
        batch_rows=settings.calibration.length,
        lr=settings.rate,
        cosine=settings.cosine,
        scalar=settings.with_scalar,
    )
    end_loss = None
    if settings.axis_loss == "end":
        end_loss = EndLoss(context.finetune, context.pairs, context.validation, context.device)
    num_validation_tokens = sum(ids.numel() for ids in context.validation)
    batches = batched(context.sequences, BATCH_SEQUENCES * settings.calibration.length)
    solve = partial(compress_layer, training, num_validation_tokens, end_loss)
    return LayerStage([*batches, *context.validation], gather_inputs, solve)


def _split(num_train: int, widest: int) -> tuple[slice, slice]:
    cut = num_train // LAYER_PART
    return slice(cut), slice(cut, num_train)


def _solve_bytes(numel: int, in_features: int) -> int:
    """Count base, difference and signs in float32, and what AdamW's step makes of them."""
    return 6 * 4 * numel


def end_to_end_settings(settings: FitSettings, method: Method) -> DistillSettings:
    """Settings of Algorithm 2, which trains all scales at once on ``|| logits of W_f - logits of the student ||^2``.

    AdamW in the scales' own units at a constant rate; the last epoch's scales are kept.
    """
    default = SCALAR_EPOCHS if method == "scalar" else VECTOR_EPOCHS
    return DistillSettings(
        loss="squared",
        epochs=default if settings.distill_epochs is None else settings.distill_epochs,
        rate=settings.rate,
        relative=False,
        cosine=False,
        weight_decay=WEIGHT_DECAY,
        keeps_best=False,
    )


@dataclass(frozen=True, slots=True, eq=False)
class ActivationCache:
    """Inputs and outputs of one layer in BF16.

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


def gather_inputs(teacher: Iterable[Tensor], student: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Algorithm 3, its forwards: both models' inputs ``[tokens, in]`` of a layer, on the CPU.

    The student's are BF16. Memory grows with the text.
    """
    teacher_inputs = torch.cat([batch.cpu() for batch in teacher])
    return teacher_inputs, torch.cat([batch.cpu().bfloat16() for batch in student])


def calibration_caches(
    pair: TensorPair, gathered: tuple[Tensor, Tensor], num_validation_tokens: int
) -> LayerCaches:
    """Algorithm 3, its caches: X of the student and ``Y = X_teacher W_f'``, the last tokens for validation."""
    teacher_inputs, x = gathered
    weight = pair.finetune.read(pair.tensor.name, slice(0, pair.shape[0])).float()
    y, cut = (teacher_inputs @ weight.T).bfloat16(), len(x) - num_validation_tokens
    return LayerCaches(ActivationCache(x[:cut], y[:cut]), ActivationCache(x[cut:], y[cut:]))


@dataclass(frozen=True, slots=True, eq=False)
class FrozenLayer:
    """The parts of a layer that stay frozen while its scales train."""

    base: Tensor  # [out, in] any real dtype
    signs: Tensor  # [out, in] bool, True where +1


@dataclass(frozen=True, slots=True)
class ScaleTrainingSettings:
    """The training budget of every candidate; the defaults are the paper's."""

    batch_rows: int  # of one step: the tokens of one cached batch
    epochs: int = VECTOR_EPOCHS
    lr: float = 1e-4
    cosine: bool = False
    scalar: bool = False  # also try a single scale


def initial_scale(
    difference: Tensor,  # [out, in] float32
    axis: PaperAxis,
) -> Tensor:  # [out], [in] or [1]; float32
    """Mean magnitude of the weight difference over the weights that share a scale, of least weight error for its signs.

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
    """Algorithm 4: train the scales of one layer on ``|| Y - X (W_b + v * B)' ||^2 / n`` (section 2).

    Each batch, in the cache's order, is one AdamW step, for `settings.epochs` passes over the cache. With `cosine` the
    rate falls to zero over all steps.
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
    """Algorithm 4, validation: the mean squared error of the layer's outputs over a cache."""
    base, signs = _frozen(layer)
    total = 0.0
    for x, y in cache.batches(batch_rows):
        output = F.linear(x, base) + _delta_output(x, signs, scale.float(), axis)
        total += float(F.mse_loss(output, y, reduction="sum"))
    return total / cache.y.numel()


def _frozen(layer: FrozenLayer) -> tuple[Tensor, Tensor]:  # base and signs as numbers, [out, in] float32
    return layer.base.float(), layer.signs.float().mul_(2).sub_(1)


def _delta_output(x: Tensor, signs: Tensor, scale: Tensor, axis: PaperAxis) -> Tensor:  # [n, out]
    return F.linear(x * scale, signs) if axis == "in" else F.linear(x, signs) * scale


class EndLoss:
    """Algorithm 5: ``|| logits of the student - logits of W_f ||^2`` with one candidate in one layer.

    Measured on validation batches, which are the last batches of a `StudentBlock`'s inputs. Layers that are not fitted
    yet are the base's, as the student begins in Algorithm 1. Reads every later block for each candidate.
    """

    def __init__(
        self,
        finetune: Weights,
        pairs: Mapping[str, TensorPair],
        validation: Sequence[Tensor],  # ids [sequences, tokens] each
        device: torch.device,
    ) -> None:
        self._pairs, self._fitted = pairs, set[str]()
        self._student = Decoder(Overlay(finetune, self._base), device, torch.float32)
        teacher = Decoder(finetune, device, torch.float32)
        head = teacher.load_head()
        with torch.no_grad():
            self._logits = [
                teacher.logits(head, hidden).cpu() for hidden in last_hiddens(teacher, validation)
            ]

    def __call__(self, pair: TensorPair, block: StudentBlock, delta: SignPlane) -> float:
        """Return the mean over batches of the squared error with `delta` in the layer of `pair`."""
        groups = block.decoder.linears(block.block, block.index)
        paths = {linear.name: linear.path for group in groups for linear in group}
        parameters = {
            name: block.block.get_submodule(paths[name]).get_parameter("weight")
            for name in paths.keys() & self._pairs.keys() - self._fitted
        }
        before = {name: parameter.data for name, parameter in parameters.items()}
        try:
            for name, parameter in parameters.items():
                weight = weight_with_delta(self._pairs[name], delta if name == pair.name else None)
                parameter.data = weight.to(parameter.device, torch.float32)
            return self._of_student(block)
        finally:
            for name, parameter in parameters.items():
                parameter.data = before[name]

    def mark_fitted(self, name: str) -> None:
        """Mark a layer as fitted: later candidates are measured with its block's weight in place of the base's."""
        self._fitted.add(name)

    @torch.no_grad()
    def _of_student(self, block: StudentBlock) -> float:
        hiddens = [hidden.clone() for hidden in block.hiddens[-len(self._logits) :]]
        block.decoder.advance(block.block, block.index, hiddens)
        for index in range(block.index + 1, self._student.num_blocks):
            self._student.advance(self._student.load_block(index), index, hiddens)
        head, total = self._student.load_head(), 0.0
        for hidden, target in zip(hiddens, self._logits, strict=True):
            logits = self._student.logits(head, self._student.finish(hidden)).cpu()
            total += float(F.mse_loss(logits, target, reduction="sum"))
        return total / len(hiddens)

    def _base(self, name: str) -> Tensor | None:
        pair = self._pairs.get(name)
        return None if pair is None else weight_with_delta(pair, None)


@dataclass(frozen=True, slots=True, eq=False)
class AxisChoice:
    """The axis chosen, its trained scales, and the loss of each candidate."""

    axis: PaperAxis
    scale: Tensor  # [out], [in] or [1] float32
    losses: dict[PaperAxis, float]


def compress_layer(
    settings: ScaleTrainingSettings,
    num_validation_tokens: int,  # the last of all tokens
    end_loss: EndLoss | None,  # chooses the axis in place of the layer's own loss
    pair: TensorPair,
    gathered: tuple[Tensor, Tensor],
    block: StudentBlock | None,  # None for the output head
) -> FittedMatrix:
    """Algorithm 6: code a layer by the sign mask of its weight difference, and by scales on the axis that errs less."""
    difference = pair.row_block(slice(0, pair.shape[0]))
    layer = FrozenLayer(pair.base.read(pair.base_tensor.name), difference > 0)
    caches = calibration_caches(pair, gathered, num_validation_tokens)
    candidate_loss = None
    if end_loss is not None and block is not None:
        candidate_loss = partial(_candidate_loss, end_loss, pair, block, layer.signs)
    choice = choose_axis(layer, difference, caches, settings, candidate_loss)
    if end_loss is not None:
        end_loss.mark_fitted(pair.name)
    return FittedMatrix(MatrixDelta((_stored(layer.signs, choice.axis, choice.scale),)))


def choose_axis(
    layer: FrozenLayer,
    difference: Tensor,  # [out, in] float32
    caches: LayerCaches,
    settings: ScaleTrainingSettings,
    candidate_loss: CandidateLoss | None = None,
) -> AxisChoice:
    """Algorithm 6, the choice: train each candidate under the same budget and keep the one of least loss.

    Args:
        candidate_loss: the whole model's loss with a candidate, as in Algorithm 6; by default the layer's validation
            error decides, as in section 2. On a tie `in` wins, as in Algorithm 6.
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


def _candidate_loss(
    end_loss: EndLoss, pair: TensorPair, block: StudentBlock, signs: Tensor, axis: PaperAxis, scale: Tensor
) -> float:
    return end_loss(pair, block, _stored(signs, axis, scale))


def _stored(signs: Tensor, axis: PaperAxis, scale: Tensor) -> SignPlane:
    scales = (None, scale.cpu()) if axis == "in" else (scale.cpu(), None)
    return SignPlane.from_scales(pack_signs(signs.cpu()), signs.shape[1], *scales)
