"""Signs of least loss for given scales, by error feedback over columns (GPTQ) and then by single flips.

Rows are independent; `problem.py` has the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.fit.problem import Problem, cholesky

# As a share of H's mean diagonal. Less of it follows the calibration text closer, and other text worse.
SIGN_RIDGE = 0.2
SWEEPS = 2  # of single flips; each next one flips about half as many signs
LEAF = 64  # columns done one at a time, between products of whole blocks


def own_signs(difference: Tensor) -> Tensor:  # [out, in] bool
    """Signs of a difference ``[out, in]``. Zeros are +1 where row + column is even, so that undecided ones cancel."""
    even_row, even_column = (
        torch.arange(size, device=difference.device) % 2 == 0 for size in difference.shape
    )
    return torch.where(difference == 0, even_row[:, None] == even_column, difference > 0)


def refine_signs(
    problem: Problem,
    signs: Tensor,  # [out, in] bool
    scale_out: Tensor | None,  # [out] or [1]
    scale_in: Tensor | None,  # [in]
    ridge_part: float = SIGN_RIDGE,
) -> Tensor:  # [out, in] bool
    """Choose signs column by column, the columns of most input first; each column corrects the error of those before.

    With the difference D and ``H + ridge I = L L'``, the target is the ridge solution T = (G + ridge D)(H + ridge I)^-1
    and the cost ``||(delta - T) L||^2``. That is GPTQ's recursion (Frantar et al., 2022, Algorithm 1) over the upper
    factor of the inverse, without the inverse: L carries each column's error to later ones, and T is needed as T L
    alone, one triangular solution. Signs are kept where a scale is zero, because nothing decides them.
    """
    ridge, refined = problem.noise_ridge(ridge_part), torch.empty_like(signs)
    order = problem.gram.diagonal().argsort(stable=True)
    factor = cholesky(problem.gram[order][:, order], ridge).float()
    ordered_in = problem.expand_in(scale_in)[order]
    for rows in problem.chunks():
        old = signs[rows].T[order]
        magnitude = torch.outer(ordered_in, problem.expand_out(scale_out, rows))
        delta = torch.where(old, magnitude, -magnitude)
        target = problem.ridge_cross(rows, ridge).T[order]
        target = torch.linalg.solve_triangular(factor, target, upper=False)
        _Feedback(factor, target, delta).choose(0, len(order))
        refined[rows] = torch.empty_like(old).index_copy_(0, order, _signs_of(delta, magnitude, old)).T
    return refined


def descend_signs(
    problem: Problem,
    signs: Tensor,  # [out, in] bool
    scale_out: Tensor | None,  # [out] or [1]
    scale_in: Tensor | None,  # [in]
    ridge_part: float = SIGN_RIDGE,
) -> Tensor:  # [out, in] bool
    """Flip each sign in turn that lowers the loss with `refine_signs`' ridge, `SWEEPS` times over all columns."""
    ridge, descended = problem.noise_ridge(ridge_part), torch.empty_like(signs)
    gram = problem.gram.float().clone()
    gram.diagonal().add_(ridge)
    expanded_in = problem.expand_in(scale_in)
    for rows in problem.chunks():
        old = signs[rows].T
        magnitude = torch.outer(expanded_in, problem.expand_out(scale_out, rows))
        delta = torch.where(old, magnitude, -magnitude)
        slope = (gram @ delta).sub_(problem.ridge_cross(rows, ridge).T)
        descent = _Descent(gram, gram.diagonal().tolist(), slope, delta, torch.empty_like(delta))
        for _ in range(SWEEPS):
            descent.sweep(0, len(gram))
        descended[rows] = _signs_of(delta, magnitude, old).T
    return descended


@dataclass(frozen=True, slots=True, eq=False)
class _Feedback:
    """Error feedback over the columns of some rows, the last column first; tensors lie column by column."""

    factor: Tensor  # [in, in] lower: L
    target: Tensor  # [in, rows]: T L less the columns chosen so far; changed
    delta: Tensor  # [in, rows]; changed

    def choose(self, first: int, end: int) -> None:
        """Choose the signs of columns ``first..end``, whose targets already count all columns behind `end`."""
        if end - first <= LEAF:
            for column in reversed(range(first, end)):
                delta, target = self.delta[column], self.target[column]
                chosen = slice(column + 1, end)
                target.addmv_(self.delta[chosen].T, self.factor[chosen, column], alpha=-1)
                torch.copysign(delta, torch.where(target == 0, delta, target), out=delta)
            return
        middle = (first + end) // 2
        left, right = slice(first, middle), slice(middle, end)
        self.choose(middle, end)
        self.target[left].addmm_(self.factor[right, left].T, self.delta[right], alpha=-1)
        self.choose(first, middle)


@dataclass(frozen=True, slots=True, eq=False)
class _Descent:
    """Single flips over the columns of some rows; tensors lie column by column."""

    gram: Tensor  # [in, in] H + ridge I
    diagonal: list[float]  # of `gram`
    slope: Tensor  # [in, rows]: H delta - G of the present delta between sweeps; changed
    delta: Tensor  # [in, rows]; changed
    flipped: Tensor  # [in, rows]: the delta before its flip in this sweep, 0 where not flipped; overwritten

    def sweep(self, first: int, end: int) -> None:
        """Visit the columns ``first..end`` once. A flip of delta changes the loss by 4 delta (H_jj delta - slope)."""
        here = slice(first, end)
        if end - first <= LEAF:
            self.flipped[here] = 0
            for column in range(first, end):
                delta, flipped = self.delta[column], self.flipped[column]
                slope = torch.addmv(
                    self.slope[column], self.flipped[here].T, self.gram[here, column], alpha=-2
                )
                pays = slope.sub_(delta, alpha=self.diagonal[column]).mul_(delta) > 0
                torch.mul(delta, pays, out=flipped)
                delta.sub_(flipped, alpha=2)
            self.slope[here].addmm_(self.gram[here, here], self.flipped[here], alpha=-2)
            return
        middle = (first + end) // 2
        left, right = slice(first, middle), slice(middle, end)
        self.sweep(first, middle)
        self.slope[right].addmm_(self.gram[right, left], self.flipped[left], alpha=-2)
        self.sweep(middle, end)
        self.slope[left].addmm_(self.gram[left, right], self.flipped[right], alpha=-2)


def _signs_of(delta: Tensor, magnitude: Tensor, old: Tensor) -> Tensor:
    """Signs that give `delta` from products of scales, negative ones included; the old sign where one is zero."""
    return torch.where(magnitude == 0, old, (delta > 0) == (magnitude > 0))
