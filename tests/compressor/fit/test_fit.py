"""Deltas fitted to text, through the whole pipeline: their fidelity, its report, and refusals before any work."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from compressor.config import Calibration, CompressConfig, FitSettings
from compressor.decoder.decoder import Decoder
from compressor.decoder.weights import DeltaModel
from compressor.fidelity import fidelity
from compressor.fit import least_squares
from compressor.fit.calibration import calibration_text, split_text
from compressor.fit.fit import TextSplit, recipe_of
from compressor.pipeline import compress
from deltastore.checkpoint import Checkpoint
from deltastore.errors import CheckpointError, PeraxisError, UsageError
from deltastore.format.artifact import Artifact
from peraxis.cli import run
from tests.compressor.helpers.compressing import compressed, rewrite
from tests.compressor.helpers.decoders import CPU
from tests.helpers.tiny_models import Change, TinyModels, make_pair

SELF = Calibration("self", samples=20, length=16, seed=0)
OURS = FitSettings(SELF, distill_epochs=1)
UP, NORM, HEAD = "model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"
NOISY = (Change(noise=0.2),)
WIDE = 1 << 20  # input features for which layers take all the text that there is


def measured(models: TinyModels, delta: Path, calibration: Calibration) -> dict[str, float | int]:
    """Return the fidelity of an artifact on the text that nothing was fitted to."""
    teacher = Decoder(Checkpoint.open(models.finetunes[0]), CPU, torch.float32)
    _, _, test = split_text(calibration_text(calibration, teacher))
    with Artifact.open(delta) as artifact:
        student = Decoder(DeltaModel(Checkpoint.open(models.base), artifact), CPU, torch.float32)
        return fidelity(teacher, student, [torch.stack(test)]).as_json()


def unchanged(tensors: dict[str, Tensor], base: Path) -> None:
    """Give the first block the base's weights."""
    checkpoint = Checkpoint.open(base)
    tensors.update({name: checkpoint.read(name) for name in tensors if ".layers.0." in name})


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        ("llama", Change(noise=0.2, added_tokens=2)),
        ("qwen2", Change(noise=0.2, added_tokens=2)),
        ("qwen2", Change(noise=0.2, tied=False)),
        ("llama", Change(noise=0.2, tied=True)),
    ],
    ids=["untied", "tied", "untied by the fine-tune", "tied by the fine-tune"],
)
@pytest.mark.parametrize("budget", [1.0, 1.3])
def test_the_artifact_is_as_good_as_it_says(
    architecture: str, change: Change, budget: float, tmp_path: Path
) -> None:
    models = make_pair(architecture, tmp_path, seed=5, changes=(change,))
    fit_settings = FitSettings(SELF, distill_epochs=1, budget=budget)
    result = compressed(models, tmp_path / "delta", fit_settings=fit_settings)
    expected = measured(models, tmp_path / "delta", SELF)
    said = result.manifest.fidelity["held_out"]
    assert said.keys() == expected.keys()
    for name, value in said.items():
        assert value == pytest.approx(expected[name], rel=1e-3)
    assert said["kl"] < result.manifest.fidelity["base"]["kl"]


@pytest.mark.parametrize("recipe", ["ours", "paper"])
@pytest.mark.parametrize("method", ["scalar", "per-axis"])
def test_paper_and_bitdelta_are_as_good_as_they_say(recipe: Any, method: Any, tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, seed=5, changes=NOISY)
    fit_settings = FitSettings(SELF, recipe=recipe, distill_epochs=1)
    result = compressed(models, tmp_path / "delta", method=method, fit_settings=fit_settings)
    expected = measured(models, tmp_path / "delta", SELF)
    assert result.manifest.fidelity["held_out"] == pytest.approx(expected, rel=1e-3)
    axes = {spec.axis for spec in result.manifest.tensors.values() if spec.codec == "onebit"}
    assert axes == ({"scalar"} if method == "scalar" else {"out", "in"})


def test_matrices_that_the_finetune_left_alone_are_not_made_up_for(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, seed=5, changes=NOISY)
    rewrite(models.finetunes[0], lambda tensors: unchanged(tensors, models.base))
    result = compressed(models, tmp_path / "delta", fit_settings=OURS)
    assert not [name for name in result.manifest.tensors if ".layers.0." in name]
    assert result.manifest.fidelity["held_out"] == pytest.approx(
        measured(models, tmp_path / "delta", SELF), rel=1e-3
    )


