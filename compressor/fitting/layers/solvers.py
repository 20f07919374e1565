"""The two ways in which a linear layer's delta is found: least squares in closed form (ours), AdamW (the paper's).

Knows one layer's inputs and its pair of weights; the mathematics is that of `solve.py` and `paper.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.codec import Method
from compressor.fitting.layers.layerwise import Place
from compressor.fitting.layers.moments import Moments, moments
from compressor.fitting.layers.problem import Problem
from compressor.fitting.layers.residual import low_rank, quarter_rank, remaining
from compressor.fitting.layers.solve import solve
from compressor.fitting.paper.end_loss import EndLoss
from compressor.fitting.paper.scale_training import Cache, Layer, PaperAxis, Recipe, Shards, choose_axis
from compressor.io.pairs import TensorPair
from deltastore.errors import CheckpointError, shown
from deltastore.format.matrix import MatrixDelta
from deltastore.format.onebit import Axis, OneBit
from deltastore.format.signs import pack_signs

AXES_OF: Mapping[Method, tuple[Axis, ...]] = {
    "scalar": ("scalar",),
    "per-axis": ("out", "in"),
    "both": ("both",),
}


@dataclass(frozen=True, slots=True)
class LeastSquares:
    """Scales by least squares, signs by error feedback and descent, from second moments of the inputs."""

    method: Method
    sign_rounds: int  # 0 keeps the signs of the differences
    with_upgrades: bool = False  # whether to find out what more bytes would give

    def gather(self, teacher: Iterable[Tensor], student: Iterable[Tensor]) -> Moments:
        return moments(teacher, student)

    def solve(self, pair: TensorPair, gathered: Moments, place: Place | None) -> OneBit:
        """The delta of least layer error; of several axes, the one that errs less."""
        problem = _problem(pair, gathered)
        solutions = (solve(problem, axis, sign_rounds=self.sign_rounds) for axis in AXES_OF[self.method])
        best = min(solutions, key=lambda solved: solved.loss)
        return _stored(best.signs, best.scale_out, best.scale_in)

    def upgrades(self, pair: TensorPair, gathered: Moments, coded: OneBit) -> list[MatrixDelta]:
        """What could be stored beside `coded`: a second plane, or a low-rank residual of a quarter of its bytes."""
        if not self.with_upgrades:
            return []
        problem = remaining(_problem(pair, gathered), coded.dense())
        second = solve(problem, coded.axis, sign_rounds=self.sign_rounds)
        left, right = low_rank(problem, quarter_rank(pair.shape))
        return [
            MatrixDelta((coded, _stored(second.signs, second.scale_out, second.scale_in))),
            MatrixDelta((coded,), left.cpu(), right.cpu()),
        ]


@dataclass(frozen=True, slots=True)
class AdamWScales:
    """The paper's: AdamW on cached inputs and outputs, axis by the loss on held-out rows (Algorithms 4, 5 and 6)."""

    recipe: Recipe
    held_out_rows: int  # the last of all tokens
    end_loss: EndLoss | None = None  # chooses the axis instead, as in Algorithm 6

    def gather(self, teacher: Iterable[Tensor], student: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
        """Both models' inputs ``[tokens, in]`` on the CPU, the student's in BF16. They grow with the text."""
        return torch.cat([batch.cpu() for batch in teacher]), torch.cat(
            [batch.cpu().bfloat16() for batch in student]
        )

    def solve(self, pair: TensorPair, gathered: tuple[Tensor, Tensor], place: Place | None) -> OneBit:
        inputs_t, inputs = gathered
        rows = slice(0, pair.shape[0])
        delta, base = pair.block(rows), pair.base.read(pair.base_tensor.name)
        outputs = (inputs_t @ pair.finetune.read(pair.tensor.name, rows).float().T).bfloat16()
        cut = len(inputs) - self.held_out_rows
        shards = Shards(Cache(inputs[:cut], outputs[:cut]), Cache(inputs[cut:], outputs[cut:]))
        signs = delta > 0

        def stored(axis: PaperAxis, scale: Tensor) -> OneBit:
            return _stored(signs, *((None, scale) if axis == "in" else (scale, None)))

        judge = None
        if self.end_loss is not None and place is not None:
            end_loss, here = self.end_loss, place

            def judge(axis: PaperAxis, scale: Tensor) -> float:
                return end_loss(pair, here, stored(axis, scale))

        choice = choose_axis(Layer(base, signs), delta, shards, self.recipe, judge)
        chosen = stored(choice.axis, choice.scale)
        if self.end_loss is not None:
            self.end_loss.settle(pair.name)
        return chosen

    def upgrades(self, pair: TensorPair, gathered: tuple[Tensor, Tensor], coded: OneBit) -> list[MatrixDelta]:
        return []


def _problem(pair: TensorPair, gathered: Moments) -> Problem:
    device, rows = gathered.gram.device, slice(0, pair.shape[0])
    delta = pair.block(rows).to(device)
    finetune = pair.finetune.read(pair.tensor.name, rows).float().to(device)
    cross = gathered.cross(delta, finetune)
    if not (torch.isfinite(gathered.gram).all() and torch.isfinite(cross).all()):
        raise CheckpointError(
            f"{pair.finetune.path}: what tensor {shown(pair.name)} reads of this text is not finite or overflows: the "
            "checkpoint is damaged, or its training diverged; --calibration none reads no text"
        )
    return Problem(delta, gathered.gram, cross, gathered.count)


def _stored(signs: Tensor, scale_out: Tensor | None, scale_in: Tensor | None) -> OneBit:
    scales = (None if scale is None else scale.cpu() for scale in (scale_out, scale_in))
    return OneBit.from_scales(pack_signs(signs.cpu()), signs.shape[1], *scales)
