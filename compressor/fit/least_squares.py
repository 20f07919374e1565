"""The default recipe: least squares layer by layer, then distillation by KL in which signs move, too.

A layer's signs and scales come in closed form (`solve.py`) from second moments of its inputs, summed over all
calibration tokens. With every method, also `both` and its two vectors, they minimize the squared error of the layer's
outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from compressor.config import FitSettings, Method
from compressor.fit.calibration import batched, with_random_tokens
from compressor.fit.distill import DistillSettings
from compressor.fit.layerwise import LayerStage, StudentBlock
from compressor.fit.problem import CHUNK_WEIGHTS, Problem
from compressor.fit.recipe import LayerStageContext, Recipe
from compressor.fit.solve import Solved, low_rank, quarter_rank, remaining, solve
from compressor.pairs import TensorPair
from compressor.resume import FittedMatrix
from deltastore.errors import CheckpointError, shown
from deltastore.format.matrix import Axis, MatrixDelta, SignPlane, pack_signs

EPOCHS = 3
SCALE_RATE = 0.01  # in units of each vector's mean magnitude
SIGN_RATE = 0.003
SIGN_ROUNDS = 2
BATCH_SEQUENCES = 8
# Tokens per input feature of the widest layer: more tokens hardly improve the fit.
LAYER_TOKENS = 32
# Part of the tokens of the layer stage that become random ids: other text gains, and the end-to-end stage makes up for
# what the text itself loses.
RANDOM_PART = 0.5
FLOAT32_BYTES, FLOAT64_BYTES = 4, 8
AXES_OF: Mapping[Method, tuple[Axis, ...]] = {
    "scalar": ("scalar",),
    "per-axis": ("out", "in"),
    "both": ("both",),
}


def recipe(settings: FitSettings, method: Method) -> Recipe:
    """Return the recipe: the end-to-end stage sees all training text, layers as much of it as least squares needs."""
    epochs = settings.distill_epochs
    return Recipe(
        batch_tokens=BATCH_SEQUENCES * settings.calibration.length,
        min_samples=4,
        split=partial(_split, settings.calibration.length),
        layer_stage=partial(layer_stage, settings, method),
        distillation=DistillSettings(
            loss="kl",
            epochs=EPOCHS if epochs is None else epochs,
            rate=SCALE_RATE,
            sign_rate=SIGN_RATE if settings.learn_signs else 0.0,
        ),
        settings={
            "refine_signs": settings.refine_signs,
            "learn_signs": settings.learn_signs,
            "budget": settings.budget,
        },
        solve_bytes=_solve_bytes,
    )


def layer_stage(settings: FitSettings, method: Method, context: LayerStageContext) -> LayerStage:
    """Fit layers to text in which random ids replace a part of the tokens."""
    rounds = SIGN_ROUNDS if settings.refine_signs else 0
    sequences = with_random_tokens(context.sequences, context.num_ids, RANDOM_PART)
    batches = batched(sequences, BATCH_SEQUENCES * settings.calibration.length)
    return LayerStage(batches, moments, partial(solve_layer, method, rounds, context.with_upgrades))


def solve_layer(
    method: Method,
    sign_rounds: int,  # 0 keeps the signs of the weight difference
    with_upgrades: bool,
    pair: TensorPair,
    gathered: Moments,
    block: StudentBlock | None,
) -> FittedMatrix:
    """Return the delta of least layer error, by the better of several axes, and with it its upgrades.

    The upgrades are the delta with a second plane, and with a low-rank residual of a quarter of a plane's bytes.
    """
    problem = _problem(pair, gathered)
    solutions = (solve(problem, axis, sign_rounds=sign_rounds) for axis in AXES_OF[method])
    coded = _stored(min(solutions, key=lambda solved: solved.loss))
    if not with_upgrades:
        return FittedMatrix(MatrixDelta((coded,)))
    problem = remaining(problem, coded.dense())
    second = solve(problem, coded.axis, sign_rounds=sign_rounds)
    left, right = low_rank(problem, quarter_rank(pair.shape))
    upgrades = [MatrixDelta((coded, _stored(second))), MatrixDelta((coded,), left.cpu(), right.cpu())]
    return FittedMatrix(MatrixDelta((coded,)), upgrades)


def _split(length: int, num_train: int, widest: int) -> tuple[slice, slice]:
    enough = math.ceil(LAYER_TOKENS * widest / length)
    return slice(min(enough, num_train)), slice(num_train)


def _solve_bytes(numel: int, in_features: int) -> int:
    """Count the matrix with its differences, targets and signs, and the moments of its inputs."""
    weights = 5 * FLOAT32_BYTES * (numel + min(CHUNK_WEIGHTS, numel))
    return weights + (2 * FLOAT64_BYTES + 4 * FLOAT32_BYTES) * in_features**2


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Sums over tokens of products of inputs: X of the student, X_t of the teacher at the same layer.

    `drift` is C - H, not C = X_t'X: it is small where the models agree, so it loses little to rounding.
    """

    gram: Tensor  # [in, in]: H = X'X
    drift: Tensor  # [in, in]: C - H = (X_t - X)'X
    count: int  # tokens

    def cross(self, difference: Tensor, finetune: Tensor) -> Tensor:  # [out, in] float32
        """G = R'X of the residual targets R = X_t W_f' - X W_b', from W_f - W_b and W_f, both ``[out, in]``."""
        return difference.float() @ self.gram.float() + finetune.float() @ self.drift.float()


def moments(
    teacher: Iterable[Tensor], student: Iterable[Tensor], dtype: torch.dtype = torch.float64
) -> Moments:
    """Sum up inputs ``[tokens, in]`` of both models, batch by batch, on the student's device.

    Each batch's product is float32; the sums are of `dtype`, float64 unless memory forbids it.

    Raises:
        ValueError: no batches, or batches that differ in number or shape.
    """
    gram = drift = torch.zeros(())
    count = 0
    for teacher_inputs, inputs in zip(teacher, student, strict=True):
        if teacher_inputs.shape != inputs.shape:
            raise ValueError(
                f"inputs of {tuple(teacher_inputs.shape)} and {tuple(inputs.shape)} are not of one layer"
            )
        if not count:
            gram, drift = (inputs.new_zeros(inputs.shape[1], inputs.shape[1], dtype=dtype) for _ in range(2))
        own = inputs.float()
        gram += own.T @ own
        drift += (teacher_inputs.to(own.device, torch.float32) - own).T @ own
        count += inputs.shape[0]
    if not count:
        raise ValueError("there are no inputs to sum up")
    return Moments(gram, drift, count)


def _problem(pair: TensorPair, gathered: Moments) -> Problem:
    device, rows = gathered.gram.device, slice(0, pair.shape[0])
    difference = pair.row_block(rows).to(device)
    finetune = pair.finetune.read(pair.tensor.name, rows).float().to(device)
    cross = gathered.cross(difference, finetune)
    if not (torch.isfinite(gathered.gram).all() and torch.isfinite(cross).all()):
        raise CheckpointError(
            f"{pair.finetune.path}: the inputs of tensor {shown(pair.name)} on this text are not finite or overflow: "
            "the checkpoint is damaged, or its training diverged; `text='none'` reads no text"
        )
    return Problem(difference, gathered.gram, cross, gathered.count)


def _stored(solved: Solved) -> SignPlane:
    scales = (None if scale is None else scale.cpu() for scale in (solved.scale_out, solved.scale_in))
    return SignPlane.from_scales(pack_signs(solved.signs.cpu()), solved.signs.shape[1], *scales)
