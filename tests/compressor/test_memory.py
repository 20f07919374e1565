"""Bounds on the memory of a run: measured, printed by the command, and refusals where memory is too small."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.compress import SMALL, measure
from bench.synthetic import LlamaShapes
from compressor import memory
from compressor.config import Calibration, CompressConfig, FitSettings
from compressor.decoder import sampling
from compressor.fit.fit import recipe_of
from compressor.memory import FitBounds, StageBound
from compressor.pipeline import compress, plan
from deltastore.checkpoint import Checkpoint
from deltastore.errors import MemoryTooSmall
from peraxis.cli import run
from tests.compressor.helpers.model_shapes import LLAMA_8B, QWEN_1B5, shapes_of
from tests.helpers.tiny_models import Change, TinyModels, make_pair

DEFAULT = FitSettings(Calibration("self", 256))
GB = 10**9


@pytest.fixture
def models(tmp_path: Path) -> TinyModels:
    return make_pair("llama", tmp_path, changes=(Change(noise=0.2),))


@pytest.mark.deploy
def test_the_memory_that_a_fit_takes_is_below_its_bound_and_above_half_of_it(tmp_path: Path) -> None:
    figure = measure(SMALL[0], "both", True, tmp_path)
    assert figure["bound_bytes"] / 2 < figure["peak_growth_bytes"] < figure["bound_bytes"]


def stages_of(shapes: LlamaShapes, *, is_cpu: bool, free: int) -> list[StageBound]:
    kinds = {"host": free} if is_cpu else {"host": 1 << 40, "device": free}
    return list(FitBounds(shapes_of(shapes), DEFAULT, recipe_of(DEFAULT, "both"), is_cpu, kinds).stages())


def test_a_model_of_a_billion_and_a_half_fits_24_gb_of_host_memory_and_learns_signs() -> None:
    assert max(stage.host for stage in stages_of(QWEN_1B5, is_cpu=True, free=24 * GB)) <= 24 * GB


def test_a_model_of_eight_billion_fits_a_gpu_of_24_gb_with_its_latents_in_host_memory() -> None:
    stages = stages_of(LLAMA_8B, is_cpu=False, free=24 * GB)
    assert max(stage.device for stage in stages) <= 24 * GB
    assert max(stage.host for stage in stages) > 2 * 8 * GB


def test_signs_that_learn_take_two_bytes_each_and_nothing_else_grows_as_fast() -> None:
    grown = replace(QWEN_1B5, num_layers=2 * QWEN_1B5.num_layers)
    few, many = (
        next(stage for stage in stages_of(shapes, is_cpu=True, free=24 * GB) if stage.name == "distilling")
        for shapes in (QWEN_1B5, grown)
    )
    more = shapes_of(grown).num_coded - shapes_of(QWEN_1B5).num_coded
    assert 2 * more < many.host - few.host < 3 * more


def test_a_plan_reads_no_weights_and_writes_nothing(
    models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "read", lambda *args: pytest.fail("weights were read"))
    before = sorted(tmp_path.rglob("*"))
    config = CompressConfig(
        str(models.base), str(models.finetunes[0]), tmp_path / "delta", fit_settings=DEFAULT
    )
    needs = plan(config)
    assert needs.peak("host") > 0
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("calibration", ["self", "none"])
def test_the_command_prints_a_plan_of_every_stage(
    calibration: str, models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--base", models.base, "--finetune", models.finetunes[0], "--out", tmp_path / "delta"]
    asked = ["compress", *map(str, files), "--calibration", calibration, "--device", "cpu", "--plan"]
    assert run([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["memory"]["host"]["bytes"] == max(stage["host_bytes"] for stage in told["stages"])
    assert told["memory"]["host"]["free_bytes"] > 0
    assert told["disk"]["bytes"] > 0
    assert run(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("host memory: ")
    assert {stage["name"] for stage in told["stages"]} <= {line.split(":")[0] for line in lines}
    assert not (tmp_path / "delta").exists()


def refusals(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "free_bytes", lambda device: free)


@pytest.fixture
def config(models: TinyModels, tmp_path: Path) -> CompressConfig:
    fit_settings = FitSettings(Calibration("self", 4096), device="cpu")
    return CompressConfig(
        str(models.base), str(models.finetunes[0]), tmp_path / "delta", fit_settings=fit_settings
    )


def least(config: CompressConfig, **changes: Any) -> int:
    assert config.fit_settings is not None
    changed = replace(config, fit_settings=replace(config.fit_settings, **changes))
    return plan(changed).peak("host")


def test_too_little_memory_is_refused_at_once_with_what_is_missing_and_what_needs_less(
    config: CompressConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, half = least(config), least(config, calibration=Calibration("self", 2048))
    assert half < whole
    monkeypatch.setattr(Checkpoint, "read", lambda *args: pytest.fail("weights were read"))
    refusals((whole + half) // 2, monkeypatch)
    with pytest.raises(MemoryTooSmall, match=r"needs about .* free, .* too little: give `samples=2048`$"):
        compress(config)
    refusals(1 << 20, monkeypatch)
    with pytest.raises(MemoryTooSmall, match="give `text='none'`"):
        compress(config)
    assert not config.out.exists()


def test_learning_signs_is_given_up_where_less_text_does_not_help(
    config: CompressConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = shapes_of(QWEN_1B5)
    monkeypatch.setattr(memory, "shapes_of", lambda *args: big)
    fewest = Calibration("self", 32)
    with_signs, without = (
        least(config, calibration=fewest),
        least(config, calibration=fewest, learn_signs=False),
    )
    assert without < with_signs
    refusals((without + with_signs) // 2, monkeypatch)
    with pytest.raises(MemoryTooSmall, match="give `learn_signs=False`"):
        compress(config)


def test_memory_that_suffices_is_not_refused(config: CompressConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.fit_settings is not None
    small = replace(config, fit_settings=replace(config.fit_settings, calibration=Calibration("self", 8, 16)))
    refusals(least(small) + 1, monkeypatch)
    compress(small)
    assert small.out.exists()
