"""Signs and scales from moments, against least squares and searches written from the formulas in float64."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressor.fitting.layers import solve as solve_module
from compressor.fitting.layers.solve import (
    NOISE,
    RIDGE,
    Problem,
    descend_signs,
    refine_signs,
    solve,
    solve_scales,
)
from deltastore.format.onebit import AXES, Axis

SHAPES = [(7, 5), (5, 9), (1, 6), (6, 1), (1, 1), (3, 70)]


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """A layer's inputs and targets, and the problem of their moments."""

    x: Tensor  # [n, in] float64
    residual: Tensor  # [n, out] float64
    problem: Problem

    def lost(self, delta: Tensor) -> float:
        return float((self.residual - self.x @ delta.double().T).square().sum())


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(out_features: int, in_features: int, *, seed: int = 0, rows: int = 400) -> Drawn:
    """Inputs of a few strong directions, and a delta whose columns differ in size."""
    spectrum = torch.arange(1, in_features + 1).double() ** -0.7
    x = normal(seed, rows, in_features) * spectrum @ normal(seed + 1, in_features, in_features)
    delta = (normal(seed + 2, out_features, in_features) * (normal(seed + 3, in_features) / 2).exp()).float()
    residual = x @ delta.double().T + 0.1 * normal(seed + 4, rows, out_features)
    return Drawn(x, residual, Problem(delta, (x.T @ x).float(), (residual.T @ x).float(), rows))


def numbers(signs: Tensor) -> Tensor:
    return torch.where(signs, 1.0, -1.0).double()


def dense(signs: Tensor, scale_out: Tensor | None, scale_in: Tensor | None) -> Tensor:
    delta = numbers(signs)
    delta = delta if scale_out is None else delta * scale_out.double()[:, None]
    return delta if scale_in is None else delta * scale_in.double()


def least_squares(case: Drawn, parts: Tensor) -> Tensor:
    """The vector of least loss, by a design matrix over all outputs; `parts`: each entry's delta, ``[k, out, in]``."""
    outputs = torch.einsum("ni,koi->nok", case.x, parts).reshape(-1, len(parts))
    solution: Tensor = torch.linalg.lstsq(outputs, case.residual.reshape(-1, 1)).solution
    return solution[:, 0]


def per_row(delta: Tensor) -> Tensor:  # [out, out, in]
    return torch.eye(len(delta), dtype=delta.dtype)[:, :, None] * delta


def per_column(delta: Tensor) -> Tensor:  # [in, out, in]
    return torch.eye(delta.shape[1], dtype=delta.dtype)[:, None, :] * delta


def close(actual: Tensor | None, expected: Tensor, tolerance: float = 1e-4) -> bool:
    assert actual is not None
    return float((actual.double() - expected).norm()) <= tolerance * float(expected.norm())


def pull_of(case: Drawn, ridge: float) -> float:
    out_of_noise = NOISE * case.x.shape[1] / len(case.x)
    return (ridge + out_of_noise) * float(case.problem.gram.diagonal().double().mean())


def pulled_loss(
    case: Drawn, delta: Tensor, ridge: float
) -> Tensor:  # [..., out] float64, of delta [..., out, in]
    """What signs are chosen by: each row's loss and its pull toward the true delta."""
    lost = (case.residual - case.x @ delta.mT).square().sum(-2)
    return lost + pull_of(case, ridge) * (delta - case.problem.delta).square().sum(-1)


@pytest.mark.parametrize("shape", SHAPES)
def test_scales_per_row_are_least_squares(shape: tuple[int, int]) -> None:
    case = drawn(*shape)
    signs = case.problem.delta > 0
    scale_out, scale_in = solve_scales(case.problem, signs, "out")
    assert scale_in is None
    assert close(scale_out, least_squares(case, per_row(numbers(signs))))