@pytest.mark.parametrize("recipe", ["ours", "paper"])
def test_a_finetune_that_is_its_base_has_an_empty_delta(recipe: Any, tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, seed=5, changes=(Change(noise=0.0),))
    fit_settings = FitSettings(SELF, recipe=recipe, distill_epochs=1, budget=1.0)
    result = compressed(models, tmp_path / "delta", method="per-axis", fit_settings=fit_settings)
    assert result.manifest.tensors == {}
    assert result.manifest.fidelity["held_out"]["kl"] == 0


def test_only_norms_that_differ_need_no_fitting(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, seed=5, changes=(Change(noise=0.0),))
    rewrite(models.finetunes[0], lambda tensors: tensors[NORM].mul_(1.5))
    result = compressed(models, tmp_path / "delta", fit_settings=FitSettings(SELF, budget=1.5))
    assert result.manifest.tensors.keys() == {NORM}
    assert result.manifest.fidelity["held_out"]["kl"] == 0 < result.manifest.fidelity["base"]["kl"]


@pytest.mark.parametrize(
    ("method", "fit_settings"),
    [
        ("both", FitSettings(SELF, distill_epochs=2, budget=1.2)),
        ("per-axis", FitSettings(SELF, recipe="paper", distill_epochs=1)),
    ],
    ids=["ours", "paper"],
)
def test_the_same_inputs_give_the_same_bytes(method: Any, fit_settings: FitSettings, tmp_path: Path) -> None:
    models = make_pair("qwen2", tmp_path, seed=5, changes=NOISY)
    made = [
        compressed(models, tmp_path / name, method=method, fit_settings=fit_settings).digest for name in "ab"
    ]
    assert made[0] == made[1]


def test_distillation_brings_a_delta_nearer(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, seed=5, changes=NOISY)
    text = Calibration("self", samples=48, length=24)
    found = [
        compressed(models, tmp_path / f"{epochs}", fit_settings=FitSettings(text, distill_epochs=epochs))
        for epochs in (0, 3)
    ]
    none, some = (result.manifest.fidelity["held_out"]["kl"] for result in found)
    assert some < 0.99 * none


def test_ours_keeps_the_epoch_that_does_best_on_text_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = make_pair("llama", tmp_path, seed=5, changes=NOISY)
    digests = [compressed(models, tmp_path / "0", fit_settings=FitSettings(SELF, distill_epochs=0)).digest]
    monkeypatch.setattr(least_squares, "SCALE_RATE", 10.0)  # so that every step does harm
    wild = compressed(
        models, tmp_path / "wild", fit_settings=FitSettings(SELF, distill_epochs=2, learn_signs=False)
    )
    with Artifact.open(tmp_path / "0") as one, Artifact.open(tmp_path / "wild") as other:
        for name, spec in wild.manifest.tensors.items():
            if spec.codec == "onebit":
                assert torch.equal(one.onebit(name).dense(), other.onebit(name).dense())
    assert wild.digest not in digests  # because the manifest holds the settings


def test_the_paper_takes_other_text_for_its_layers_than_for_the_end() -> None:
    text = [torch.tensor([number]) for number in range(200)]
    paper = recipe_of(FitSettings(SELF, recipe="paper"), "per-axis")
    split = TextSplit.of(text, paper, widest=WIDE)
    parts = [
        [int(ids) for ids in part]
        for part in (split.layer_text, split.end_to_end, split.validation, split.test)
    ]
    assert [len(part) for part in parts] == [45, 135, 10, 10]
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(200))
    ours = TextSplit.of(text, recipe_of(FitSettings(SELF), "both"), widest=WIDE)
    assert len(ours.layer_text) == len(ours.end_to_end) == 180


