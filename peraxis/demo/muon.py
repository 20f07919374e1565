"""The Muon optimizer (Jordan et al., 2024) for weight matrices: each step is the orthogonalized momentum.

It reaches the base's loss in half of AdamW's steps. `torch.optim.Muon` multiplies in bfloat16, which on processors
without bfloat16 instructions takes a hundred times as long as float32.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

MOMENTUM = 0.95
STEPS = 5
# The coefficients of Jordan's quintic iteration, which brings small singular values near 1 in few steps.
A, B, C = 3.4445, -4.7750, 2.0315
# The root mean square of a typical AdamW step over its learning rate, so that one learning rate serves both.
RMS_OF_ADAM = 0.2


class Muon(Optimizer):
    """Muon for parameters of two dimensions. Other parameters need another optimizer."""

    def __init__(self, parameters: Iterable[Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(list(parameters), {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient; closures are not supported."""
        for group in self.param_groups:
            for shape, matrices in self._by_shape(group["params"]).items():
                rate = group["lr"] * RMS_OF_ADAM * math.sqrt(max(shape))
                updates = orthogonal(torch.stack([self._direction(matrix) for matrix in matrices]))
                for matrix, update in zip(matrices, updates, strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=rate)

    def _by_shape(self, parameters: list[Parameter]) -> dict[torch.Size, list[Parameter]]:
        # Matrices of one shape are multiplied in one batch: one call per small matrix would cost more than its product.
        shapes = defaultdict(list)
        for parameter in parameters:
            if parameter.grad is not None:
                shapes[parameter.shape].append(parameter)
        return shapes

    def _direction(self, parameter: Parameter) -> Tensor:
        assert parameter.grad is not None
        state = self.state[parameter]
        momentum = state.setdefault("momentum", torch.zeros_like(parameter))
        momentum.lerp_(parameter.grad, 1 - MOMENTUM)
        # Nesterov momentum.
        return parameter.grad.lerp(momentum, MOMENTUM)


def orthogonal(
    matrices: Tensor,  # [n, rows, columns] float32
) -> Tensor:  # [n, rows, columns]
    """Bring all singular values to about 0.7 to 1.2 and keep the singular vectors, by Newton-Schulz iteration."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.mT if is_tall else x
