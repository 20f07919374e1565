"""Least-squares scales of a sign matrix, per output row, per input column, or both in turn.

Works on the layer's `Problem` for any signs. A coded delta is ``u_i B_ij v_j``: given
the signs B and one of the scales u (out) and v (in), the other has a closed form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.fitting.layers.problem import Problem, cholesky
from deltastore.format.sign_plane import Axis

Scales = tuple[Tensor | None, Tensor | None]  # out, [out] or [1]; in, [in]; None where an axis has none

SCALE_RIDGE = 1e-6  # ridge toward scales of least weight error, as a part of H's mean diagonal
CONVERGED = 1e-4  # of the loss that scales explain: a round that gains less is the last one


def solve_scales(
    problem: Problem,
    signs: Tensor,  # [out, in] bool
    axis: Axis,
    rounds: int = 8,
    start: Tensor | None = None,  # [in]
) -> Scales:
    """Scales of least loss for these signs; `both` alternates, each step of which lowers the loss, `rounds` at most.

    A scale that no input decides is that of least weight error. It is zero where the difference and the target are.

    Args:
        start: the input scales from which `both` starts; all ones if not given or all zero.
    """
    in_features = problem.difference.shape[1]
    ones = torch.ones(in_features, device=problem.difference.device)
    if axis == "in":
        return None, _fit_in(problem, signs, ones.new_ones(problem.difference.shape[0]))
    if axis != "both":
        return _fit_out(problem, signs, ones, shared=axis == "scalar")[0], None
    scale_in = start.float() if start is not None and start.any() else ones
    scale_out, explained = _fit_out(problem, signs, scale_in)
    for _ in range(rounds):
        before = explained
        scale_in = _fit_in(problem, signs, scale_out)
        scale_out, explained = _fit_out(problem, signs, scale_in)
        if explained - before <= CONVERGED * explained:
            break
    return scale_out, scale_in


def scaled_loss(problem: Problem, signs: Tensor, scale_out: Tensor | None, scale_in: Tensor | None) -> float:
    """`layer_loss` of a coded delta, from its signs ``[out, in]`` bool and scales."""
    moment, energy = _row_sums(problem, signs, problem.expand_in(scale_in), 0.0)
    out = problem.expand_out(scale_out, slice(0, len(signs))).double()
    return float((out * (out * energy - 2 * moment)).sum())


def _row_sums(
    problem: Problem,
    signs: Tensor,
    scale_in: Tensor,  # [in]
    ridge: float,
) -> tuple[Tensor, Tensor]:  # [out] float64 each
    """B_i . G_i and B_i H B_i' of every row, with B scaled by `scale_in` and the ridge in G and H."""
    gram = problem.gram.float()
    moment = torch.empty(len(signs), dtype=torch.float64, device=gram.device)
    energy = torch.empty_like(moment)
    for rows in problem.chunks():
        delta = torch.where(signs[rows], scale_in, -scale_in)
        energy[rows] = torch.add(delta @ gram, delta, alpha=ridge).mul_(delta).sum(1, dtype=torch.float64)
        moment[rows] = problem.ridge_cross(rows, ridge).mul_(delta).sum(1, dtype=torch.float64)
    return moment, energy


def _fit_out(
    problem: Problem,
    signs: Tensor,
    scale_in: Tensor,  # [in]
    shared: bool = False,
) -> tuple[Tensor, float]:  # [out], or [1] if shared
    """u_i = (B_i . G_i) / (B_i H B_i'), with B scaled by `scale_in`, and the loss that u takes away.

    With `shared`, both sums run over all rows and give one scale.
    """
    moment, energy = _row_sums(problem, signs, scale_in, problem.ridge(SCALE_RIDGE))
    if shared:
        moment, energy = moment.sum()[None], energy.sum()[None]
    scale = torch.where(energy > 0, moment / energy, 0.0)
    return scale.float(), float(scale @ moment)


def _fit_in(
    problem: Problem,
    signs: Tensor,
    scale_out: Tensor,  # [out]
) -> Tensor:  # [in] float32
    """(H o B'B) v = sum_i B_i o G_i, with B scaled by `scale_out`; zeros where all of that is zero."""
    ridge = problem.ridge(SCALE_RIDGE)
    normal = torch.zeros_like(problem.gram, dtype=torch.float32)
    moment = normal.new_zeros(len(normal), dtype=torch.float64)
    for rows in problem.chunks():
        part = scale_out[rows, None]
        delta = torch.where(signs[rows], part, -part)
        normal.addmm_(delta.T, delta)
        moment += problem.ridge_cross(rows, ridge).mul_(delta).sum(0, dtype=torch.float64)
    ridge_sum = float(scale_out.square().sum(dtype=torch.float64)) * ridge
    if not ridge_sum > 0:
        return torch.zeros_like(moment, dtype=torch.float32)
    factor = cholesky(normal.mul_(problem.gram), ridge_sum)
    return torch.cholesky_solve(moment.to(factor.dtype)[:, None], factor)[:, 0].float()
