"""The problem that a coding leaves, and its best low-rank solution, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compressor.fit.problem import Problem
from compressor.fit.signs import SIGN_RIDGE
from compressor.fit.solve import low_rank, quarter_rank, remaining, solve
from deltastore.format.matrix import Axis
from tests.compressor.helpers.fitting import dense64, normal, random_delta
from tests.compressor.helpers.layer_problems import layer_loss

SHAPE = (40, 56)
COUNT = 300


def inputs() -> Tensor:
    """Inputs of very unequal directions, so that weighting by them matters."""
    return normal(1, COUNT, SHAPE[1]) @ (normal(2, SHAPE[1], SHAPE[1]) * torch.logspace(0, -2, SHAPE[1]))


def problem_of(delta: Tensor, targets: Tensor) -> Problem:
    own = inputs()
    return Problem(delta, (own.double().T @ own.double()), (targets.T @ own), COUNT)


def drifted(delta: Tensor) -> Problem:
    """A problem whose targets are the delta's outputs and noise."""
    return problem_of(delta, inputs() @ delta.T + 0.1 * normal(3, COUNT, SHAPE[0]))


def test_what_remains_is_the_problem_with_the_coded_part_taken_from_the_targets() -> None:
    delta, coded = normal(4, *SHAPE), dense64(random_delta(SHAPE, size=0.5)).float()
    noise = 0.1 * normal(3, COUNT, SHAPE[0])
    left = remaining(problem_of(delta, inputs() @ delta.T + noise), coded)
    expected = problem_of(delta - coded, inputs() @ delta.T + noise - inputs() @ coded.T)
    assert torch.equal(left.difference, expected.difference)
    assert torch.equal(left.gram, expected.gram)
    assert torch.allclose(left.cross, expected.cross, atol=1e-4 * float(expected.cross.abs().max()))
    assert left.count == COUNT


def test_losses_of_what_remains_add_up() -> None:
    problem = drifted(normal(4, *SHAPE))
    coded, more = (dense64(random_delta(SHAPE, axis, size=0.3)).float() for axis in ("both", "out"))
    left = remaining(problem, coded)
    together = layer_loss(problem, coded) + layer_loss(left, more)
    assert together == pytest.approx(layer_loss(problem, coded + more), rel=1e-3)


def best_factors(problem: Problem, rank: int) -> Tensor:
    """The float64 solution: the ridge's target whitened, truncated to `rank` singular values, and whitened back."""
    ridge = problem.noise_ridge(SIGN_RIDGE)
    damped = problem.gram.double() + ridge * torch.eye(SHAPE[1], dtype=torch.float64)
    target = (problem.cross.double() + ridge * problem.difference.double()) @ torch.linalg.inv(damped)
    factor = torch.linalg.cholesky(damped)
    left, sizes, right = torch.linalg.svd(target @ factor, full_matrices=False)
    best: Tensor = (left[:, :rank] * sizes[:rank]) @ right[:rank] @ torch.linalg.inv(factor)
    return best


def ridge_loss(problem: Problem, delta: Tensor) -> float:
    ridge = problem.noise_ridge(SIGN_RIDGE)
    damped = problem.gram.double() + ridge * torch.eye(SHAPE[1], dtype=torch.float64)
    target = (problem.cross.double() + ridge * problem.difference.double()) @ torch.linalg.inv(damped)
    lost = delta.double() - target
    return float(((lost @ damped) * lost).sum())


@pytest.mark.parametrize("rank", [1, 3, 12, 40, 60])
def test_the_residual_is_the_best_of_its_rank(rank: int) -> None:
    problem = drifted(normal(5, *SHAPE))
    left, right = low_rank(problem, rank)
    rank = min(rank, *SHAPE)
    assert left.shape == (SHAPE[0], rank)
    assert right.shape == (rank, SHAPE[1])
    assert left.dtype == right.dtype == torch.float16
    got, expected = left.double() @ right.double(), best_factors(problem, rank)
    best, none = ridge_loss(problem, expected), ridge_loss(problem, torch.zeros(SHAPE))
    assert best < none
    assert ridge_loss(problem, got) - best < 0.01 * (none - best)
    # The first singular value is well apart from the second, so the factors themselves are decided.
    if rank == 1:
        assert float((got - expected).norm()) < 0.02 * float(expected.norm())


def test_inputs_decide_what_the_residual_keeps() -> None:
    """A large part without inputs is left out for a small part with inputs."""
    delta = 0.7 * normal(6, 40, 1) @ normal(7, 1, 56)
    delta[:, 28:] = normal(8, 40, 1) @ normal(9, 1, 28)
    own = normal(1, COUNT, 56)
    own[:, 28:] *= 1e-3
    problem = Problem(delta, own.double().T @ own.double(), (own @ delta.T).T @ own, COUNT)
    got = torch.mm(*(factor.float() for factor in low_rank(problem, 1)))
    by_weights = torch.linalg.svd(delta)
    plain = by_weights.U[:, :1] * by_weights.S[0] @ by_weights.Vh[:1]
    assert layer_loss(problem, got) < 2 * layer_loss(problem, plain)
    assert layer_loss(problem, got) < 0.5 * layer_loss(problem, delta)


def test_the_same_problem_gives_the_same_residual_whatever_was_drawn_before() -> None:
    problem = drifted(normal(5, *SHAPE))
    torch.manual_seed(1)
    first = low_rank(problem, 3)
    following = torch.rand(1)
    torch.manual_seed(2)
    assert all(torch.equal(one, other) for one, other in zip(first, low_rank(problem, 3), strict=True))
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), following)  # the global generator is untouched


@pytest.mark.parametrize("shape", [(4096, 4096), (1024, 2816), (92, 64), (2, 3)])
def test_a_quarter_rank_takes_a_quarter_of_a_sign_plane(shape: tuple[int, int]) -> None:
    rank, plane = quarter_rank(shape), shape[0] * shape[1] / 8
    assert rank >= 1
    assert rank == 1 or 2 * rank * sum(shape) <= plane / 4 < 2 * (rank + 1) * sum(shape)


@pytest.mark.parametrize("axis", ["out", "both"])
def test_a_second_plane_and_a_residual_each_lower_the_loss(axis: Axis) -> None:
    problem = drifted(normal(5, *SHAPE))
    first = solve(problem, axis)
    dense = torch.where(first.signs, 1.0, -1.0)
    for scale, is_out in ((first.scale_out, True), (first.scale_in, False)):
        if scale is not None:
            dense = dense * (scale[:, None] if is_out else scale)
    left = remaining(problem, dense)
    assert solve(left, axis).loss < 0
    assert layer_loss(left, torch.mm(*(factor.float() for factor in low_rank(left, 4)))) < 0
