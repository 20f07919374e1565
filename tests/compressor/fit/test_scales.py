"""Scales against least squares written out in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from compressor.fit import solve as solve_module
from compressor.fit.problem import Problem
from compressor.fit.solve import solve, solve_scales
from deltastore.format.matrix import Axis
from tests.compressor.helpers.layer_problems import Drawn, close, dense, drawn, layer_loss, normal, numbers

SHAPES = [(7, 5), (5, 9), (1, 6), (6, 1), (1, 1), (3, 70)]


def least_squares(case: Drawn, parts: Tensor) -> Tensor:
    """Return the vector ``[k]`` of least loss, from the delta of each of its entries, `parts` ``[k, out, in]``."""
    outputs = torch.einsum("ni,koi->nok", case.x, parts).reshape(-1, len(parts))
    solution: Tensor = torch.linalg.lstsq(outputs, case.residual.reshape(-1, 1)).solution
    return solution[:, 0]


def per_row(delta: Tensor) -> Tensor:  # [out, out, in]
    return torch.eye(len(delta), dtype=delta.dtype)[:, :, None] * delta


def per_column(delta: Tensor) -> Tensor:  # [in, out, in]
    return torch.eye(delta.shape[1], dtype=delta.dtype)[:, None, :] * delta


@pytest.mark.parametrize("shape", SHAPES)
def test_scales_per_row_are_least_squares(shape: tuple[int, int]) -> None:
    case = drawn(*shape)
    signs = case.problem.difference > 0
    scale_out, scale_in = solve_scales(case.problem, signs, "out")
    assert scale_in is None
    assert close(scale_out, least_squares(case, per_row(numbers(signs))))


@pytest.mark.parametrize("shape", SHAPES)
def test_scales_per_column_are_least_squares(shape: tuple[int, int]) -> None:
    case = drawn(*shape)
    signs = case.problem.difference > 0
    scale_out, scale_in = solve_scales(case.problem, signs, "in")
    assert scale_out is None
    assert close(scale_in, least_squares(case, per_column(numbers(signs))))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_scalar_is_least_squares(shape: tuple[int, int]) -> None:
    case = drawn(*shape)
    signs = case.problem.difference > 0
    scale_out, scale_in = solve_scales(case.problem, signs, "scalar")
    assert scale_in is None
    assert close(scale_out, least_squares(case, numbers(signs)[None]))


@pytest.mark.parametrize("shape", SHAPES)
def test_one_alternation_is_two_least_squares_one_after_the_other(shape: tuple[int, int]) -> None:
    case = drawn(*shape)
    signs = numbers(case.problem.difference > 0)
    first_out = least_squares(case, per_row(signs))
    then_in = least_squares(case, per_column(signs * first_out[:, None]))
    then_out = least_squares(case, per_row(signs * then_in))
    scales = solve_scales(case.problem, case.problem.difference > 0, "both", rounds=1)
    assert close(dense(case.problem.difference > 0, *scales), signs * then_out[:, None] * then_in)


def test_every_alternation_lowers_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve_module, "CONVERGED", 0)
    case = drawn(9, 12)
    signs = case.problem.difference > 0
    by_rounds = [solve_scales(case.problem, signs, "both", rounds) for rounds in range(9)]
    losses = [case.lost(dense(signs, *scales)) for scales in by_rounds]
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in itertools.pairwise(losses))
    assert losses[8] < 0.95 * losses[0]


def test_alternation_stops_within_a_thousandth_of_where_it_would_end(monkeypatch: pytest.MonkeyPatch) -> None:
    case = drawn(40, 30)
    stopped = solve(case.problem, "both", sign_rounds=0).loss
    monkeypatch.setattr(solve_module, "CONVERGED", 0)
    signs = case.problem.difference > 0
    ended = dense(signs, *solve_scales(case.problem, signs, "both", rounds=60))
    assert stopped == pytest.approx(layer_loss(case.problem, ended.float()), rel=1e-3)


def test_alternation_goes_on_from_where_it_is_told_to_start() -> None:
    case = drawn(9, 12)
    signs = case.problem.difference > 0
    _, reached = solve_scales(case.problem, signs, "both", rounds=3)
    went_on = solve_scales(case.problem, signs, "both", rounds=0, start=reached)
    assert case.lost(dense(signs, *went_on)) < case.lost(
        dense(signs, *solve_scales(case.problem, signs, "out"))
    )


@pytest.mark.parametrize("axis", ["scalar", "out", "in"])
def test_where_no_input_was_seen_scales_are_mean_magnitudes(axis: Axis) -> None:
    delta = normal(0, 5, 7).float()
    problem = Problem(delta, torch.zeros(7, 7), torch.zeros(5, 7), 0)
    scale_out, scale_in = solve_scales(problem, delta > 0, axis)
    means = {"scalar": delta.abs().mean()[None], "out": delta.abs().mean(1), "in": delta.abs().mean(0)}
    assert close(scale_in if axis == "in" else scale_out, means[axis].double(), 1e-6)


def test_a_column_without_input_is_scaled_as_its_weights_are() -> None:
    case = drawn(6, 5)
    case.problem.gram[2] = case.problem.gram[:, 2] = case.problem.cross[:, 2] = 0
    _, scale_in = solve_scales(case.problem, case.problem.difference > 0, "in")
    assert scale_in is not None
    assert float(scale_in[2]) == pytest.approx(float(case.problem.difference[:, 2].abs().mean()), rel=1e-4)


def test_signs_that_point_away_from_the_target_get_negative_scales() -> None:
    case = drawn(4, 6)
    solved = solve_scales(case.problem, case.problem.difference < 0, "out")[0]
    assert solved is not None
    assert bool((solved < 0).all())
