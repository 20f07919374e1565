"""The strategy of the paper, and of BitDelta: AdamW on squared error, in layers (vectors alone) and end to end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from compressor.fitting.calibration import batched
from compressor.fitting.distillation.distill import DistillSettings
from compressor.fitting.paper.end_loss import EndLoss
from compressor.fitting.paper.layer_solver import PaperLayerSolver
from compressor.fitting.paper.scale_training import ScaleTrainingSettings
from compressor.fitting.shapes import FitShapes
from compressor.fitting.strategies.strategy import FLOAT32_BYTES, FitStrategy, LayerStage, LayerStageInputs
from deltastore.errors import UsageError

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
