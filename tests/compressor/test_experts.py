"""Stacks of experts are coded an expert at a time, merged as the base stores them, and refused by name."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from compressor.config import Calibration, CompressConfig, FitSettings
from compressor.convert.merge import MergeConfig, merge
from compressor.decoder.decoder import Decoder
from compressor.decoder.weights import DeltaModel
from compressor.experts import in_base_form
from compressor.fidelity import Predictions, compare
from compressor.fit.calibration import calibration_text, split_text
from compressor.pairs import pair_up
from compressor.pipeline import compress, plan
from deltastore.base import Base
from deltastore.checkpoint import Checkpoint
from deltastore.errors import CheckpointError
from deltastore.format.artifact import Artifact
from deltastore.format.manifest import FORMAT_KEY
from deltastore.format.matrix import unpack_signs
from deltastore.format.validate import check_artifact, check_base
from tests.compressor.helpers.compressing import SINGLE
from tests.helpers.tiny_models import TinyModels, make_pair

# Experts are stacks in their checkpoints, or are saved as transformers has them in memory.
STACKED = ("gpt_oss", "granitemoe")
SEPARATE = ("qwen3_moe", "mixtral", "olmoe", "qwen3_5_moe_text")
CPU = torch.device("cpu")
PROMPT = torch.tensor([[5, 200, 17, 99, 3, 120, 64, 250, 31, 77, 180, 9]])
GATE_UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"
ROUTERS = {"gpt_oss": "mlp.router.weight", "granitemoe": "block_sparse_moe.router.layer.weight"}


def stacked(directory: Path) -> Path:
    """Save a checkpoint again with its experts as transformers has them in memory."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    (directory / SINGLE).unlink()
    model.save_pretrained(directory, save_original_format=False)
    return directory


def pair(architecture: str, directory: Path, **config: Any) -> TinyModels:
    """Return a pair whose experts are stacks in both checkpoints."""
    models = make_pair(architecture, directory, seed=3, **config)
    if architecture in SEPARATE:
        for own in (models.base, *models.finetunes):
            stacked(own)
    return models


def num_layers(base: Path) -> int:
    return int(json.loads((base / "config.json").read_text())["num_hidden_layers"])


def coded(models: TinyModels, out: Path, **config: Any) -> Path:
    compress(CompressConfig(str(models.base), str(models.finetunes[0]), out, **config))
    return out


def merged(models: TinyModels, delta: Path, out: Path) -> dict[str, Tensor]:
    merge(MergeConfig(str(models.base), delta, out, "float32"))
    return load_file(out / SINGLE)


def rewritten(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE, {"format": "pt"})


@torch.inference_mode()
def logits(directory: Path, values: Mapping[str, Tensor] | None = None) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    if values is not None:
        model.load_state_dict(values)
    found: Tensor = model(PROMPT, use_cache=False).logits
    return found


def dense(stack: Mapping[str, Tensor], name: str, transposed: bool) -> Tensor:
    """Return the delta of a stack from the tensors of its file, in plain torch."""
    signs = stack[f"{name}.signs"]
    rows_of, columns_of = (stack.get(f"{name}.scale_{axis}") for axis in ("out", "in"))
    if transposed and rows_of is not None and rows_of.shape[1] != 1:
        rows_of, columns_of = columns_of, rows_of
    elif transposed and rows_of is None:
        rows_of, columns_of = columns_of, None
    width = stack[name].shape[2]
    made = []
    for number in range(len(signs)):
        own = unpack_signs(signs[number], width) * stack[f"{name}.gain"][number]
        if rows_of is not None:
            own = own * rows_of[number].float()[:, None]
        if columns_of is not None:
            own = own * columns_of[number].float()
        made.append(own)
    return torch.stack(made)