@pytest.mark.parametrize("shape", SHAPES)
def test_scales_per_column_are_least_squares(shape: tuple[int, int]) -> None:
    case = drawn(*shape)
    signs = case.problem.delta > 0
    scale_out, scale_in = solve_scales(case.problem, signs, "in")
    assert scale_out is None
    assert close(scale_in, least_squares(case, per_column(numbers(signs))))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_scalar_is_least_squares(shape: tuple[int, int]) -> None:
    case = drawn(*shape)
    signs = case.problem.delta > 0
    scale_out, scale_in = solve_scales(case.problem, signs, "scalar")
    assert scale_in is None
    assert close(scale_out, least_squares(case, numbers(signs)[None]))


@pytest.mark.parametrize("shape", SHAPES)
def test_one_alternation_is_two_least_squares_one_after_the_other(shape: tuple[int, int]) -> None:
    case = drawn(*shape)
    signs = numbers(case.problem.delta > 0)
    first_out = least_squares(case, per_row(signs))
    then_in = least_squares(case, per_column(signs * first_out[:, None]))
    then_out = least_squares(case, per_row(signs * then_in))
    scales = solve_scales(case.problem, case.problem.delta > 0, "both", rounds=1)
    assert close(dense(case.problem.delta > 0, *scales), signs * then_out[:, None] * then_in)


def test_every_alternation_lowers_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve_module, "CONVERGED", 0)
    case = drawn(9, 12)
    signs = case.problem.delta > 0
    by_rounds = [solve_scales(case.problem, signs, "both", rounds) for rounds in range(9)]
    losses = [case.lost(dense(signs, *scales)) for scales in by_rounds]
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in itertools.pairwise(losses))
    assert losses[8] < 0.95 * losses[0]


def test_alternation_stops_within_a_thousandth_of_where_it_would_end(monkeypatch: pytest.MonkeyPatch) -> None:
    case = drawn(40, 30)
    stopped = solve(case.problem, "both", sign_rounds=0).loss
    monkeypatch.setattr(solve_module, "CONVERGED", 0)
    signs = case.problem.delta > 0
    ended = dense(signs, *solve_scales(case.problem, signs, "both", rounds=60))
    assert stopped == pytest.approx(solve_module.layer_loss(case.problem, ended.float()), rel=1e-3)


def test_both_scales_lose_no_more_than_either_alone() -> None:
    case = drawn(16, 12)
    lost = {axis: solve(case.problem, axis, sign_rounds=0).loss for axis in AXES}
    assert lost["both"] < min(lost["out"], lost["in"])
    assert max(lost["out"], lost["in"]) < lost["scalar"]


def test_alternation_goes_on_from_where_it_is_told_to_start() -> None:
    case = drawn(9, 12)
    signs = case.problem.delta > 0
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
    _, scale_in = solve_scales(case.problem, case.problem.delta > 0, "in")
    assert scale_in is not None
    assert float(scale_in[2]) == pytest.approx(float(case.problem.delta[:, 2].abs().mean()), rel=1e-4)


def test_signs_that_point_away_from_the_target_get_negative_scales() -> None:
    case = drawn(4, 6)
    solved = solve_scales(case.problem, case.problem.delta < 0, "out")[0]
    assert solved is not None
    assert bool((solved < 0).all())


@pytest.mark.parametrize("axis", AXES)
def test_a_row_without_difference_and_target_is_scaled_to_zero(axis: Axis) -> None:
    case = drawn(4, 6)
    problem = case.problem
    problem.delta[1] = problem.cross[1] = 0
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
    assert solve_module.layer_loss(case.problem, delta.float()) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("axis", AXES)
def test_the_loss_that_solve_reports_is_that_of_its_delta(axis: Axis) -> None:
    case = drawn(8, 13)
    solved = solve(case.problem, axis)
    delta = dense(solved.signs, solved.scale_out, solved.scale_in)
    assert solve_module.layer_loss(case.problem, delta.float()) == pytest.approx(solved.loss, rel=1e-5)


