"""Signs and scales together: the loss that they reach, and problems that decide little."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.fit import problem as problem_module
from compressor.fit.problem import Problem
from compressor.fit.signs import descend_signs, refine_signs
from compressor.fit.solve import solve, solve_scales
from deltastore.format.matrix import AXES, Axis
from tests.compressor.helpers.layer_problems import close, dense, drawn, layer_loss, normal


def test_both_scales_lose_no_more_than_either_alone() -> None:
    case = drawn(16, 12)
    lost = {axis: solve(case.problem, axis, sign_rounds=0).loss for axis in AXES}
    assert lost["both"] < min(lost["out"], lost["in"])
    assert max(lost["out"], lost["in"]) < lost["scalar"]


@pytest.mark.parametrize("axis", AXES)
def test_a_row_without_difference_and_target_is_scaled_to_zero(axis: Axis) -> None:
    case = drawn(4, 6)
    problem = case.problem
    problem.difference[1] = problem.cross[1] = 0
    solved = solve(problem, axis)
    if axis in ("out", "both"):
        assert solved.scale_out is not None
        assert solved.scale_out[1] == 0
    assert math.isfinite(solved.loss)


@pytest.mark.parametrize("axis", AXES)
def test_no_difference_at_all_is_solved_by_alternating_signs_and_no_scale(axis: Axis) -> None:
    problem = Problem(torch.zeros(2, 3), torch.eye(3), torch.zeros(2, 3), 9)
    solved = solve(problem, axis)
    assert solved.signs.tolist() == [[True, False, True], [False, True, False]]
    assert solved.loss == 0
    assert not dense(solved.signs, solved.scale_out, solved.scale_in).any()


def test_the_loss_is_what_the_outputs_are_off_by_less_what_the_base_is() -> None:
    case = drawn(5, 9)
    delta = normal(7, 5, 9)
    wanted = case.lost(delta) - case.lost(torch.zeros(5, 9))
    assert layer_loss(case.problem, delta.float()) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("axis", AXES)
def test_the_loss_that_solve_reports_is_that_of_its_delta(axis: Axis) -> None:
    case = drawn(8, 13)
    solved = solve(case.problem, axis)
    delta = dense(solved.signs, solved.scale_out, solved.scale_in)
    assert layer_loss(case.problem, delta.float()) == pytest.approx(solved.loss, rel=1e-5)


@pytest.mark.parametrize("axis", AXES)
def test_on_correlated_inputs_refined_signs_lose_far_less(axis: Axis) -> None:
    case = drawn(32, 48)
    plain, refined = (solve(case.problem, axis, sign_rounds=rounds).loss for rounds in (0, 2))
    constant = float(case.residual.square().sum())
    assert constant + refined < 0.6 * (constant + plain)


def test_refined_signs_lose_less_on_other_inputs_too_however_few_they_were_made_from() -> None:
    for rows in (40, 400):
        few, many = drawn(32, 48, rows=rows), drawn(32, 48, rows=4000)
        cross = few.problem.difference @ many.problem.gram
        held_out = replace(many.problem, difference=few.problem.difference, cross=cross)
        plain, refined = (solve(few.problem, "both", sign_rounds=rounds) for rounds in (0, 2))
        lost = [
            layer_loss(held_out, dense(s.signs, s.scale_out, s.scale_in).float()) for s in (plain, refined)
        ]
        assert lost[1] < lost[0]


def test_the_first_round_of_signs_is_feedback_and_then_flips() -> None:
    case = drawn(20, 30)
    own = case.problem.difference > 0
    scales = solve_scales(case.problem, own, "both")
    expected = descend_signs(case.problem, refine_signs(case.problem, own, *scales), *scales)
    assert torch.equal(solve(case.problem, "both", sign_rounds=1).signs, expected)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 12), st.integers(0, 2**20), st.sampled_from(AXES))
@settings(max_examples=60, deadline=None)
def test_no_problem_is_solved_worse_than_by_its_own_signs(
    out_features: int, in_features: int, rows: int, seed: int, axis: Axis
) -> None:
    """Covers a singular H, with fewer rows than inputs, and differences of which half are zero."""
    x, residual = normal(seed, rows, in_features), normal(seed + 1, rows, out_features)
    delta = normal(seed + 2, out_features, in_features).clamp(min=0).float()
    problem = Problem(delta, (x.T @ x).float(), (residual.T @ x).float(), rows)
    plain, solved = solve(problem, axis, sign_rounds=0), solve(problem, axis, sign_rounds=2, ridge_part=0)
    assert solved.loss <= plain.loss
    scales = [scale for scale in (solved.scale_out, solved.scale_in) if scale is not None]
    assert all(bool(scale.isfinite().all()) for scale in scales)


def test_a_gram_that_rounding_made_indefinite_is_solved_all_the_same() -> None:
    case = drawn(4, 30, rows=3)
    case.problem.gram.diagonal().sub_(0.02 * case.problem.gram.diagonal().mean())
    assert float(torch.linalg.eigvalsh(case.problem.gram)[0]) < 0
    solved = solve(replace(case.problem, count=10**6), "in", ridge_part=0)
    assert solved.scale_in is not None
    assert bool(solved.scale_in.isfinite().all())


@pytest.mark.parametrize("axis", AXES)
def test_row_chunks_change_nothing(axis: Axis, monkeypatch: pytest.MonkeyPatch) -> None:
    case = drawn(11, 14)
    whole = solve(case.problem, axis)
    monkeypatch.setattr(problem_module, "CHUNK_WEIGHTS", 3 * 14)
    chunked = solve(case.problem, axis)
    assert torch.equal(chunked.signs, whole.signs)
    assert close(
        dense(chunked.signs, chunked.scale_out, chunked.scale_in),
        dense(whole.signs, whole.scale_out, whole.scale_in),
        1e-5,
    )


@pytest.mark.parametrize("axis", AXES)
def test_a_minute_delta_is_solved_as_a_large_one_is(axis: Axis) -> None:
    case = drawn(6, 10)
    minute = replace(
        case.problem, difference=case.problem.difference * 2**-40, cross=case.problem.cross * 2**-40
    )
    large, small = solve(case.problem, axis), solve(minute, axis)
    assert torch.equal(large.signs, small.signs)
    for ours, theirs in ((small.scale_out, large.scale_out), (small.scale_in, large.scale_in)):
        assert (ours is None) == (theirs is None)
    delta = dense(small.signs, small.scale_out, small.scale_in) * 2**40
    assert close(delta, dense(large.signs, large.scale_out, large.scale_in), 1e-6)


def test_a_gram_in_float64_and_factors_in_float32_give_the_same_signs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = drawn(8, 20)
    wide = solve(replace(case.problem, gram=case.problem.gram.double()), "both")
    monkeypatch.setattr(problem_module, "FLOAT64_INPUTS", 0)
    assert torch.equal(solve(case.problem, "both").signs, wide.signs)