@pytest.mark.parametrize("method", ["both", "per-axis", "scalar"])
@pytest.mark.parametrize("architecture", [*STACKED, *SEPARATE])
def test_a_merged_stack_is_the_base_and_each_experts_own_delta(
    architecture: str, method: Any, tmp_path: Path
) -> None:
    models = pair(architecture, tmp_path)
    delta = coded(models, tmp_path / "delta", method=method)
    base, made = load_file(models.base / SINGLE), merged(models, delta, tmp_path / "merged")
    finetune = load_file(models.finetunes[0] / SINGLE)
    stored = load_file(delta)
    with Artifact.open(delta) as artifact:
        check_artifact(artifact)
        check_base(artifact, Base.of(Checkpoint.open(models.base)))
        specs = artifact.manifest.tensors
        assert artifact.header.metadata[FORMAT_KEY] == "2"
        stacks = artifact.manifest.stacks
        assert len(stacks) == 2 * num_layers(models.base)
        for name in stacks:
            assert specs[name].transposed == (architecture == "gpt_oss")
            # Each expert has scales and a gain of its own.
            assert stored[f"{name}.gain"].shape == (len(base[name]),)
            own = dense({**stored, name: base[name]}, name, specs[name].transposed)
            assert torch.equal(artifact.stack(name).dense(), own)
            assert torch.equal(made[name], base[name] + own), name
            for number, expert in enumerate(finetune[name]):
                assert (made[name][number] - expert).norm() < 0.75 * (base[name][number] - expert).norm()
    assert made.keys() == base.keys()
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["model_type"] == architecture
    got, want, before = logits(tmp_path / "merged"), logits(models.finetunes[0]), logits(models.base)
    assert (got - want).norm() < (before - want).norm()
    # transformers loads the stored form as its own parameters.
    assert not torch.equal(got, before)


@pytest.mark.parametrize("architecture", STACKED)
def test_routers_and_biases_of_experts_stay_whole(architecture: str, tmp_path: Path) -> None:
    models = pair(architecture, tmp_path)
    delta = coded(models, tmp_path / "delta")
    finetune, made = load_file(models.finetunes[0] / SINGLE), merged(models, delta, tmp_path / "merged")
    whole = [f"model.layers.{layer}.{ROUTERS[architecture]}" for layer in range(2)]
    if architecture == "gpt_oss":
        whole += [f"{GATE_UP}_bias", f"{DOWN}_bias"]
    with Artifact.open(delta) as artifact:
        for name in whole:
            assert artifact.manifest.tensors[name].codec == "whole"
            assert torch.equal(made[name], finetune[name])


def test_the_axis_of_a_stack_is_the_one_that_errs_less_over_all_experts(tmp_path: Path) -> None:
    models = pair("gpt_oss", tmp_path)
    base = load_file(models.base / SINGLE)

    def change(tensors: dict[str, Tensor]) -> None:
        signs = torch.randn(base[DOWN].shape).sign()
        # One scale per input, which is a row of the stored matrix, and per output.
        tensors[DOWN] = base[DOWN] + signs * (1 + torch.arange(base[DOWN].shape[1]))[None, :, None] / 100
        tensors[GATE_UP] = (
            base[GATE_UP]
            + torch.randn(base[GATE_UP].shape).sign() * (1 + torch.arange(base[GATE_UP].shape[2])) / 100
        )

    rewritten(models.finetunes[0], change)
    delta = coded(models, tmp_path / "delta", method="per-axis")
    made, finetune = merged(models, delta, tmp_path / "merged"), load_file(models.finetunes[0] / SINGLE)
    with Artifact.open(delta) as artifact:
        assert [artifact.manifest.tensors[name].axis for name in (DOWN, GATE_UP)] == ["in", "out"]
    for name in (DOWN, GATE_UP):
        assert (made[name] - finetune[name]).abs().max() < 2e-3


def test_an_unchanged_stack_is_left_out_and_an_unchanged_expert_stays(tmp_path: Path) -> None:
    models = pair("gpt_oss", tmp_path)
    base = load_file(models.base / SINGLE)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[DOWN] = base[DOWN]
        tensors[GATE_UP][2] = base[GATE_UP][2]

    rewritten(models.finetunes[0], change)
    delta = coded(models, tmp_path / "delta")
    made = merged(models, delta, tmp_path / "merged")
    with Artifact.open(delta) as artifact:
        assert DOWN not in artifact.manifest.tensors
        assert artifact.manifest.tensors[GATE_UP].num_zeros == base[GATE_UP][2].numel()
    assert torch.equal(made[DOWN], base[DOWN])
    assert torch.equal(made[GATE_UP][2], base[GATE_UP][2])
    assert not torch.equal(made[GATE_UP][1], base[GATE_UP][1])


