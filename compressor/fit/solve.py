"""Signs and scales of one matrix, without a training loop, and the low-rank residual that they leave.

A coded delta is ``delta_ij = u_i B_ij v_j`` with signs B. `both` minimizes ``||R - X delta'||^2`` in turns,
where X are the student's inputs and R is what the base's product with them leaves of the fine-tune's outputs. Each of
the scales has a closed form when the signs and the other are given:

    u_i = (B_i . G_i) / (B_i H B_i')           with the columns of B scaled by v,
    (H o B'B) v = sum_i B_i o G_i              with the rows of B scaled by u,

where H = X'X and G = R'X (`problem.py`), B_i and G_i are rows and o is the elementwise product. `signs.py` chooses the
signs when both are given. The other methods have one of the scales, or a single number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.fit.problem import Problem, cholesky
from compressor.fit.signs import SIGN_RIDGE, descend_signs, own_signs, refine_signs
from deltastore.format.matrix import Axis

Scales = tuple[Tensor | None, Tensor | None]  # out, [out] or [1]; in, [in]; None where an axis has none

SCALE_RIDGE = 1e-6  # ridge toward scales of least weight error, as a part of H's mean diagonal
CONVERGED = 1e-4  # of the loss that scales explain: a round that gains less is the last one
# Ranks beyond those asked for: with them, the randomized decomposition is exact enough.
OVERSAMPLED = 8
POWER_ITERATIONS = 4
RANK_PART = 4  # a residual takes this part of a sign plane's bytes


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """A coded matrix and its loss."""

    signs: Tensor  # [out, in] bool, True where +1
    scale_out: Tensor | None  # [out] or, for `scalar`, [1]; float32
    scale_in: Tensor | None  # [in] float32
    loss: float  # ``||R - X delta'||^2 - ||R||^2``, as `scaled_loss` gives it


def solve(problem: Problem, axis: Axis, *, sign_rounds: int = 2, ridge_part: float = SIGN_RIDGE) -> Solved:
    """Return the best signs and scales found, never worse than the difference's own signs with their best scales.

    The first round of signs is error feedback and then single flips, each later one flips alone: continuing from good
    signs costs half of a new feedback and ends lower. Zero differences start with alternating signs and take part in
    each round like any other.

    Args:
        sign_rounds: rounds of signs and then scales; 0 keeps the difference's own signs.
        ridge_part: ridge of the choice of signs, as a part of H's mean diagonal, besides that of `NOISE`.
    """
    found = best = _with_scales(problem, own_signs(problem.difference), axis, None)
    for number in range(sign_rounds):
        signs, scales = found.signs, (found.scale_out, found.scale_in)
        if number == 0:
            signs = refine_signs(problem, signs, *scales, ridge_part)
        signs = descend_signs(problem, signs, *scales, ridge_part)
        found = _with_scales(problem, signs, axis, found.scale_in)
        if found.loss < best.loss:
            best = found
    return best


def solve_scales(
    problem: Problem,
    signs: Tensor,  # [out, in] bool
    axis: Axis,
    rounds: int = 8,
    start: Tensor | None = None,  # [in]
) -> Scales:
    """Scales of least loss for these signs; `both` alternates, `rounds` at most.

    Each step lowers the loss with a ridge of `SCALE_RIDGE`; `scaled_loss` is the loss without one.

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
    """``||R - X delta'||^2 - ||R||^2`` of a coded delta, from its signs ``[out, in]`` bool and scales.

    Below 0 where the layer with the delta is nearer its target than the base's.
    """
    moment, energy = _row_sums(problem, signs, problem.expand_in(scale_in), 0.0)
    out = problem.expand_out(scale_out, slice(0, len(signs))).double()
    return float((out * (out * energy - 2 * moment)).sum())


def remaining(problem: Problem, coded: Tensor) -> Problem:
    """Return the problem of the difference that ``coded`` ``[out, in]`` leaves.

    With D = coded + D_rest the targets become R - X coded', so G_rest = G - coded H.
    """
    coded = coded.to(problem.difference.device)
    cross = problem.cross.float() - coded @ problem.gram.float()
    return Problem(problem.difference - coded, problem.gram, cross, problem.count)


def quarter_rank(shape: tuple[int, ...]) -> int:
    """Return the rank whose FP16 factors take a quarter of the bytes of a sign plane, at least 1."""
    out_features, in_features = shape
    return max(1, out_features * in_features // (16 * RANK_PART * (out_features + in_features)))


def low_rank(problem: Problem, rank: int) -> tuple[Tensor, Tensor]:  # [out, rank], [rank, in] float16
    """Factors A B of least loss ``||(A B - T) L||^2``, T being the ridge solution and ``H + ridge I = L L'``.

    The truncated singular value decomposition of T L, whitened back: A B = U S V' L^-1. The random projection is
    seeded, so the same problem gives the same factors.
    """
    ridge = problem.noise_ridge(SIGN_RIDGE)
    factor = cholesky(problem.gram, ridge).float()
    target = problem.ridge_cross(slice(None), ridge).T
    target = torch.linalg.solve_triangular(factor, target, upper=False).T  # T L
    rank = min(rank, *target.shape)
    with torch.random.fork_rng(devices=[target.device] if target.is_cuda else []):
        torch.manual_seed(0)
        left, sizes, right = torch.svd_lowrank(
            target, q=min(rank + OVERSAMPLED, *target.shape), niter=POWER_ITERATIONS
        )
    root = sizes[:rank].sqrt()
    whitened = torch.linalg.solve_triangular(factor.T, right[:, :rank] * root, upper=True)
    return (left[:, :rank] * root).half(), whitened.T.half()


def _with_scales(problem: Problem, signs: Tensor, axis: Axis, start: Tensor | None) -> Solved:
    scale_out, scale_in = solve_scales(problem, signs, axis, start=start)
    return Solved(signs, scale_out, scale_in, scaled_loss(problem, signs, scale_out, scale_in))


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