def adapted(models: TinyModels, directory: Path) -> Path:
    """Save a LoRA adapter of the base."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(models.base)
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft calls deprecated parts of transformers
        get_peft_model(model, config).save_pretrained(str(directory))
    return directory


def test_an_adapter_is_fitted_like_any_finetune(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, seed=5, changes=())
    adapter = adapted(models, tmp_path / "adapter")
    results = [
        compress(CompressConfig(str(models.base), str(adapter), tmp_path / name, fit_settings=OURS))
        for name in "ab"
    ]
    assert results[0].digest == results[1].digest
    specs = results[0].manifest.tensors
    assert {name.split(".")[-2] for name in specs} == {"q_proj", "up_proj"}
    told = results[0].manifest.fidelity
    assert told["held_out"]["kl"] < 0.7 * told["base"]["kl"]


def test_a_delta_says_nothing_of_where_things_lay(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, seed=5, changes=NOISY)
    text = tmp_path / "private" / "words.txt"
    text.parent.mkdir()
    text.write_text("words of a domain " * 200)
    fit_settings = FitSettings(Calibration(str(text), 20, 16), distill_epochs=1)
    result = compressed(models, tmp_path / "delta", fit_settings=fit_settings)
    assert str(tmp_path).encode() not in (tmp_path / "delta").read_bytes()
    assert "private" not in result.manifest.model_dump_json()
    assert result.manifest.compressor["settings"]["calibration"]["source"] == "words.txt"


def test_fewer_sequences_than_asked_for_are_told_and_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = make_pair("llama", tmp_path, seed=5, changes=NOISY)
    (tmp_path / "words.txt").write_text("one two three four " * 20)
    fit_settings = FitSettings(Calibration(str(tmp_path / "words.txt"), 200, 16), distill_epochs=0)
    noted = compressed(models, tmp_path / "delta", fit_settings=fit_settings).manifest.compressor[
        "num_sequences"
    ]
    assert 16 <= noted < 200
    assert (
        f"makes {noted} sequences of 16 tokens, fewer than the 200 that were asked for"
        in capsys.readouterr().err
    )


def test_the_command_says_what_it_reached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = make_pair("llama", tmp_path, seed=5, changes=NOISY)
    args = ["compress", "--base", models.base, "--finetune", models.finetunes[0], "--out", tmp_path / "delta"]
    options = ["--samples", 16, "--distill-epochs", 1, "--budget", 1.2, "--json", "--no-progress"]
    capsys.readouterr()
    assert run([str(part) for part in (*args, *options)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fidelity"]["held_out"]["kl"] < told["fidelity"]["base"]["kl"]
    assert any(spec.get("planes", 1) == 2 or spec.get("rank") for spec in told["tensors"].values())


def refused(models: TinyModels, kind: type[PeraxisError], **config: Any) -> str:
    """Return the error's message; check that it is one line and that no file is left."""
    out = models.base.parent / "out" / "delta"
    out.parent.mkdir()
    settings: dict[str, Any] = {"fit_settings": OURS, **config}
    with pytest.raises(kind) as caught:
        compress(CompressConfig(str(models.base), str(models.finetunes[0]), out, **settings))
    assert os.listdir(out.parent) == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def models(tmp_path: Path) -> TinyModels:
    return make_pair("llama", tmp_path, seed=5, changes=(Change(added_tokens=1),))


@pytest.mark.parametrize("name", [UP, NORM, HEAD])
@pytest.mark.parametrize("side", ["base", "finetune-0"])
def test_nan_is_refused_by_tensor_before_any_file_is_left(side: str, name: str, models: TinyModels) -> None:
    rewrite(models.base.parent / side, lambda tensors: tensors[name].view(-1)[-1:].fill_(math.nan))
    assert f"tensor '{name}' holds NaN or infinity" in refused(models, CheckpointError)


