"""The problem that a coded matrix leaves, and its best low-rank solution.

Works on a `Problem`; independent of models and files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.fitting.layers.problem import Problem, cholesky
from compressor.fitting.layers.signs import SIGN_RIDGE

# Ranks beyond those asked for: with them, the randomized decomposition is exact enough.
OVERSAMPLED = 8
POWER_ITERATIONS = 4
RANK_PART = 4  # a residual takes this part of a sign plane's bytes


def remaining(problem: Problem, coded: Tensor) -> Problem:
    """Return the problem of the difference that ``coded`` ``[out, in]`` leaves.

    With D = coded + D' the targets become R - X coded', so G' = G - coded H.
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
