"""The paper's layer solver: AdamW on cached inputs and outputs, the axis by validation loss (Algorithms 4, 5 and 6).

Fills one layer's caches and picks the loss that chooses its axis; the training itself is `scale_training.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.fitting.layers.layerwise import StudentBlock
from compressor.fitting.paper.end_loss import EndLoss
from compressor.fitting.paper.scale_training import (
    ActivationCache,
    CandidateLoss,
    FrozenLayer,
    LayerCaches,
    PaperAxis,
    ScaleTrainingSettings,
    choose_axis,
)
from compressor.io.pairs import TensorPair
from deltastore.format.matrix import MatrixDelta
from deltastore.format.sign_plane import SignPlane
from deltastore.format.signs import pack_signs


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


def _candidate_loss(end_loss: EndLoss, pair: TensorPair, block: StudentBlock, signs: Tensor) -> CandidateLoss:
    """Return the end loss as a function of one layer's candidates."""

    def candidate_loss(axis: PaperAxis, scale: Tensor) -> float:
        return end_loss(pair, block, _stored(signs, axis, scale))

    return candidate_loss


def _stored(signs: Tensor, axis: PaperAxis, scale: Tensor) -> SignPlane:
    scales = (None, scale.cpu()) if axis == "in" else (scale.cpu(), None)
    return SignPlane.from_scales(pack_signs(signs.cpu()), signs.shape[1], *scales)