@pytest.mark.parametrize("architecture", SEPARATE)
@pytest.mark.parametrize("which", ["base", "finetune"])
def test_a_fine_tune_in_the_other_form_of_experts_gives_the_same_bytes(
    architecture: str, which: str, tmp_path: Path
) -> None:
    models = make_pair(architecture, tmp_path, seed=4)
    expected_of = models
    if which == "base":
        # The expected artifact is that of two stacked checkpoints.
        expected_of = make_pair(architecture, tmp_path / "both", seed=4)
        for own in (expected_of.base, expected_of.finetunes[0]):
            stacked(own)
    expected = coded(expected_of, tmp_path / "expected")
    stacked(models.base if which == "base" else models.finetunes[0])
    delta = coded(models, tmp_path / "delta")
    assert delta.read_bytes() == expected.read_bytes()
    made = merged(models, delta, tmp_path / "merged")
    assert {name: value.shape for name, value in made.items()} == {
        name: value.shape for name, value in load_file(models.base / SINGLE).items()
    }
    got, want, before = logits(tmp_path / "merged"), logits(models.finetunes[0]), logits(models.base)
    assert (got - want).norm() < (before - want).norm()


def test_separate_experts_are_coded_in_format_1(tmp_path: Path) -> None:
    models = make_pair("mixtral", tmp_path, seed=4)
    delta = coded(models, tmp_path / "delta")
    with Artifact.open(delta) as artifact:
        assert artifact.header.metadata[FORMAT_KEY] == "1"
        assert not artifact.manifest.stacks


@pytest.mark.parametrize("which", ["base", "finetune"])
def test_a_stack_of_other_sizes_than_the_separate_experts_is_refused(which: str, tmp_path: Path) -> None:
    models = make_pair("mixtral", tmp_path, seed=4)
    own = stacked(models.base if which == "base" else models.finetunes[0])
    rewritten(own, lambda tensors: tensors.update({DOWN: tensors[DOWN][:3].clone()}))
    with pytest.raises(
        CheckpointError, match=rf"'{DOWN}' is a stack of experts \[3, 64, 92\], and .* do not"
    ):
        pair_up(Checkpoint.open(models.base), Checkpoint.open(models.finetunes[0]))


@pytest.mark.parametrize("shape", [(0, 92, 64), (3, 92, 64), (4, 90, 64), (4, 92, 63), (1, 4, 92, 64)])
def test_stacks_of_other_shapes_than_the_bases_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    models = pair("gpt_oss", tmp_path)
    rewritten(models.finetunes[0], lambda tensors: tensors.update({DOWN: torch.zeros(shape)}))
    with pytest.raises(CheckpointError, match=f"tensor '{DOWN}' (has shape|is empty)"):
        coded(models, tmp_path / "delta")
    assert not (tmp_path / "delta").exists()


@pytest.mark.parametrize("which", ["base", "fine-tune"])
@pytest.mark.parametrize("calibration", [False, True])
def test_not_a_number_in_one_expert_is_refused_by_its_number(
    which: str, calibration: bool, tmp_path: Path
) -> None:
    models = pair("gpt_oss", tmp_path)
    own = models.base if which == "base" else models.finetunes[0]
    rewritten(own, lambda tensors: tensors[GATE_UP][2, 7].fill_(float("nan")))
    settings = fit_settings(tmp_path) if calibration else None
    with pytest.raises(CheckpointError, match=rf"'{GATE_UP}' holds NaN or infinity in expert 2: ") as caught:
        coded(models, tmp_path / "delta", fit_settings=settings)
    assert str(own) in str(caught.value)
    assert not (tmp_path / "delta").exists()


def fit_settings(directory: Path) -> FitSettings:
    text = directory / "text.txt"
    text.write_text("\n\n".join(f"{number} is the square of {number**0.5:.3f}" for number in range(400)))
    return FitSettings(Calibration(str(text), samples=16, length=16), distill_epochs=1)


