"""Second moments of a linear layer's inputs, summed over all calibration tokens: all that least squares needs.

Sums inputs of two models at one layer, the student with its delta so far and the teacher with the fine-tune's own
weights; independent of models and of how a delta is found.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Sums over tokens of products of inputs: X of the student, X_t of the teacher at the same layer.

    `drift` is C - H, not C = X_t'X: it is small where the models agree, so it loses little to rounding.
    """

    gram: Tensor  # [in, in]: H = X'X
    drift: Tensor  # [in, in]: C - H = (X_t - X)'X
    count: int  # tokens

    def cross(self, difference: Tensor, finetune: Tensor) -> Tensor:  # [out, in] float32
        """G = R'X of the residual targets R = X_t W_f' - X W_b', from W_f - W_b and W_f, both ``[out, in]``."""
        return difference.float() @ self.gram.float() + finetune.float() @ self.drift.float()


def moments(
    teacher: Iterable[Tensor], student: Iterable[Tensor], dtype: torch.dtype = torch.float64
) -> Moments:
    """Sum up inputs ``[tokens, in]`` of both models, batch by batch, on the student's device.

    Each batch's product is float32; the sums are of `dtype`, float64 unless memory forbids it.

    Raises:
        ValueError: no batches, or batches that differ in number or shape.
    """
    gram = drift = torch.zeros(())
    count = 0
    for teacher_inputs, inputs in zip(teacher, student, strict=True):
        if teacher_inputs.shape != inputs.shape:
            raise ValueError(
                f"inputs of {tuple(teacher_inputs.shape)} and {tuple(inputs.shape)} are not of one layer"
            )
        if not count:
            gram, drift = (inputs.new_zeros(inputs.shape[1], inputs.shape[1], dtype=dtype) for _ in range(2))
        own = inputs.float()
        gram += own.T @ own
        drift += (teacher_inputs.to(own.device, torch.float32) - own).T @ own
        count += inputs.shape[0]
    if not count:
        raise ValueError("there are no inputs to sum up")
    return Moments(gram, drift, count)
