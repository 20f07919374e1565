"""The default strategy: least squares layer by layer, then distillation by KL in which signs move, too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from compressor.fitting.calibration import batched, with_random_tokens
from compressor.fitting.distillation.distill import DistillSettings
from compressor.fitting.layers.least_squares_solver import LeastSquaresSolver
from compressor.fitting.layers.problem import CHUNK_WEIGHTS
from compressor.fitting.shapes import FitShapes
from compressor.fitting.strategies.strategy import FLOAT32_BYTES, FitStrategy, LayerStage, LayerStageInputs

EPOCHS = 3
SCALE_RATE = 0.01  # in units of each vector's mean magnitude
SIGN_RATE = 0.003
SIGN_ROUNDS = 2
# Tokens per input feature of the widest layer: more tokens hardly improve the fit.
LAYER_TOKENS = 32
# Part of the tokens of the layer stage that become random ids: other text gains, and the end-to-end stage makes up for
# what the text itself loses.
RANDOM_PART = 0.5
# Operations per weight and input feature, with and without choosing signs.
SIGN_OPERATIONS, SCALE_OPERATIONS = 60, 20
FLOAT64_BYTES = 8


@dataclass(frozen=True, slots=True)
class LeastSquaresStrategy(FitStrategy):
    """`--solver lstsq`."""

    batch_sequences: ClassVar[int] = 8
    min_samples: ClassVar[int] = 4

    @property
    def distillation(self) -> DistillSettings:
        epochs = self.fit_settings.distill_epochs
        return DistillSettings(
            loss="kl",
            epochs=EPOCHS if epochs is None else epochs,
            rate=SCALE_RATE,
            sign_rate=SIGN_RATE if self.fit_settings.learn_signs else 0.0,
        )

    @property
    def fits_layers(self) -> bool:
        return True

    def split(self, num_train: int, widest: int) -> tuple[slice, slice]:
        """Take all of the text for the end, and as much of it as least squares needs for the layers."""
        enough = math.ceil(LAYER_TOKENS * widest / self.fit_settings.calibration.length)
        return slice(min(enough, num_train)), slice(num_train)

    def layer_stage(self, inputs: LayerStageInputs) -> LayerStage:
        rounds = SIGN_ROUNDS if self.fit_settings.refine_signs else 0
        sequences = with_random_tokens(inputs.sequences, inputs.num_ids, RANDOM_PART)
        solver = LeastSquaresSolver(self.method, rounds, inputs.with_upgrades)
        return LayerStage(batched(sequences, self.batch_tokens), solver)

    def own_settings(self) -> dict[str, Any]:
        return {
            "refine_signs": self.fit_settings.refine_signs,
            "learn_signs": self.fit_settings.learn_signs,
            "budget": self.fit_settings.budget,
        }

    def solve_operations(self, shapes: FitShapes, num_tokens: int) -> float:
        """Count the moments of every group of inputs, and the rounds of signs and scales of every matrix."""
        widths = shapes.input_widths(shapes.largest_block)
        moments = sum(4.0 * num_tokens * width**2 for width in widths)
        per_input = SIGN_OPERATIONS if self.fit_settings.refine_signs else SCALE_OPERATIONS
        solving = 1.0 * sum(per_input * math.prod(shape) * shape[1] for shape in shapes.coded.values())
        return len(shapes.blocks) * moments + solving

    def solve_bytes(self, numel: int, in_features: int) -> int:
        """Count the matrix with its differences, targets and signs, and the moments of its inputs."""
        weights = 5 * FLOAT32_BYTES * (numel + min(CHUNK_WEIGHTS, numel))
        return weights + (2 * FLOAT64_BYTES + 4 * FLOAT32_BYTES) * in_features**2