def test_inputs_that_overflow_are_refused_by_the_layer_that_reads_them(models: TinyModels) -> None:
    def overflow(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.post_attention_layernorm.weight"].fill_(1e25)
        # Zero weights let none of it pass, so that the model's logits are finite.
        for name in ("gate_proj", "up_proj"):
            tensors[f"model.layers.0.mlp.{name}.weight"].zero_()

    rewrite(models.finetunes[0], overflow)
    config = CompressConfig(
        str(models.base), str(models.finetunes[0]), models.base.parent / "delta", fit_settings=OURS
    )
    with pytest.raises(
        CheckpointError, match=r"the inputs of tensor 'model\.layers\.0\.mlp\..* not finite or overflow"
    ):
        compress(config)


def test_a_shrunk_vocabulary_is_refused_before_any_file_is_left(models: TinyModels) -> None:
    rewrite(models.finetunes[0], lambda tensors: tensors.update({HEAD: tensors[HEAD][:100].clone()}))
    assert "a vocabulary may grow and not shrink" in refused(models, CheckpointError)


def test_text_that_is_too_short_is_refused_before_any_file_is_left(models: TinyModels) -> None:
    text = models.base.parent / "short.txt"
    text.write_text("a few words")
    short = FitSettings(Calibration(str(text), 20, 16))
    assert "short.txt: its text makes 0 sequences" in refused(models, UsageError, fit_settings=short)


@pytest.mark.parametrize(("recipe", "least"), [("ours", 4), ("paper", 8)])
def test_so_few_samples_that_none_can_be_held_out_are_refused(
    recipe: Any, least: int, models: TinyModels
) -> None:
    few = FitSettings(Calibration("self", least - 1, 16), recipe=recipe)
    message = refused(models, UsageError, fit_settings=few, method="per-axis")
    assert message.startswith(f"`samples` {least - 1}: give at least {least}")
    enough = FitSettings(Calibration("self", least, 16), recipe=recipe)
    result = compressed(models, models.base.parent / "delta", method="per-axis", fit_settings=enough)
    assert result.manifest.fidelity["held_out"]["num_tokens"] >= 16


def test_the_papers_recipe_has_no_both(models: TinyModels) -> None:
    message = refused(models, UsageError, fit_settings=FitSettings(SELF, recipe="paper"), method="both")
    assert message.startswith(
        "`recipe='paper'` trains one vector or one number per matrix: give `method='per-axis'`"
    )


@pytest.mark.parametrize(
    ("recipe", "unread", "reader"),
    [
        ("paper", {"budget": 1.5}, "ours"),
        ("paper", {"learn_signs": False}, "ours"),
        ("paper", {"refine_signs": False}, "ours"),
        ("ours", {"rate": 0.1}, "paper"),
        ("ours", {"cosine": True}, "paper"),
        ("ours", {"axis_loss": "end"}, "paper"),
        ("ours", {"with_scalar": True}, "paper"),
    ],
)
def test_what_a_recipe_does_not_read_is_refused(recipe: Any, unread: dict[str, Any], reader: str) -> None:
    ((name, value),) = unread.items()
    shown = f"{name}=False" if value is False else name
    message = f"`{shown}` does nothing with `recipe='{recipe}'`: give `recipe='{reader}'` with it"
    with pytest.raises(UsageError, match=re.escape(message)):
        FitSettings(SELF, recipe=recipe, **unread)


def test_the_papers_recipe_is_per_axis_unless_another_method_is_given(models: TinyModels) -> None:
    config = CompressConfig("base", "finetune", models.base.parent / "delta")
    paper = replace(config, fit_settings=FitSettings(SELF, recipe="paper"))
    assert (config.scales, replace(config, fit_settings=OURS).scales, paper.scales) == (
        "both",
        "both",
        "per-axis",
    )
    assert replace(paper, method="scalar").scales == "scalar"


@pytest.mark.parametrize("option", [{"min_agreement": 0.5}, {"resume": True}])
def test_what_needs_text_is_refused_without(option: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"`{next(iter(option))}` does nothing without calibration text"):
        CompressConfig("base", "finetune", tmp_path / "delta", **option)


@pytest.mark.parametrize("budget", [0.9, -1.0, math.nan, math.inf])
def test_a_budget_that_is_none_is_refused(budget: float) -> None:
    with pytest.raises(UsageError, match=r"`budget` .*: give at least 1"):
        FitSettings(SELF, budget=budget)


@pytest.mark.parametrize("rate", [0.0, -1e-4, math.nan, math.inf])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(UsageError, match=r"`rate` .*: give a number above 0"):
        FitSettings(SELF, rate=rate)


def test_negative_epochs_are_refused() -> None:
    with pytest.raises(UsageError, match="`distill_epochs` -1"):
        FitSettings(SELF, distill_epochs=-1)


def test_a_device_that_is_not_there_is_refused(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "`device` cuda: this machine has none" in refused(
        models, UsageError, fit_settings=FitSettings(SELF, device="cuda")
    )
