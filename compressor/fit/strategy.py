"""The interface of a fitting strategy: the layer solver, the end-to-end settings, and the cost of both.

`fit.py` runs its stages in the same order for every strategy and asks it for all that differs. There are two:
`least_squares.py`, the default, and `paper.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from compressor.codec import Method
from compressor.decoder.weights import Weights
from compressor.fit.distill import DistillSettings
from compressor.fit.fit_settings import FitSettings
from compressor.fit.layers import LayerSolver
from compressor.fit.shapes import FitShapes
from compressor.pairs import TensorPair
from deltastore.errors import UsageError

FLOAT32_BYTES, LATENT_BYTES = 4, 2


@dataclass(frozen=True, slots=True, eq=False)
class LayerStageInputs:
    """The text and models that layers are fitted to."""

    finetune: Weights
    pairs: Mapping[str, TensorPair]  # the matrices to code
    sequences: Sequence[Tensor]  # [tokens] int64 each, of one length
    validation: Sequence[Tensor]  # [sequences, tokens] int64 each
    num_ids: int  # of the vocabulary
    with_upgrades: bool  # bytes are left for upgrades of deltas
    device: torch.device


@dataclass(frozen=True, slots=True, eq=False)
class LayerStage:
    """Batches ``[sequences, tokens]`` of ids and the solver that fits layers to them."""

    batches: Sequence[Tensor]
    solver: LayerSolver


@dataclass(frozen=True, slots=True)
class FitStrategy(ABC):
    """One way to fit deltas of one method to text."""

    fit_settings: FitSettings
    method: Method

    batch_sequences: ClassVar[int]  # of one step
    min_samples: ClassVar[int]  # with fewer, one part of the split is empty

    @property
    @abstractmethod
    def distillation(self) -> DistillSettings:
        """Settings of the end-to-end stage; it is left out where `epochs` is 0."""

    @property
    @abstractmethod
    def fits_layers(self) -> bool:
        """False where deltas from weights alone go straight into the end-to-end stage."""

    @abstractmethod
    def split(self, num_train: int, widest: int) -> tuple[slice, slice]:
        """Return the training sequences that layers are fitted to, and those of the end-to-end stage.

        Args:
            widest: input features of the widest matrix.
        """

    @abstractmethod
    def layer_stage(self, inputs: LayerStageInputs) -> LayerStage:
        """Prepare the layer stage."""

    @abstractmethod
    def own_settings(self) -> dict[str, Any]:
        """Return the settings that only this strategy reads and that change an artifact's bytes."""

    @abstractmethod
    def solve_operations(self, shapes: FitShapes, num_tokens: int) -> float:
        """Return the float32 operations of solving all layers from `num_tokens` tokens, forward passes aside."""

    @abstractmethod
    def solve_bytes(self, numel: int, in_features: int) -> int:
        """Return the memory in which one matrix of `numel` weights is solved."""

    @property
    def batch_tokens(self) -> int:
        return self.batch_sequences * self.fit_settings.calibration.length

    def check(self, spare_bytes: int) -> None:
        """Refuse settings that do not go together.

        Raises:
            UsageError: the option at fault, and a value that works.
        """
        samples = self.fit_settings.calibration.samples
        if samples < self.min_samples:
            raise UsageError(
                f"--samples {samples}: give at least {self.min_samples}, because some are validation and test text"
            )

    def settings(self) -> dict[str, Any]:
        """Return the settings that change an artifact's bytes, without paths."""
        calibration = self.fit_settings.calibration
        return {
            "calibration": asdict(calibration) | {"source": Path(calibration.source).name},
            "solver": self.fit_settings.solver,
            "distill_epochs": self.distillation.epochs,
            **self.own_settings(),
        }

    def state_bytes(self, num_weights: int, num_scales: int) -> int:
        """Return the disk space that `--resume` needs for the end-to-end stage.

        Every scale has two moments, every sign that moves is a latent number, and a new state is written beside the
        old one.
        """
        distillation = self.distillation
        scales = 3 * FLOAT32_BYTES * num_scales if distillation.epochs else 0
        latents = LATENT_BYTES * num_weights if distillation.moves_signs else 0
        return int(2 * self.fit_settings.budget * (scales + latents))