def feedback_oracle(case: Drawn, levels: Tensor, ridge: float) -> Tensor:
    """GPTQ as published, one column after another in float64; True where a level is taken with its own sign."""
    pull = pull_of(case, ridge)
    gram = case.problem.gram.double() + pull * torch.eye(levels.shape[1])
    order = gram.diagonal().argsort(descending=True)
    inverse = torch.linalg.inv(gram)
    target = (case.problem.cross.double() + pull * case.problem.delta.double()) @ inverse
    work = target[:, order]
    upper = torch.linalg.cholesky(inverse[order][:, order], upper=True)
    signs = torch.empty_like(levels, dtype=torch.bool)
    for k, column in enumerate(order):
        level = levels[:, column]
        signs[:, column] = (work[:, k] - level).abs() < (work[:, k] + level).abs()
        taken = torch.where(signs[:, column], level, -level)
        work[:, k:] -= torch.outer((work[:, k] - taken) / upper[k, k], upper[k, k:])
    return signs


@pytest.mark.parametrize("width", [5, 63, 64, 65, 200])
@pytest.mark.parametrize("ridge", [0.01, 0.3])
def test_error_feedback_is_that_of_the_textbook_at_any_width(width: int, ridge: float) -> None:
    case = drawn(7, width)
    down, across = normal(1, 7).float(), normal(2, width).float()  # negative ones, too
    refined = refine_signs(case.problem, case.problem.delta > 0, down, across, ridge)
    assert torch.equal(refined, feedback_oracle(case, torch.outer(down, across).double(), ridge))


def test_on_inputs_without_correlation_refined_signs_are_the_deltas_own() -> None:
    delta = normal(0, 9, 20).float()
    problem = Problem(delta, 50 * torch.eye(20), 50 * delta, 50)
    start = normal(1, 9, 20) > 0
    for choose in (refine_signs, descend_signs):
        assert torch.equal(choose(problem, start, torch.full((9,), 0.5), None), delta > 0)


@pytest.mark.parametrize("axis", AXES)
def test_on_correlated_inputs_refined_signs_lose_far_less(axis: Axis) -> None:
    case = drawn(32, 48)
    plain, refined = (solve(case.problem, axis, sign_rounds=rounds).loss for rounds in (0, 2))
    constant = float(case.residual.square().sum())
    assert constant + refined < 0.6 * (constant + plain)


def test_refined_signs_lose_less_on_other_inputs_too_however_few_they_were_made_from() -> None:
    for rows in (40, 400):
        few, many = drawn(32, 48, rows=rows), drawn(32, 48, rows=4000)
        cross = few.problem.delta @ many.problem.gram
        held_out = replace(many.problem, delta=few.problem.delta, cross=cross)
        plain, refined = (solve(few.problem, "both", sign_rounds=rounds) for rounds in (0, 2))
        lost = [
            solve_module.layer_loss(held_out, dense(s.signs, s.scale_out, s.scale_in).float())
            for s in (plain, refined)
        ]
        assert lost[1] < lost[0]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("width", [2, 5, 8])
def test_signs_come_near_the_best_of_all_signs_and_never_beat_them(width: int, seed: int) -> None:
    case = drawn(6, width, seed=seed, rows=40)
    case.problem.delta[0, 0] = case.problem.delta[3, 1] = 0
    signs = case.problem.delta > 0
    scale_out, scale_in = solve_scales(case.problem, signs, "both")
    refined = refine_signs(case.problem, signs, scale_out, scale_in)
    refined = descend_signs(case.problem, refined, scale_out, scale_in)
    choices = torch.tensor(list(itertools.product([True, False], repeat=width)))[:, None, :].expand(-1, 6, -1)
    every = pulled_loss(case, dense(choices, scale_out, scale_in), 0.05)
    best, found = every.min(0).values, pulled_loss(case, dense(refined, scale_out, scale_in), 0.05)
    assert bool((found >= best * (1 - 1e-6)).all())
    assert float(found.sum()) <= 1.5 * float(best.sum())


def test_single_flips_end_lower_than_error_feedback_alone() -> None:
    case = drawn(20, 70)
    signs = case.problem.delta > 0
    scales = solve_scales(case.problem, signs, "both")
    refined = refine_signs(case.problem, signs, *scales)
    descended = descend_signs(case.problem, refined, *scales)
    before, after = (pulled_loss(case, dense(s, *scales), 0.05) for s in (refined, descended))
    assert bool((after <= before * (1 + 1e-6)).all())
    assert float(after.sum()) < 0.99 * float(before.sum())


