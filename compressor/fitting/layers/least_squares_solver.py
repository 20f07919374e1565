"""Least squares as a layer solver: signs and scales in closed form, from second moments of the inputs.

Joins a pair of weights with the moments of its inputs; the mathematics is that of `solve.py` and `residual.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.codec import Method
from compressor.fitting.layers.layerwise import StudentBlock
from compressor.fitting.layers.moments import Moments, moments
from compressor.fitting.layers.problem import Problem
from compressor.fitting.layers.residual import low_rank, quarter_rank, remaining
from compressor.fitting.layers.solve import Solved, solve
from compressor.io.pairs import TensorPair
from deltastore.errors import CheckpointError, shown
from deltastore.format.matrix import MatrixDelta
from deltastore.format.sign_plane import Axis, SignPlane
from deltastore.format.signs import pack_signs

AXES_OF: Mapping[Method, tuple[Axis, ...]] = {
    "scalar": ("scalar",),
    "per-axis": ("out", "in"),
    "both": ("both",),
}


@dataclass(frozen=True, slots=True)
class LeastSquaresSolver:
    """Scales by least squares, signs by error feedback and single flips."""

    method: Method
    sign_rounds: int  # 0 keeps the signs of the differences
    with_upgrades: bool = False  # also find upgrades of each delta

    def gather(self, teacher: Iterable[Tensor], student: Iterable[Tensor]) -> Moments:
        return moments(teacher, student)

    def solve(self, pair: TensorPair, gathered: Moments, block: StudentBlock | None) -> SignPlane:
        """Return the delta of least layer error; of several axes, the one that errs less."""
        problem = _problem(pair, gathered)
        solutions = (solve(problem, axis, sign_rounds=self.sign_rounds) for axis in AXES_OF[self.method])
        return _stored(min(solutions, key=lambda solved: solved.loss))

    def upgrades(self, pair: TensorPair, gathered: Moments, coded: SignPlane) -> list[MatrixDelta]:
        """Return `coded` with a second plane, and with a low-rank residual of a quarter of a plane's bytes."""
        if not self.with_upgrades:
            return []
        problem = remaining(_problem(pair, gathered), coded.dense())
        second = solve(problem, coded.axis, sign_rounds=self.sign_rounds)
        left, right = low_rank(problem, quarter_rank(pair.shape))
        return [MatrixDelta((coded, _stored(second))), MatrixDelta((coded,), left.cpu(), right.cpu())]


def _problem(pair: TensorPair, gathered: Moments) -> Problem:
    device, rows = gathered.gram.device, slice(0, pair.shape[0])
    difference = pair.row_block(rows).to(device)
    finetune = pair.finetune.read(pair.tensor.name, rows).float().to(device)
    cross = gathered.cross(difference, finetune)
    if not (torch.isfinite(gathered.gram).all() and torch.isfinite(cross).all()):
        raise CheckpointError(
            f"{pair.finetune.path}: the inputs of tensor {shown(pair.name)} on this text are not finite or overflow: "
            "the checkpoint is damaged, or its training diverged; --calibration none reads no text"
        )
    return Problem(difference, gathered.gram, cross, gathered.count)


def _stored(solved: Solved) -> SignPlane:
    scales = (None if scale is None else scale.cpu() for scale in (solved.scale_out, solved.scale_in))
    return SignPlane.from_scales(pack_signs(solved.signs.cpu()), solved.signs.shape[1], *scales)
