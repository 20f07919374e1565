"""Signs and scales of one matrix from the moments of its inputs, in closed form: no training loop, no models, no files.

With student inputs X ``[n, in]``, residual targets R = Y - X W_b', H = X'X and G = R'X, a delta costs
``||R - X delta'||^2 = ||R||^2 - 2 <G, delta> + <delta H, delta>``; a coded delta is ``u_i B_ij v_j``. Given B and one
of u, v the other is a least-squares solution. Given u and v, rows of B are independent: error feedback over columns
(GPTQ's) finds good signs, single flips make them better. Where H knows little, a ridge pulls toward the true delta.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deltastore.format.onebit import Axis

Scales = tuple[Tensor | None, Tensor | None]  # out, [out] or [1]; in, [in]; None where an axis has none

CHUNK_WEIGHTS = 2**26  # of one row chunk; a chunk has up to five float32 buffers of this many numbers
FLOAT64_INPUTS = 4096  # factors of matrices up to this size are made in float64
DAMPING = 1e-6  # how hard scales are pulled toward the true delta's, as a part of H's mean diagonal
CONVERGED = 1e-4  # of the loss that scales explain: a round that gains less is the last one
RIDGE = 0.2  # of H's mean diagonal; less of it follows the calibration text closer and other text worse
NOISE = 2.0  # ridge added per in / n: without it, signs of few inputs fit noise and lose on others
SWEEPS = 2  # of single flips; each next one flips about half as many signs
LEAF = 64  # columns done one at a time, between products of whole blocks


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """What a layer's output asks of its delta; all tensors on one device, all numbers finite."""

    delta: Tensor  # [out, in] float32: fine-tune less base
    gram: Tensor  # [in, in] float32 or float64: H
    cross: Tensor  # [out, in] float32: G
    count: int  # rows of X that the moments sum over; losses are sums over them

    def __post_init__(self) -> None:
        assert self.delta.shape == self.cross.shape
        assert self.gram.shape == (self.delta.shape[1], self.delta.shape[1])

    def chunks(self) -> Iterator[slice]:
        """Row ranges, first to last, of at most `CHUNK_WEIGHTS` weights."""
        out_features, in_features = self.delta.shape
        step = max(1, CHUNK_WEIGHTS // in_features)
        for start in range(0, out_features, step):
            yield slice(start, min(start + step, out_features))

    def pull(self, part: float) -> float:
        """What `part` of H's mean diagonal is; 1 where no input was ever other than zero and weights must decide."""
        mean = float(self.gram.diagonal().mean(dtype=torch.float64))
        return part * mean if mean > 0 else 1.0

    def ridge_pull(self, ridge: float) -> float:
        """The pull of `ridge` and, on top of it, of what H's noise calls for where inputs are few."""
        return self.pull(ridge + NOISE * len(self.gram) / max(self.count, 1))

    def pulled_cross(self, rows: slice, pull: float) -> Tensor:  # [len(rows), in] float32
        """G of the loss with ``pull * ||delta' - delta||^2`` added; its H is ``H + pull * I``."""
        return self.cross[rows].float().add(self.delta[rows], alpha=pull)


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """A coded matrix and its cost."""

    signs: Tensor  # [out, in] bool, True where +1
    scale_out: Tensor | None  # [out] or, for `scalar`, [1]; float32
    scale_in: Tensor | None  # [in] float32
    loss: float  # as `layer_loss` gives it


def solve(problem: Problem, axis: Axis, *, sign_rounds: int = 2, ridge: float = RIDGE) -> Solved:
    """The best signs and scales found; its loss is never above that of the delta's own signs with their best scales.

    The first round of signs is error feedback and then single flips, each later one flips alone: to go on from good
    signs costs half of feeding back anew and ends lower. Zero differences start with alternating signs and take part
    in each round like any other.

    Args:
        sign_rounds: rounds of signs and then scales; 0 keeps the delta's own signs.
        ridge: how hard signs are pulled toward the true delta, as a part of H's mean diagonal, beside the pull that
            keeps them from fitting the noise of few inputs (`NOISE`).
    """
    found = best = _with_scales(problem, _own_signs(problem.delta), axis, None)
    for number in range(sign_rounds):
        signs, scales = found.signs, (found.scale_out, found.scale_in)
        if number == 0:
            signs = refine_signs(problem, signs, *scales, ridge)
        signs = descend_signs(problem, signs, *scales, ridge)
        found = _with_scales(problem, signs, axis, found.scale_in)
        if found.loss < best.loss:
            best = found
    return best


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


def solve_scales(
    problem: Problem,
    signs: Tensor,  # [out, in] bool
    axis: Axis,
    rounds: int = 8,
    start: Tensor | None = None,  # [in], where `both` starts from; all ones if not given or all zero
) -> Scales:
    """Scales of least loss for these signs; `both` alternates, each step of which lowers the loss, `rounds` at most.

    A scale that no input decides is that of least weight error. Where the delta and its target are zero, so is it.
    """
    in_features = problem.delta.shape[1]
    ones = torch.ones(in_features, device=problem.delta.device)
    if axis == "in":
        return None, _fit_in(problem, signs, ones.new_ones(problem.delta.shape[0]))
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


def refine_signs(
    problem: Problem,
    signs: Tensor,  # [out, in] bool: kept where nothing decides, which is where a scale is zero
    scale_out: Tensor | None,  # [out] or [1]
    scale_in: Tensor | None,  # [in]
    ridge: float = RIDGE,
) -> Tensor:  # [out, in] bool
    """Signs chosen column by column, the columns of most input first, each answering for the error of those before.

    The target is the ridge solution T = (G + pull D)(H + pull I)^-1 and the cost ``||(delta - T) L||^2`` with
    ``H + pull I = L L'``, which is GPTQ's recursion over the upper factor of the inverse, without the inverse: each
    column's error is carried to later ones through L, and T is needed as T L alone, one triangular solution.
    """
    pull, refined = problem.ridge_pull(ridge), torch.empty_like(signs)
    order = problem.gram.diagonal().argsort(stable=True)
    factor = cholesky(problem.gram[order][:, order], pull).float()
    across = _across(problem, scale_in)[order]
    for rows in problem.chunks():
        old = signs[rows].T[order]
        level = torch.outer(across, _down(problem, scale_out, rows))
        delta = torch.where(old, level, -level)
        aim = problem.pulled_cross(rows, pull).T[order]
        aim = torch.linalg.solve_triangular(factor, aim, upper=False)
        _Feedback(factor, aim, delta).choose(0, len(order))
        refined[rows] = torch.empty_like(old).index_copy_(0, order, _signs_of(delta, level, old)).T
    return refined


def descend_signs(
    problem: Problem,
    signs: Tensor,  # [out, in] bool
    scale_out: Tensor | None,  # [out] or [1]
    scale_in: Tensor | None,  # [in]
    ridge: float = RIDGE,
) -> Tensor:  # [out, in] bool
    """Flip each sign in turn that lowers the loss with `refine_signs`' ridge, `SWEEPS` times over all columns."""
    pull, descended = problem.ridge_pull(ridge), torch.empty_like(signs)
    gram = problem.gram.float().clone()
    gram.diagonal().add_(pull)
    across = _across(problem, scale_in)
    for rows in problem.chunks():
        old = signs[rows].T
        level = torch.outer(across, _down(problem, scale_out, rows))
        delta = torch.where(old, level, -level)
        slope = (gram @ delta).sub_(problem.pulled_cross(rows, pull).T)
        descent = _Descent(gram, gram.diagonal().tolist(), slope, delta, torch.empty_like(delta))
        for _ in range(SWEEPS):
            descent.sweep(0, len(gram))
        descended[rows] = _signs_of(delta, level, old).T
    return descended


@dataclass(frozen=True, slots=True, eq=False)
class _Feedback:
    """Error feedback over the columns of some rows, the last column first; tensors lie column by column."""

    factor: Tensor  # [in, in] lower: L
    aim: Tensor  # [in, rows]: T L less what the columns chosen so far give; changed
    delta: Tensor  # [in, rows]; changed

    def choose(self, first: int, end: int) -> None:
        """Choose the signs of columns ``first..end``, whose aims already count all columns behind `end`."""
        if end - first <= LEAF:
            for column in reversed(range(first, end)):
                delta, aim = self.delta[column], self.aim[column]
                chosen = slice(column + 1, end)
                aim.addmv_(self.delta[chosen].T, self.factor[chosen, column], alpha=-1)
                torch.copysign(delta, torch.where(aim == 0, delta, aim), out=delta)
            return
        middle = (first + end) // 2
        left, right = slice(first, middle), slice(middle, end)
        self.choose(middle, end)
        self.aim[left].addmm_(self.factor[right, left].T, self.delta[right], alpha=-1)
        self.choose(first, middle)


@dataclass(frozen=True, slots=True, eq=False)
class _Descent:
    """Single flips over the columns of some rows; tensors lie column by column."""

    gram: Tensor  # [in, in] H with its pull
    diagonal: list[float]  # of `gram`
    slope: Tensor  # [in, rows]: H delta - G, between sweeps that of the present delta; changed
    delta: Tensor  # [in, rows]; changed
    flipped: Tensor  # [in, rows]: delta as it was where this sweep flipped it, elsewhere 0; overwritten

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


def _signs_of(delta: Tensor, level: Tensor, old: Tensor) -> Tensor:
    """The signs that give `delta` from its levels, negative ones included; the old sign where a level is zero."""
    return torch.where(level == 0, old, (delta > 0) == (level > 0))


def _own_signs(delta: Tensor) -> Tensor:
    """Zeros are +1 where row + column is even, so that they cancel where nothing else decides them."""
    even_row, even_column = (torch.arange(size, device=delta.device) % 2 == 0 for size in delta.shape)
    return torch.where(delta == 0, even_row[:, None] == even_column, delta > 0)


def _with_scales(problem: Problem, signs: Tensor, axis: Axis, start: Tensor | None) -> Solved:
    scale_out, scale_in = solve_scales(problem, signs, axis, start=start)
    moment, energy = _row_sums(problem, signs, _across(problem, scale_in), 0.0)
    down = _down(problem, scale_out, slice(0, len(signs))).double()
    return Solved(signs, scale_out, scale_in, float((down * (down * energy - 2 * moment)).sum()))


def _across(problem: Problem, scale_in: Tensor | None) -> Tensor:  # [in] float32
    return problem.delta.new_ones(problem.delta.shape[1]) if scale_in is None else scale_in.float()


def _down(problem: Problem, scale_out: Tensor | None, rows: slice) -> Tensor:  # [len(rows)] float32
    num_rows = rows.stop - rows.start
    if scale_out is None:
        return problem.delta.new_ones(num_rows)
    return scale_out[rows].float() if scale_out.numel() > 1 else scale_out.float().expand(num_rows)


def _signed(signs: Tensor, scale_in: Tensor) -> Tensor:  # [rows, in] float32
    return torch.where(signs, scale_in, -scale_in)


def _row_sums(
    problem: Problem,
    signs: Tensor,
    scale_in: Tensor,  # [in]
    pull: float,
) -> tuple[
    Tensor, Tensor
]:  # [out] float64 each: B_i . G_i and B_i H B_i', with B scaled by `scale_in` and the pull
    gram = problem.gram.float()
    moment = torch.empty(len(signs), dtype=torch.float64, device=gram.device)
    energy = torch.empty_like(moment)
    for rows in problem.chunks():
        delta = _signed(signs[rows], scale_in)
        energy[rows] = torch.add(delta @ gram, delta, alpha=pull).mul_(delta).sum(1, dtype=torch.float64)
        moment[rows] = problem.pulled_cross(rows, pull).mul_(delta).sum(1, dtype=torch.float64)
    return moment, energy


def _fit_out(
    problem: Problem,
    signs: Tensor,
    scale_in: Tensor,  # [in]
    shared: bool = False,
) -> tuple[Tensor, float]:  # [out] or, for one scale shared by all rows, [1]; how much loss it takes away
    """u_i = (B_i . G_i) / (B_i H B_i'), with B scaled by `scale_in`; `shared` sums both over the rows."""
    moment, energy = _row_sums(problem, signs, scale_in, problem.pull(DAMPING))
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
    pull = problem.pull(DAMPING)
    normal = torch.zeros_like(problem.gram, dtype=torch.float32)
    moment = normal.new_zeros(len(normal), dtype=torch.float64)
    for rows in problem.chunks():
        part = scale_out[rows, None]
        delta = torch.where(signs[rows], part, -part)
        normal.addmm_(delta.T, delta)
        moment += problem.pulled_cross(rows, pull).mul_(delta).sum(0, dtype=torch.float64)
    pulled = float(scale_out.square().sum(dtype=torch.float64)) * pull
    if not pulled > 0:
        return torch.zeros_like(moment, dtype=torch.float32)
    factor = cholesky(normal.mul_(problem.gram), pulled)
    return torch.cholesky_solve(moment.to(factor.dtype)[:, None], factor)[:, 0].float()


def cholesky(
    matrix: Tensor, damping: float
) -> Tensor:  # lower, [in, in], float64 up to FLOAT64_INPUTS, else float32
    """Cholesky factor of ``matrix + damping * I``, with more damping where rounding has made that indefinite.

    The last try makes the diagonal dominant, for which any finite symmetric matrix has a factor.
    """
    dtype = torch.float64 if len(matrix) <= FLOAT64_INPUTS else torch.float32
    damped = matrix.to(dtype, copy=True)
    damped.diagonal().add_(damping)
    mean, largest = damped.diagonal().mean(), damped.abs().sum(1).max()
    for more in (1e-5 * mean, 1e-3 * mean, 1e-1 * mean, largest):
        factor: Tensor
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            break
        damped.diagonal().add_(more.abs())
    else:
        factor = torch.linalg.cholesky(damped)
    return factor
