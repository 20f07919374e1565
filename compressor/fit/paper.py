"""The strategy of the paper, and of BitDelta: AdamW on squared error, in layers (vectors alone) and end to end.

The solver fills one layer's caches (Algorithms 1 and 4) and trains a scale vector from them (5), then chooses its axis
(6) by `EndLoss`, Algorithm 3. `distill.py` runs Algorithm 2.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from compressor.decoder.decoder import Decoder
from compressor.decoder.weights import Overlay, Weights, weight_with_delta
from compressor.evaluate.fidelity import last_hiddens
from compressor.fit.calibration import batched
from compressor.fit.distill import DistillSettings
from compressor.fit.layers import StudentBlock
from compressor.fit.shapes import FitShapes
from compressor.fit.strategy import FLOAT32_BYTES, FitStrategy, LayerStage, LayerStageInputs
from compressor.pairs import TensorPair
from deltastore.errors import UsageError
from deltastore.format.matrix import MatrixDelta, SignPlane, pack_signs

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


VECTOR_EPOCHS, SCALAR_EPOCHS = 5, 1  # the paper's, and its BitDelta's
WEIGHT_DECAY = 0.01  # AdamW's default
LAYER_PART = 4  # the paper: 50 of 200 samples for its layers, 150 for the end
NUM_AXES = 2  # trained per layer


@dataclass(frozen=True, slots=True)
class PaperStrategy(FitStrategy):
    """`--solver adamw`: the paper with one vector per matrix, BitDelta with one number."""

    batch_sequences: ClassVar[int] = 4
    min_samples: ClassVar[int] = 8

    @property
    def distillation(self) -> DistillSettings:
        """Algorithm 2: the last epoch's scales, trained in their own units."""
        default = SCALAR_EPOCHS if self.method == "scalar" else VECTOR_EPOCHS
        epochs = self.fit_settings.distill_epochs
        return DistillSettings(
            loss="squared",
            epochs=default if epochs is None else epochs,
            rate=self.fit_settings.rate,
            relative=False,
            cosine=False,
            weight_decay=WEIGHT_DECAY,
            keeps_best=False,
        )

    @property
    def fits_layers(self) -> bool:
        """False for BitDelta, which trains end to end alone."""
        return self.method != "scalar"

    def split(self, num_train: int, widest: int) -> tuple[slice, slice]:
        """Give layers and end text of their own, as in the paper."""
        cut = num_train // LAYER_PART
        return slice(cut), slice(cut, num_train)

    def layer_stage(self, inputs: LayerStageInputs) -> LayerStage:
        settings = ScaleTrainingSettings(
            batch_rows=self.fit_settings.calibration.length,
            lr=self.fit_settings.rate,
            cosine=self.fit_settings.cosine,
            scalar=self.fit_settings.with_scalar,
        )
        end_loss = None
        if self.fit_settings.axis_loss == "end":
            end_loss = EndLoss(inputs.finetune, inputs.pairs, inputs.validation, inputs.device)
        solver = PaperLayerSolver(settings, sum(ids.numel() for ids in inputs.validation), end_loss)
        return LayerStage([*batched(inputs.sequences, self.batch_tokens), *inputs.validation], solver)

    def check(self, spare_bytes: int) -> None:
        if self.method == "both":
            raise UsageError(
                "--solver adamw trains one vector or one number per matrix: give --method per-axis or scalar with it"
            )
        if spare_bytes:
            raise UsageError("--budget above 1 needs --solver lstsq, which measures what more bytes gain")
        FitStrategy.check(self, spare_bytes)

    def own_settings(self) -> dict[str, Any]:
        return {
            "rate": self.fit_settings.rate,
            "cosine": self.fit_settings.cosine,
            "axis_loss": self.fit_settings.axis_loss,
            "with_scalar": self.fit_settings.with_scalar,
        }

    def solve_operations(self, shapes: FitShapes, num_tokens: int) -> float:
        """Count forward and backward products of every epoch, for both axes."""
        epochs = ScaleTrainingSettings(batch_rows=1).epochs
        return 6.0 * NUM_AXES * epochs * num_tokens * shapes.num_coded

    def solve_bytes(self, numel: int, in_features: int) -> int:
        """Count the base's weights, differences and signs in float32, and what AdamW's step makes of them."""
        return 6 * FLOAT32_BYTES * numel


@dataclass(frozen=True, slots=True)
class PaperLayerSolver:
    """One scale vector or scalar per matrix; the signs stay those of the difference."""

    settings: ScaleTrainingSettings
    num_validation_tokens: int  # the last of all tokens
    end_loss: EndLoss | None = None  # chooses the axis in place of the layer's own loss, as in Algorithm 6

    def gather(self, teacher: Iterable[Tensor], student: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
        """Return both models' inputs ``[tokens, in]`` on the CPU, the student's in BF16. They grow with the text."""
        teacher_inputs = torch.cat([batch.cpu() for batch in teacher])
        return teacher_inputs, torch.cat([batch.cpu().bfloat16() for batch in student])

    def solve(
        self, pair: TensorPair, gathered: tuple[Tensor, Tensor], block: StudentBlock | None
    ) -> SignPlane:
        teacher_inputs, inputs = gathered
        rows = slice(0, pair.shape[0])
        difference, base = pair.row_block(rows), pair.base.read(pair.base_tensor.name)
        outputs = (teacher_inputs @ pair.finetune.read(pair.tensor.name, rows).float().T).bfloat16()
        cut = len(inputs) - self.num_validation_tokens
        train, validation = (
            ActivationCache(inputs[part], outputs[part]) for part in (slice(cut), slice(cut, None))
        )
        signs, candidate_loss = difference > 0, None
        if self.end_loss is not None and block is not None:
            candidate_loss = _candidate_loss(self.end_loss, pair, block, signs)
        layer, caches = FrozenLayer(base, signs), LayerCaches(train, validation)
        choice = choose_axis(layer, difference, caches, self.settings, candidate_loss)
        if self.end_loss is not None:
            self.end_loss.mark_fitted(pair.name)
        return _stored(signs, choice.axis, choice.scale)

    def upgrades(
        self, pair: TensorPair, gathered: tuple[Tensor, Tensor], coded: SignPlane
    ) -> list[MatrixDelta]:
        """Return none: the paper has one plane."""
        return []


class EndLoss:
    """Squared error of the whole student's logits with one candidate in one layer (Algorithm 3).

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
        """Return the mean over batches of ``|| logits - the fine-tune's ||^2`` with `delta` in the layer of `pair`."""
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


def _candidate_loss(end_loss: EndLoss, pair: TensorPair, block: StudentBlock, signs: Tensor) -> CandidateLoss:
    """Return the end loss as a function of one layer's candidates."""

    def candidate_loss(axis: PaperAxis, scale: Tensor) -> float:
        return end_loss(pair, block, _stored(signs, axis, scale))

    return candidate_loss


def _stored(signs: Tensor, axis: PaperAxis, scale: Tensor) -> SignPlane:
    scales = (None, scale.cpu()) if axis == "in" else (scale.cpu(), None)
    return SignPlane.from_scales(pack_signs(signs.cpu()), signs.shape[1], *scales)
