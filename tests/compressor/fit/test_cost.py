"""The predicted cost of a fit: against measured memory, and at sizes too large to run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.compress import SMALL, measure
from bench.synthetic import LlamaShapes
from compressor.config import Calibration, FitSettings
from compressor.fit.cost import FitCost
from compressor.fit.fit import recipe_of
from compressor.fit.shapes import StageCost
from tests.compressor.helpers.model_shapes import LLAMA_8B, QWEN_1B5, shapes_of

DEFAULT = FitSettings(Calibration("self", 256))
GB = 10**9


def stages_of(
    shapes: LlamaShapes, fit_settings: FitSettings = DEFAULT, *, is_cpu: bool, free: int
) -> list[StageCost]:
    recipe = recipe_of(fit_settings, "both")
    return list(FitCost(shapes_of(shapes), fit_settings, recipe, is_cpu, free).stages())


def peak(stages: list[StageCost], where: str) -> int:
    return max(stage.num_bytes(where, least=True) for stage in stages)


@pytest.mark.deploy
def test_the_memory_that_a_fit_takes_is_what_was_said_within_a_factor(tmp_path: Path) -> None:
    figure = measure(SMALL[0], "both", True, tmp_path)
    assert figure.growth_bytes / 1.5 < figure.predicted_bytes < 1.5 * figure.growth_bytes


def test_a_model_of_a_billion_and_a_half_fits_24_gb_of_host_memory_and_learns_signs() -> None:
    stages = stages_of(QWEN_1B5, is_cpu=True, free=24 * GB)
    assert peak(stages, "host") < 24 * GB
    assert any(part.what == "latents of signs" for stage in stages for part in stage.items)


def test_a_model_of_eight_billion_fits_a_gpu_of_24_gb_with_its_latents_in_host_memory() -> None:
    stages = stages_of(LLAMA_8B, is_cpu=False, free=24 * GB)
    assert peak(stages, "device") < 24 * GB
    assert peak(stages, "host") > 2 * 8 * GB


def test_signs_that_learn_take_two_bytes_each_and_nothing_else_grows_as_fast() -> None:
    grown = replace(QWEN_1B5, num_layers=2 * QWEN_1B5.num_layers)
    few, many = (
        next(stage for stage in stages_of(shapes, is_cpu=True, free=24 * GB) if stage.name == "distilling")
        for shapes in (QWEN_1B5, grown)
    )
    more = shapes_of(grown).num_coded - shapes_of(QWEN_1B5).num_coded
    assert 2 * more < many.num_bytes("host") - few.num_bytes("host") < 3 * more