def test_enough_sweeps_leave_no_single_flip_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve_module, "SWEEPS", 30)
    case = drawn(5, 67)
    signs = case.problem.delta > 0
    scale_out, _ = solve_scales(case.problem, signs, "out")
    found = descend_signs(case.problem, signs, scale_out, None)
    lost = pulled_loss(case, dense(found, scale_out, None), RIDGE)
    flipped = found ^ torch.eye(67, dtype=torch.bool)[:, None, :]  # [67, out, in]
    assert bool((pulled_loss(case, dense(flipped, scale_out, None), RIDGE) >= lost * (1 - 1e-6)).all())


def test_under_a_scale_of_zero_signs_stay_as_they_were() -> None:
    case = drawn(5, 9)
    signs = normal(1, 5, 9) > 0
    down, across = torch.ones(5), torch.ones(9)
    down[2] = across[4] = 0
    for choose in (refine_signs, descend_signs):
        chosen = choose(case.problem, signs, down, across)
        assert torch.equal(chosen[2], signs[2])
        assert torch.equal(chosen[:, 4], signs[:, 4])
        assert not torch.equal(chosen, signs)


def test_signs_that_nothing_decides_stay_as_they_were() -> None:
    problem = Problem(torch.zeros(4, 6), torch.eye(6), torch.zeros(4, 6), 9)
    signs = normal(1, 4, 6) > 0
    assert torch.equal(refine_signs(problem, signs, torch.ones(4), None), signs)


def test_the_first_round_of_signs_is_feedback_and_then_flips() -> None:
    case = drawn(20, 30)
    own = case.problem.delta > 0
    scales = solve_scales(case.problem, own, "both")
    expected = descend_signs(case.problem, refine_signs(case.problem, own, *scales), *scales)
    assert torch.equal(solve(case.problem, "both", sign_rounds=1).signs, expected)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 12), st.integers(0, 2**20), st.sampled_from(AXES))
@settings(max_examples=60, deadline=None)
def test_no_problem_is_solved_worse_than_by_its_own_signs(
    out_features: int, in_features: int, rows: int, seed: int, axis: Axis
) -> None:
    """H is singular where rows are fewer than inputs, and half of the differences are zero."""
    x, residual = normal(seed, rows, in_features), normal(seed + 1, rows, out_features)
    delta = normal(seed + 2, out_features, in_features).clamp(min=0).float()
    problem = Problem(delta, (x.T @ x).float(), (residual.T @ x).float(), rows)
    plain, solved = solve(problem, axis, sign_rounds=0), solve(problem, axis, sign_rounds=2, ridge=0)
    assert solved.loss <= plain.loss
    scales = [scale for scale in (solved.scale_out, solved.scale_in) if scale is not None]
    assert all(bool(scale.isfinite().all()) for scale in scales)


def test_a_gram_that_rounding_made_indefinite_is_solved_all_the_same() -> None:
    case = drawn(4, 30, rows=3)
    case.problem.gram.diagonal().sub_(0.02 * case.problem.gram.diagonal().mean())
    assert float(torch.linalg.eigvalsh(case.problem.gram)[0]) < 0
    solved = solve(replace(case.problem, count=10**6), "in", ridge=0)
    assert solved.scale_in is not None
    assert bool(solved.scale_in.isfinite().all())


@pytest.mark.parametrize("axis", AXES)
def test_row_chunks_change_nothing(axis: Axis, monkeypatch: pytest.MonkeyPatch) -> None:
    case = drawn(11, 14)
    whole = solve(case.problem, axis)
    monkeypatch.setattr(solve_module, "CHUNK_WEIGHTS", 3 * 14)
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
    minute = replace(case.problem, delta=case.problem.delta * 2**-40, cross=case.problem.cross * 2**-40)
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
    monkeypatch.setattr(solve_module, "FLOAT64_INPUTS", 0)
    assert torch.equal(solve(case.problem, "both").signs, wide.signs)
