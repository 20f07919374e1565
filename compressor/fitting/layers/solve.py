"""Signs and scales of one matrix from the moments of its inputs, in rounds, without a training loop.

Works on the layer's `Problem`; independent of models and files. Each round chooses signs for the present scales
(`signs.py`) and then scales for those signs (`scales.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from compressor.fitting.layers.problem import Problem
from compressor.fitting.layers.scales import scaled_loss, solve_scales
from compressor.fitting.layers.signs import SIGN_RIDGE, descend_signs, own_signs, refine_signs
from deltastore.format.sign_plane import Axis


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """A coded matrix and its loss."""

    signs: Tensor  # [out, in] bool, True where +1
    scale_out: Tensor | None  # [out] or, for `scalar`, [1]; float32
    scale_in: Tensor | None  # [in] float32
    loss: float  # as `layer_loss` gives it


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


def _with_scales(problem: Problem, signs: Tensor, axis: Axis, start: Tensor | None) -> Solved:
    scale_out, scale_in = solve_scales(problem, signs, axis, start=start)
    return Solved(signs, scale_out, scale_in, scaled_loss(problem, signs, scale_out, scale_in))
