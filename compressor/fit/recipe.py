"""A recipe: the values in which one way to fit differs from another.

`fit.py` runs the same stages for each. `paper.py` and `least_squares.py` make them from the settings of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.decoder.weights import Weights
from compressor.fit.distill import DistillSettings
from compressor.fit.layerwise import LayerStage
from compressor.pairs import TensorPair


@dataclass(frozen=True, slots=True, eq=False)
class LayerStageContext:
    """The models and the text of the layer stage."""

    finetune: Weights
    pairs: Mapping[str, TensorPair]  # the matrices to code
    sequences: Sequence[Tensor]  # [tokens] int64 each, of one length
    validation: Sequence[Tensor]  # [sequences, tokens] int64 each
    num_ids: int  # of the vocabulary
    with_upgrades: bool  # bytes are left for upgrades of deltas
    device: torch.device


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """One way to fit deltas of one method to text."""

    batch_tokens: int  # of one step
    min_samples: int  # with fewer, one part of the split is empty
    # From the number of training sequences and the input features of the widest matrix: the sequences of the layer
    # stage, and those of the end-to-end stage.
    split: Callable[[int, int], tuple[slice, slice]]
    # None where deltas from weights alone go straight into the end-to-end stage.
    layer_stage: Callable[[LayerStageContext], LayerStage] | None
    distillation: DistillSettings  # left out where `epochs` is 0
    settings: Mapping[str, Any]  # that this recipe alone reads and that change an artifact's bytes
    # Bytes of memory in which a matrix of so many weights and input features is solved.
    solve_bytes: Callable[[int, int], int]
