"""What a coded matrix leaves undone, as a problem of its own, and its best low-rank answer.

Knows moments and matrices; nothing of models or files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.fitting.layers.problem import Problem, cholesky
from compressor.fitting.layers.signs import RIDGE

OVERSAMPLED = 8  # ranks beyond those asked for, which make the randomised decomposition exact enough
POWERS = 4
RANK_PART = 4  # a residual takes this part of a sign plane's bytes


def remaining(problem: Problem, coded: Tensor) -> Problem:
    """The problem that is left when ``coded`` ``[out, in]`` is there: its delta is what the coding lost.

    With D = coded + D' the targets become R - X coded', so G' = G - coded H.
    """
    coded = coded.to(problem.delta.device)
    cross = problem.cross.float() - coded @ problem.gram.float()
    return Problem(problem.delta - coded, problem.gram, cross, problem.count)


def quarter_rank(shape: tuple[int, ...]) -> int:
    """The rank whose factors at 16 bits take a quarter of the bytes of a sign plane, at least 1."""
    out_features, in_features = shape
    return max(1, out_features * in_features // (16 * RANK_PART * (out_features + in_features)))


def low_rank(problem: Problem, rank: int) -> tuple[Tensor, Tensor]:  # [out, rank], [rank, in] float16
    """Factors A B of least loss ``||(A B - T) L||``, T being the ridge solution and ``H + pull I = L L'``.

    The truncated singular value decomposition of T L, whitened back: A B = U S V' L^-1. The same for the same problem.
    """
    pull = problem.ridge_pull(RIDGE)
    factor = cholesky(problem.gram, pull).float()
    aim = torch.linalg.solve_triangular(
        factor, problem.pulled_cross(slice(None), pull).T, upper=False
    ).T  # T L
    rank = min(rank, *aim.shape)
    with torch.random.fork_rng(devices=[aim.device] if aim.is_cuda else []):
        torch.manual_seed(0)
        left, sizes, right = torch.svd_lowrank(aim, q=min(rank + OVERSAMPLED, *aim.shape), niter=POWERS)
    root = sizes[:rank].sqrt()
    whitened = torch.linalg.solve_triangular(factor.T, right[:, :rank] * root, upper=True)
    return (left[:, :rank] * root).half(), whitened.T.half()
