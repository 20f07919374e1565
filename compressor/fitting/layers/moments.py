"""What least squares is told of a linear layer's inputs: their second moments, summed over all calibration tokens.

Knows inputs of two models at one place, the student with its delta so far and the teacher with the fine-tune's own
weights; nothing of models, or of how a delta is found.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Sums over tokens of products of inputs: X of the student, X_t of the teacher at the same place.

    In place of C = X_t'X stands C - H, which is small where the models agree and so loses nothing to rounding.
    """

    gram: Tensor  # [in, in]: H = X'X
    drift: Tensor  # [in, in]: C - H = (X_t - X)'X
    count: int  # tokens

    def cross(self, delta: Tensor, finetune: Tensor) -> Tensor:  # [out, in] float32
        """G = R'X of the residual targets R = X_t W_f' - X W_b', from W_f - W_b and W_f, both ``[out, in]``."""
        return delta.float() @ self.gram.float() + finetune.float() @ self.drift.float()


def moments(
    teacher: Iterable[Tensor], student: Iterable[Tensor], dtype: torch.dtype = torch.float64
) -> Moments:
    """Sum up inputs ``[tokens, in]`` of both models, batch by batch, on the student's device.

    Each batch's product is one of float32; the sums are kept in `dtype`, float64 unless memory forbids it.
    """
    gram = drift = torch.zeros(())
    count = 0
    for inputs_t, inputs in zip(teacher, student, strict=True):
        assert inputs_t.shape == inputs.shape
        if not count:
            gram, drift = (inputs.new_zeros(inputs.shape[1], inputs.shape[1], dtype=dtype) for _ in range(2))
        own = inputs.float()
        gram += own.T @ own
        drift += (inputs_t.to(own.device, torch.float32) - own).T @ own
        count += inputs.shape[0]
    assert count
    return Moments(gram, drift, count)
