"""The settings of fitting deltas to text, as the command line gives them.

Checks single values. Their meaning for one solver is that of its strategy (`strategies/`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from compressor.fit.calibration import Calibration
from deltastore.errors import UsageError

LARGEST_BUDGET = 16.0  # with which a delta is as large as the model at 16 bits


@dataclass(frozen=True, slots=True)
class FitSettings:
    """Settings of one fit.

    Raises:
        UsageError: a value out of its range.
    """

    calibration: Calibration
    solver: Literal["lstsq", "adamw"] = "lstsq"
    refine_signs: bool = True
    distill_epochs: int | None = None  # None is the solver's default
    learn_signs: bool = True  # end to end
    budget: float = 1.0  # bytes over those of one bit per weight
    device: Literal["auto", "cpu", "cuda"] = "auto"
    rate: float = 1e-4  # of adamw
    cosine: bool = False  # the paper's optional schedule of its layer stage
    # What chooses an axis with adamw: the layer's loss (the paper's text) or the whole model's (its Algorithm 6).
    axis_loss: Literal["layer", "end"] = "layer"
    with_scalar: bool = False  # adamw tries a single scale, too

    def __post_init__(self) -> None:
        if not 1 <= self.budget <= LARGEST_BUDGET:
            raise UsageError(
                f"--budget {self.budget}: it is over one bit per weight: give at least 1, and at most "
                f"{LARGEST_BUDGET:g}, with which the fine-tune itself is as small"
            )
        if not 0 < self.rate < math.inf:
            raise UsageError(f"--rate {self.rate}: give a number above 0")
        if (self.distill_epochs or 0) < 0:
            raise UsageError(f"--distill-epochs {self.distill_epochs}: give 0 or more")

    def torch_device(self) -> torch.device:
        """Return the device where models run.

        Raises:
            UsageError: a device that this machine lacks.
        """
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda: this machine has none that torch can use: give --device cpu")
        return torch.device("cuda" if self.device != "cpu" and torch.cuda.is_available() else "cpu")
