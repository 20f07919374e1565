"""Problems of one layer drawn at random, and losses of their deltas."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.fit.problem import NOISE, Problem


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """A layer's inputs and targets, and the problem of their moments."""

    x: Tensor  # [n, in] float64
    residual: Tensor  # [n, out] float64
    problem: Problem

    def lost(self, delta: Tensor) -> float:
        return float((self.residual - self.x @ delta.double().T).square().sum())


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(out_features: int, in_features: int, *, seed: int = 0, rows: int = 400) -> Drawn:
    """Inputs of a few strong directions, and a delta whose columns differ in size."""
    spectrum = torch.arange(1, in_features + 1).double() ** -0.7
    x = normal(seed, rows, in_features) * spectrum @ normal(seed + 1, in_features, in_features)
    delta = (normal(seed + 2, out_features, in_features) * (normal(seed + 3, in_features) / 2).exp()).float()
    residual = x @ delta.double().T + 0.1 * normal(seed + 4, rows, out_features)
    return Drawn(x, residual, Problem(delta, (x.T @ x).float(), (residual.T @ x).float(), rows))


def numbers(signs: Tensor) -> Tensor:
    return torch.where(signs, 1.0, -1.0).double()


def dense(signs: Tensor, scale_out: Tensor | None, scale_in: Tensor | None) -> Tensor:
    delta = numbers(signs)
    delta = delta if scale_out is None else delta * scale_out.double()[:, None]
    return delta if scale_in is None else delta * scale_in.double()


def close(actual: Tensor | None, expected: Tensor, tolerance: float = 1e-4) -> bool:
    assert actual is not None
    return float((actual.double() - expected).norm()) <= tolerance * float(expected.norm())


def ridge_of(case: Drawn, ridge_part: float) -> float:
    out_of_noise = NOISE * case.x.shape[1] / len(case.x)
    return (ridge_part + out_of_noise) * float(case.problem.gram.diagonal().double().mean())


def ridge_loss(
    case: Drawn, delta: Tensor, ridge_part: float
) -> Tensor:  # [..., out] float64, of delta [..., out, in]
    """Return each row's loss plus its ridge toward the difference, by which signs are chosen."""
    lost = (case.residual - case.x @ delta.mT).square().sum(-2)
    return lost + ridge_of(case, ridge_part) * (delta - case.problem.difference).square().sum(-1)


def layer_loss(
    problem: Problem,
    delta: Tensor,  # [out, in] float32
) -> float:
    """``||R - X delta'||^2 - ||R||^2``: below 0 where the layer with `delta` is nearer its target than the base's."""
    gram, total = problem.gram.float(), 0.0
    for rows in problem.chunks():
        part = delta[rows]
        total += float(((part @ gram).sub_(problem.cross[rows], alpha=2).mul_(part)).sum(dtype=torch.float64))
    return total
