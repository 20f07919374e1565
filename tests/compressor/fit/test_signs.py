"""Signs against GPTQ's published error feedback, and against all signs of small matrices."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from compressor.fit import signs as signs_module
from compressor.fit.problem import Problem
from compressor.fit.signs import SIGN_RIDGE, descend_signs, refine_signs
from compressor.fit.solve import solve_scales
from tests.compressor.helpers.layer_problems import Drawn, dense, drawn, normal, ridge_loss, ridge_of


def feedback_oracle(case: Drawn, magnitudes: Tensor, ridge_part: float) -> Tensor:
    """GPTQ as published, one column after another in float64; True where a magnitude is taken with its own sign."""
    ridge = ridge_of(case, ridge_part)
    gram = case.problem.gram.double() + ridge * torch.eye(magnitudes.shape[1])
    order = gram.diagonal().argsort(descending=True)
    inverse = torch.linalg.inv(gram)
    target = (case.problem.cross.double() + ridge * case.problem.difference.double()) @ inverse
    work = target[:, order]
    upper = torch.linalg.cholesky(inverse[order][:, order], upper=True)
    signs = torch.empty_like(magnitudes, dtype=torch.bool)
    for k, column in enumerate(order):
        magnitude = magnitudes[:, column]
        signs[:, column] = (work[:, k] - magnitude).abs() < (work[:, k] + magnitude).abs()
        taken = torch.where(signs[:, column], magnitude, -magnitude)
        work[:, k:] -= torch.outer((work[:, k] - taken) / upper[k, k], upper[k, k:])
    return signs


@pytest.mark.parametrize("width", [5, 63, 64, 65, 200])
@pytest.mark.parametrize("ridge_part", [0.01, 0.3])
def test_error_feedback_is_that_of_the_textbook_at_any_width(width: int, ridge_part: float) -> None:
    case = drawn(7, width)
    scale_out, scale_in = normal(1, 7).float(), normal(2, width).float()  # negative ones, too
    refined = refine_signs(case.problem, case.problem.difference > 0, scale_out, scale_in, ridge_part)
    assert torch.equal(refined, feedback_oracle(case, torch.outer(scale_out, scale_in).double(), ridge_part))


def test_on_inputs_without_correlation_refined_signs_are_the_deltas_own() -> None:
    delta = normal(0, 9, 20).float()
    problem = Problem(delta, 50 * torch.eye(20), 50 * delta, 50)
    start = normal(1, 9, 20) > 0
    for choose in (refine_signs, descend_signs):
        assert torch.equal(choose(problem, start, torch.full((9,), 0.5), None), delta > 0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("width", [2, 5, 8])
def test_signs_come_near_the_best_of_all_signs_and_never_beat_them(width: int, seed: int) -> None:
    case = drawn(6, width, seed=seed, rows=40)
    case.problem.difference[0, 0] = case.problem.difference[3, 1] = 0
    signs = case.problem.difference > 0
    scale_out, scale_in = solve_scales(case.problem, signs, "both")
    refined = refine_signs(case.problem, signs, scale_out, scale_in)
    refined = descend_signs(case.problem, refined, scale_out, scale_in)
    choices = torch.tensor(list(itertools.product([True, False], repeat=width)))[:, None, :].expand(-1, 6, -1)
    every = ridge_loss(case, dense(choices, scale_out, scale_in), 0.05)
    best, found = every.min(0).values, ridge_loss(case, dense(refined, scale_out, scale_in), 0.05)
    assert bool((found >= best * (1 - 1e-6)).all())
    assert float(found.sum()) <= 1.5 * float(best.sum())


def test_single_flips_end_lower_than_error_feedback_alone() -> None:
    case = drawn(20, 70)
    signs = case.problem.difference > 0
    scales = solve_scales(case.problem, signs, "both")
    refined = refine_signs(case.problem, signs, *scales)
    descended = descend_signs(case.problem, refined, *scales)
    before, after = (ridge_loss(case, dense(s, *scales), 0.05) for s in (refined, descended))
    assert bool((after <= before * (1 + 1e-6)).all())
    assert float(after.sum()) < 0.99 * float(before.sum())


def test_enough_sweeps_leave_no_single_flip_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs_module, "SWEEPS", 30)
    case = drawn(5, 67)
    signs = case.problem.difference > 0
    scale_out, _ = solve_scales(case.problem, signs, "out")
    found = descend_signs(case.problem, signs, scale_out, None)
    lost = ridge_loss(case, dense(found, scale_out, None), SIGN_RIDGE)
    flipped = found ^ torch.eye(67, dtype=torch.bool)[:, None, :]  # [67, out, in]
    assert bool((ridge_loss(case, dense(flipped, scale_out, None), SIGN_RIDGE) >= lost * (1 - 1e-6)).all())


def test_under_a_scale_of_zero_signs_stay_as_they_were() -> None:
    case = drawn(5, 9)
    signs = normal(1, 5, 9) > 0
    scale_out, scale_in = torch.ones(5), torch.ones(9)
    scale_out[2] = scale_in[4] = 0
    for choose in (refine_signs, descend_signs):
        chosen = choose(case.problem, signs, scale_out, scale_in)
        assert torch.equal(chosen[2], signs[2])
        assert torch.equal(chosen[:, 4], signs[:, 4])
        assert not torch.equal(chosen, signs)


def test_signs_that_nothing_decides_stay_as_they_were() -> None:
    problem = Problem(torch.zeros(4, 6), torch.eye(6), torch.zeros(4, 6), 9)
    signs = normal(1, 4, 6) > 0
    assert torch.equal(refine_signs(problem, signs, torch.ones(4), None), signs)
