"""How deltas are fitted to text: the settings of one run, and what an artifact says of them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from compressor.codec import Method
from compressor.fitting.calibration import Calibration
from deltastore.errors import UsageError

OUR_EPOCHS, VECTOR_EPOCHS, SCALAR_EPOCHS = 3, 5, 1  # the latter two are the paper's, and its BitDelta's
FLOAT32_BYTES, LATENT_BYTES = 4, 2
LARGEST_BUDGET = 16.0  # of which a whole model at 16 bits is made


@dataclass(frozen=True, slots=True)
class Training:
    """How deltas are fitted to text."""

    calibration: Calibration
    solver: Literal["lstsq", "adamw"] = "lstsq"
    refine_signs: bool = True
    distill_epochs: int | None = None  # None: 3, or with adamw 5 for vectors and 1 for scalars
    learn_signs: bool = True  # end to end
    budget: float = 1.0  # bytes over those of one bit per weight
    device: Literal["auto", "cpu", "cuda"] = "auto"
    rate: float = 1e-4  # of adamw
    cosine: bool = False  # the paper's optional schedule of its layer stage
    axis_loss: Literal["layer", "end"] = (
        "layer"  # what chooses an axis with adamw: the paper's text, or its Algorithm 6
    )
    with_scalar: bool = False  # whether adamw tries a single scale, too

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

    def place(self) -> torch.device:
        """Where models run.

        Raises:
            UsageError: a device that is not there.
        """
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda: this machine has none that torch can use: give --device cpu")
        return torch.device("cuda" if self.device != "cpu" and torch.cuda.is_available() else "cpu")

    def settings(self, method: Method) -> dict[str, Any]:
        """What changes an artifact's bytes, without paths."""
        source = Path(self.calibration.source).name
        common = {
            "calibration": asdict(self.calibration) | {"source": source},
            "solver": self.solver,
            "distill_epochs": self.epochs(method),
        }
        if self.solver == "lstsq":
            return common | {
                "refine_signs": self.refine_signs,
                "learn_signs": self.learn_signs,
                "budget": self.budget,
            }
        return common | {
            "rate": self.rate,
            "cosine": self.cosine,
            "axis_loss": self.axis_loss,
            "with_scalar": self.with_scalar,
        }

    def moves_signs(self, method: Method) -> bool:
        """True where signs move end to end, which they do from the second epoch on."""
        return self.solver == "lstsq" and self.learn_signs and self.epochs(method) > 1

    def state_bytes(self, method: Method, num_weights: int, num_scales: int) -> int:
        """What `--resume` needs of the end-to-end stage on disk: twice, because a new state stands beside the old one.

        Every scale has two moments; every sign that moves is a latent number.
        """
        scales = 3 * FLOAT32_BYTES * num_scales if self.epochs(method) else 0
        latents = LATENT_BYTES * num_weights if self.moves_signs(method) else 0
        return int(2 * self.budget * (scales + latents))

    def epochs(self, method: Method) -> int:
        """Of the end-to-end stage."""
        if self.distill_epochs is not None:
            return self.distill_epochs
        if self.solver == "lstsq":
            return OUR_EPOCHS
        return SCALAR_EPOCHS if method == "scalar" else VECTOR_EPOCHS
