"""The paper's layer stage against AdamW and losses written out in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compressor.fit.paper import (
    ActivationCache,
    FrozenLayer,
    LayerCaches,
    PaperAxis,
    ScaleTrainingSettings,
    choose_axis,
    initial_scale,
    layer_error,
    train_scales,
)
from compressor.fit.problem import Problem
from compressor.fit.solve import solve_scales
from tests.compressor.helpers.fitting import normal
from tests.compressor.helpers.paper_oracle import coded, squared_error, trained_scales

PAPER_AXES: tuple[PaperAxis, ...] = ("scalar", "out", "in")


def layer_and_cache(
    out: Tensor, into: Tensor, rows: int = 60, seed: int = 0
) -> tuple[FrozenLayer, Tensor, ActivationCache]:
    """A layer whose delta is of size ``out_i in_j``, that delta, and a cache of it."""
    base = normal(seed, len(out), len(into))
    delta = normal(seed + 1, len(out), len(into)) * out[:, None] * into
    x = normal(seed + 2, rows, len(into)).bfloat16()
    y = (x.float() @ (base + delta).T).bfloat16()
    return FrozenLayer(base, delta > 0), delta, ActivationCache(x, y)


def even(size: int) -> Tensor:
    return torch.full((size,), 0.3)


def uneven(size: int) -> Tensor:
    return 0.3 * torch.logspace(-1, 1, size)


@pytest.mark.parametrize("axis", PAPER_AXES)
def test_scales_begin_as_the_mean_magnitude_over_what_shares_them(axis: PaperAxis) -> None:
    delta = torch.tensor([[1.0, -2.0, 3.0], [0.0, 4.0, -2.0]])
    expected = {"scalar": [2.0], "out": [2.0, 2.0], "in": [0.5, 3.0, 2.5]}
    assert initial_scale(delta, axis).tolist() == expected[axis]


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("axis", PAPER_AXES)
def test_steps_are_those_of_adamw_in_float64(axis: PaperAxis, cosine: bool) -> None:
    layer, delta, cache = layer_and_cache(uneven(5), uneven(7))
    init = initial_scale(delta, axis)
    for settings in (
        ScaleTrainingSettings(30, epochs=1, lr=0.01, cosine=cosine),
        ScaleTrainingSettings(25, epochs=2, lr=0.01, cosine=cosine),
    ):
        trained = train_scales(layer, init, axis, cache, settings)
        expected = trained_scales(layer, init, axis, cache, settings)
        moved = expected - init.double()
        assert float((trained.double() - expected).norm()) < 1e-3 * float(moved.norm())


def test_the_papers_budget_is_five_epochs_at_a_ten_thousandth() -> None:
    assert ScaleTrainingSettings(1) == ScaleTrainingSettings(1, epochs=5, lr=1e-4, cosine=False, scalar=False)


@pytest.mark.parametrize("axis", PAPER_AXES)
def test_enough_steps_end_at_the_closed_form(axis: PaperAxis) -> None:
    layer, delta, cache = layer_and_cache(uneven(6), uneven(9))
    x, base = cache.x.float(), layer.base
    residual = cache.y.float() - x @ base.T
    problem = Problem(delta, x.T @ x, residual.T @ x, len(x))
    scale_out, scale_in = solve_scales(problem, layer.signs, axis)
    solved = scale_in if axis == "in" else scale_out
    assert solved is not None
    settings = ScaleTrainingSettings(len(x), epochs=800, lr=0.05, cosine=True)
    trained = train_scales(layer, initial_scale(delta, axis), axis, cache, settings)
    assert float((trained - solved).norm()) < 5e-3 * float(solved.norm())


@pytest.mark.parametrize("axis", PAPER_AXES)
def test_training_leaves_its_start_and_the_layer_as_they_were(axis: PaperAxis) -> None:
    layer, delta, cache = layer_and_cache(uneven(4), even(6))
    init, base = initial_scale(delta, axis), layer.base.clone()
    kept = init.clone()
    trained = train_scales(layer, init, axis, cache, ScaleTrainingSettings(16))
    assert torch.equal(init, kept)
    assert torch.equal(layer.base, base)
    assert not trained.requires_grad
    assert not torch.equal(trained, init)


def test_scales_train_in_float32_whatever_they_and_the_base_come_in() -> None:
    layer, delta, cache = layer_and_cache(uneven(4), even(6))
    narrow = replace(layer, base=layer.base.bfloat16())
    init = initial_scale(delta, "out").half()
    settings = ScaleTrainingSettings(16, lr=1e-5)
    trained = train_scales(narrow, init, "out", cache, settings)
    widened = replace(layer, base=narrow.base.float())
    assert trained.dtype == torch.float32
    assert torch.equal(trained, train_scales(widened, init.float(), "out", cache, settings))
    assert not torch.equal(trained, init.float())  # steps of 1e-5 that FP16 could not hold


def test_scales_train_where_gradients_are_off_around_them() -> None:
    layer, delta, cache = layer_and_cache(uneven(4), even(6))
    init = initial_scale(delta, "out")
    with torch.no_grad():
        trained = train_scales(layer, init, "out", cache, ScaleTrainingSettings(16))
    assert torch.equal(trained, train_scales(layer, init, "out", cache, ScaleTrainingSettings(16)))


@pytest.mark.parametrize("axis", PAPER_AXES)
@pytest.mark.parametrize("batch_rows", [1, 7, 1000])
def test_the_held_out_loss_is_the_mean_over_all_outputs(axis: PaperAxis, batch_rows: int) -> None:
    layer, delta, cache = layer_and_cache(uneven(5), uneven(7), rows=23)
    scale = initial_scale(delta, axis)
    expected = float(squared_error(layer, scale.double(), axis, cache.x, cache.y))
    assert layer_error(layer, scale, axis, cache, batch_rows) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("out", "into", "expected"), [(uneven(12), even(10), "out"), (even(12), uneven(10), "in")]
)
def test_the_axis_along_which_the_delta_varies_is_chosen(out: Tensor, into: Tensor, expected: str) -> None:
    layer, delta, train = layer_and_cache(out, into)
    _, _, validation = layer_and_cache(out, into, rows=40)
    choice = choose_axis(layer, delta, LayerCaches(train, validation), ScaleTrainingSettings(20))
    assert choice.axis == expected
    assert choice.losses[choice.axis] == min(choice.losses.values())
    assert set(choice.losses) == {"in", "out"}


def test_held_out_rows_choose_whatever_the_training_rows_prefer() -> None:
    layer, delta, train = layer_and_cache(uneven(12), even(10))
    x = normal(9, 50, 10).bfloat16()
    made = coded(layer.signs, initial_scale(delta, "in"), "in").float()
    validation = ActivationCache(x, (x.float() @ (layer.base + made).T).bfloat16())
    settings = ScaleTrainingSettings(20, lr=1e-6)
    assert choose_axis(layer, delta, LayerCaches(train, train), settings).axis == "out"
    choice = choose_axis(layer, delta, LayerCaches(train, validation), settings)
    assert choice.axis == "in"
    for axis, loss in choice.losses.items():
        scale = train_scales(layer, initial_scale(delta, axis), axis, train, settings).double()
        assert loss == pytest.approx(float(squared_error(layer, scale, axis, x, validation.y)), rel=1e-4)


def test_the_scale_returned_is_the_chosen_axis_trained() -> None:
    layer, delta, cache = layer_and_cache(uneven(12), even(10))
    choice = choose_axis(layer, delta, LayerCaches(cache, cache), ScaleTrainingSettings(20))
    expected = train_scales(layer, initial_scale(delta, "out"), "out", cache, ScaleTrainingSettings(20))
    assert torch.equal(choice.scale, expected)


def test_a_scalar_takes_part_only_when_asked_to() -> None:
    layer, delta, cache = layer_and_cache(even(12), even(10))
    caches = LayerCaches(cache, cache)
    assert set(choose_axis(layer, delta, caches, ScaleTrainingSettings(20)).losses) == {"in", "out"}
    prefers: dict[PaperAxis, float] = {"scalar": 0.0, "in": 1.0, "out": 2.0}
    choice = choose_axis(
        layer,
        delta,
        caches,
        ScaleTrainingSettings(20, scalar=True),
        lambda axis, scale: prefers[axis] + 0 * len(scale),
    )
    assert choice.axis == "scalar"
    assert choice.scale.shape == (1,)
    assert choice.losses == prefers


def test_an_end_loss_judges_each_trained_candidate_in_place_of_the_layer() -> None:
    layer, delta, cache = layer_and_cache(uneven(12), even(10))
    seen: dict[PaperAxis, Tensor] = {}

    def end_loss(axis: PaperAxis, scale: Tensor) -> float:
        seen[axis] = scale
        return {"in": 1.0, "out": 1.0}[axis]

    choice = choose_axis(layer, delta, LayerCaches(cache, cache), ScaleTrainingSettings(20), end_loss)
    assert choice.axis == "in"  # of equals, as in Algorithm 6
    for axis, scale in seen.items():
        assert torch.equal(
            scale, train_scales(layer, initial_scale(delta, axis), axis, cache, ScaleTrainingSettings(20))
        )
    assert len(seen) == 2


@pytest.mark.parametrize("shape", [(1, 6), (6, 1), (1, 1)])
@pytest.mark.parametrize("axis", PAPER_AXES)
def test_a_single_row_or_column_trains(axis: PaperAxis, shape: tuple[int, int]) -> None:
    layer, delta, cache = layer_and_cache(even(shape[0]), even(shape[1]), rows=3)
    start = torch.zeros_like(initial_scale(delta, axis))
    trained = train_scales(layer, start, axis, cache, ScaleTrainingSettings(2, epochs=40, lr=0.01))
    assert trained.shape == start.shape
    before, after = (layer_error(layer, scale, axis, cache, 2) for scale in (start, trained))
    assert after < before
