"""Calibrated deltas, through the pipeline: nearer the fine-tune than weights alone, and described in the artifact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from compressor.config import Calibration, CompressConfig, FitSettings, Method
from compressor.convert.merge import MergeConfig, merge
from compressor.pipeline import compress
from deltastore.errors import UsageError
from deltastore.format.artifact import Artifact
from tests.helpers.tiny_models import Change, make_pair

SELF = FitSettings(Calibration("self", samples=64, length=48, seed=0), distill_epochs=0)


def kl_to_the_finetune(base: Path, finetune: Path, delta: Path, out: Path) -> float:
    """Mean KL divergence of next-token distributions on fixed random text, fine-tune to merged delta."""
    merge(MergeConfig(str(base), delta, out, "float32"))
    ids = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(9))
    teacher, student = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (finetune, out)
    )
    with torch.inference_mode():
        target, got = (model(input_ids=ids).logits.log_softmax(-1) for model in (teacher, student))
    return float((target.exp() * (target - got)).sum(-1).mean())


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
@pytest.mark.parametrize("method", ["per-axis", "both"])
def test_calibration_brings_a_delta_nearer_its_finetune(
    architecture: str, method: Method, tmp_path: Path
) -> None:
    models = make_pair(architecture, tmp_path, seed=7, changes=(Change(added_tokens=2, noise=0.2),))
    distances = {}
    for name, calibration in (("weights", None), ("calibrated", SELF)):
        out = tmp_path / f"{name}.safetensors"
        config = CompressConfig(
            str(models.base), str(models.finetunes[0]), out, method=method, fit_settings=calibration
        )
        compress(config)
        distances[name] = kl_to_the_finetune(models.base, models.finetunes[0], out, tmp_path / name)
    assert distances["calibrated"] < 0.9 * distances["weights"]


def test_an_artifact_says_what_it_was_calibrated_on(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, seed=8)
    text = tmp_path / "private" / "corpus.txt"
    text.parent.mkdir()
    text.write_text("some words of a domain " * 400)
    out = tmp_path / "d.safetensors"
    fit_settings = FitSettings(Calibration(str(text), samples=20, length=32), distill_epochs=0)
    compress(CompressConfig(str(models.base), str(models.finetunes[0]), out, fit_settings=fit_settings))
    with Artifact.open(out) as artifact:
        settings = artifact.manifest.compressor["settings"]
    assert settings["calibration"] == {"source": "corpus.txt", "samples": 20, "length": 32, "seed": 0}
    assert settings["refine_signs"] is True


def test_text_that_is_too_short_leaves_nothing_behind(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, seed=8)
    text = tmp_path / "short.txt"
    text.write_text("short")
    out = tmp_path / "out" / "d.safetensors"
    out.parent.mkdir()
    config = CompressConfig(
        str(models.base),
        str(models.finetunes[0]),
        out,
        fit_settings=FitSettings(Calibration(str(text), 20, 32)),
    )
    with pytest.raises(UsageError, match=r"short\.txt"):
        compress(config)
    assert list(out.parent.iterdir()) == []
