"""The strategy of the paper, and of BitDelta: AdamW on squared error, in layers (vectors alone) and end to end.

The solver fills one layer's caches (Algorithms 1 and 4) and trains from them (`scale_training.py`). `EndLoss` is
Algorithm 3, by which Algorithm 6 chooses an axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from compressor.blockwise.decoder import Decoder
from compressor.blockwise.weights import Overlay, Weights
from compressor.evaluate.fidelity import last_hiddens
from compressor.fitting.calibration import batched
from compressor.fitting.distillation.distill import DistillSettings
from compressor.fitting.layers.layerwise import StudentBlock
from compressor.fitting.shapes import FitShapes
from compressor.fitting.strategies.scale_training import (
    ActivationCache,
    CandidateLoss,
    FrozenLayer,
    LayerCaches,
    PaperAxis,
    ScaleTrainingSettings,
    choose_axis,
)
from compressor.fitting.strategies.strategy import FLOAT32_BYTES, FitStrategy, LayerStage, LayerStageInputs
from compressor.fitting.weights import weight_with_delta
from compressor.io.pairs import TensorPair
from deltastore.errors import UsageError
from deltastore.format.matrix import MatrixDelta
from deltastore.format.sign_plane import SignPlane
from deltastore.format.signs import pack_signs

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
