"""The plan of a run: what the command prints, and refusals where memory is too small."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compressor import planning
from compressor.config import Calibration, CompressConfig, FitSettings
from compressor.decoder import sampling
from compressor.pipeline import compress, plan
from deltastore.checkpoint import Checkpoint
from deltastore.errors import MemoryTooSmall
from peraxis.cli import run
from tests.compressor.helpers.model_shapes import QWEN_1B5, shapes_of
from tests.helpers.tiny_models import Change, TinyModels, make_pair

DEFAULT = FitSettings(Calibration("self", 256))


@pytest.fixture
def models(tmp_path: Path) -> TinyModels:
    return make_pair("llama", tmp_path, changes=(Change(noise=0.2),))


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
def test_the_command_prints_a_plan_whose_parts_make_up_its_stages(
    calibration: str, models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--base", models.base, "--finetune", models.finetunes[0], "--out", tmp_path / "delta"]
    asked = ["compress", *map(str, files), "--calibration", calibration, "--device", "cpu", "--plan"]
    assert run([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    sums = [sum(part["bytes"] for part in stage["parts"]) for stage in told["stages"]]
    assert [stage["host_bytes"] for stage in told["stages"]] == sums
    assert told["memory"]["host"]["bytes"] == max(sums)
    assert told["seconds"] == pytest.approx(sum(stage["seconds"] for stage in told["stages"]), abs=0.5)
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
    return plan(changed).peak("host", least=True)


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
    monkeypatch.setattr(planning, "shapes_of", lambda *args: big)
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