@pytest.mark.parametrize("architecture", ["gpt_oss", "granitemoe"])
def test_the_rest_of_a_model_with_stacks_is_fitted_and_its_fidelity_is_that_of_the_artifact(
    architecture: str, tmp_path: Path
) -> None:
    models = pair(architecture, tmp_path)
    alone, fitted = coded(models, tmp_path / "alone"), tmp_path / "fitted"
    result = compress(
        CompressConfig(
            str(models.base), str(models.finetunes[0]), fitted, fit_settings=fit_settings(tmp_path)
        )
    )
    assert result.kl is not None
    assert result.kl > 0
    by_weights, by_fit = load_file(alone), load_file(fitted)
    stacks = [name for name in by_fit if "experts" in name or "_linear" in name]
    assert stacks
    for name in stacks:
        assert torch.equal(by_weights[name], by_fit[name]), name
    query = "model.layers.0.self_attn.q_proj.weight.scale_out"
    assert not torch.equal(by_weights[query], by_fit[query])
    # It is the artifact that was measured, not the fine-tune's own experts.
    finetune = Checkpoint.open(models.finetunes[0])
    teacher = Decoder(finetune, CPU, torch.float32)
    sequences = calibration_text(fit_settings(tmp_path).calibration, teacher, base=models.base)
    test = [sequence[None] for sequence in split_text(sequences)[2]]
    with Artifact.open(fitted) as artifact:
        student = Decoder(DeltaModel(Checkpoint.open(models.base), artifact), CPU, torch.float32)
        measured = compare(Predictions.of(teacher, test), Predictions.of(student, test), test)
    assert result.kl == pytest.approx(measured.kl, rel=1e-3)


def test_the_plan_counts_a_bit_per_weight_of_stacks(tmp_path: Path) -> None:
    models = pair("gpt_oss", tmp_path)
    config = CompressConfig(str(models.base), str(models.finetunes[0]), tmp_path / "delta")
    planned = plan(config)
    delta = coded(models, tmp_path / "delta", method="both")
    # Spool and artifact, twice; the header is not planned.
    assert planned.disk_bytes < 2.2 * delta.stat().st_size
    numel = sum(value.numel() for value in load_file(models.base / SINGLE).values())
    assert delta.stat().st_size < 2 * numel


def quantised(directory: Path) -> None:
    """Write the experts of a gpt-oss checkpoint as the hub's checkpoints have them: 4 bits and a scale for each 32."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if tensors[name].dim() == 3]:
            experts, inputs, outputs = tensors.pop(name).shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_blocks"] = blocks
            tensors[f"{name}_scales"] = torch.full(blocks.shape[:-1], 125, dtype=torch.uint8)

    rewritten(directory, change)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("which", ["base", "finetune"])
def test_mxfp4_is_refused_with_the_line_that_makes_it_bfloat16(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = pair("gpt_oss", tmp_path, intermediate_size=64)
    own = models.base if which == "base" else models.finetunes[0]
    quantised(own)
    with pytest.raises(
        CheckpointError, match=r"experts are in MXFP4 .*: make them bfloat16 with python -c"
    ) as caught:
        coded(models, tmp_path / "delta")
    line = re.search(r'python -c "(.*)"$', str(caught.value))
    assert line is not None
    if which == "base":
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with warnings.catch_warnings():
            # What transformers warns of is for the user.
            warnings.simplefilter("ignore")
            exec(line[1], {})
        made = Checkpoint.open(own.with_name(own.name + "-bf16"))
        assert made.tensors[GATE_UP].dtype == "BF16"
        assert made.tensors[GATE_UP].shape == (4, 64, 128)
        assert "quantization_config" not in made.config


def test_a_stack_of_a_model_that_transformers_does_not_know_is_stored_whole(tmp_path: Path) -> None:
    models = pair("gpt_oss", tmp_path)
    for own in (models.base, models.finetunes[0]):
        for name in ("model.layers.0.mlp.experts.extra", "model.layers.0.conv.weight"):
            rewritten(own, partial(dict.update, **{name: torch.randn(4, 8, 16)}))
    pairs = pair_up(Checkpoint.open(models.base), Checkpoint.open(models.finetunes[0]))
    assert len(pairs.stacks) == 4
    assert GATE_UP in pairs.stacks


def test_equal_forms_of_experts_are_left_as_they_are(tmp_path: Path) -> None:
    models = make_pair("mixtral", tmp_path, seed=4)
    base, finetune = Checkpoint.open(models.base), Checkpoint.open(models.finetunes[0])
    assert in_base_form(base, finetune) is finetune
