"""Tests of imports from BitDelta and the paper's code: the artifact gives the weights of their own loaders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compressor.convert.importer import ImportConfig, Kind, import_diff
from compressor.convert.merge import DtypeName, MergeConfig, merge
from compressor.writer import WrittenDelta
from deltastore.base import Base
from deltastore.checkpoint import Checkpoint
from deltastore.format.artifact import Artifact
from deltastore.format.validate import check_artifact, check_base
from peraxis.cli import run
from tests.compressor.helpers.compressing import variant_tensors
from tests.compressor.helpers.diff_files import (
    SINGLE,
    bitdelta,
    is_linear,
    loaded,
    make_packable,
    packed,
    per_axis,
)
from tests.helpers.tiny_models import CHAT_TEMPLATE, VOCAB_SIZE, Change, TinyModels

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
QUERY = "model.layers.0.self_attn.q_proj"
UP = "model.layers.1.mlp.up_proj"
DTYPES: dict[torch.dtype, DtypeName] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@pytest.fixture
def models(tmp_path: Path) -> TinyModels:
    return make_packable("llama", tmp_path)


def imported(
    models: TinyModels, content: dict[str, Tensor], kind: Kind = "bitdelta", finetune: Path | None = None
) -> WrittenDelta:
    """Import a file with this content, and check the artifact as an upload would be."""
    diff, out = models.base.parent / "diff.pt", models.base.parent / "delta.safetensors"
    torch.save(content, diff)
    result = import_diff(ImportConfig(kind, models.base, diff, out, finetune))
    with Artifact.open(out) as artifact:
        check_artifact(artifact)
        check_base(artifact, Base.of(Checkpoint.open(models.base)))
        assert artifact.digest() == result.digest
    return result


def merged(models: TinyModels, dtype: torch.dtype) -> dict[str, Tensor]:
    out = models.base.parent / "merged"
    merge(MergeConfig(str(models.base), models.base.parent / "delta.safetensors", out, DTYPES[dtype]))
    return load_file(out / SINGLE)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitdelta_merges_to_the_very_weights_of_its_own_loader(
    architecture: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    models = make_packable(architecture, tmp_path, dtype=dtype)
    content = bitdelta(models)
    result = imported(models, content)
    weights, expected = merged(models, dtype), loaded(models.base, content)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert {spec.axis for spec in result.manifest.tensors.values()} == {"scalar", None}


@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_a_float32_coefficient_is_kept_within_a_half_precision_rounding(
    size: float, models: TinyModels
) -> None:
    content = bitdelta(models, torch.float32)
    content[f"{UP}.coeff"] = content[f"{UP}.coeff"].detach() * size
    imported(models, content)
    with Artifact.open(models.base.parent / "delta.safetensors") as artifact:
        stored = float(artifact.onebit(f"{UP}.weight").planes[0].factor_out()[0])
    assert stored == pytest.approx(float(content[f"{UP}.coeff"].detach()), rel=2**-11)
    weights = merged(models, torch.float32)
    for name, weight in loaded(models.base, content).items():
        torch.testing.assert_close(weights[name], weight, rtol=2**-23, atol=2**-11 * _coeff(content, name))


def _coeff(content: dict[str, Tensor], name: str) -> float:
    coeff = content.get(f"{name.removesuffix('.weight')}.coeff")
    return 0.0 if coeff is None else float(coeff.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_per_axis_files_merge_to_base_plus_vector_times_sign(dtype: torch.dtype, tmp_path: Path) -> None:
    models = make_packable("llama", tmp_path, dtype=dtype)
    content = per_axis(models)
    imported(models, content, "per-axis")
    weights, expected = merged(models, dtype), loaded(models.base, content)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_the_papers_row_is_our_axis_in_and_its_col_our_axis_out(models: TinyModels) -> None:
    result = imported(models, per_axis(models), "per-axis")
    assert result.manifest.method == "per-axis"
    assert result.manifest.tensors[f"{UP}.weight"].axis == "in"
    assert result.manifest.tensors[f"{QUERY}.weight"].axis == "out"


def test_where_a_module_has_row_and_col_the_row_is_in_force(models: TinyModels) -> None:
    content = per_axis(models)
    content[f"{UP}.mask_col"], content[f"{UP}.coeff_col"] = -content[f"{UP}.mask_row"], torch.ones(96)
    result = imported(models, content, "per-axis")
    assert result.manifest.tensors[f"{UP}.weight"].axis == "in"
    expected = loaded(models.base, content)[f"{UP}.weight"]
    torch.testing.assert_close(merged(models, torch.float32)[f"{UP}.weight"], expected)


def test_the_sign_of_every_input_stands_where_the_packing_says(models: TinyModels) -> None:
    content = bitdelta(models)
    positive = torch.zeros(96, 64, dtype=torch.bool)
    positive[5, 33] = positive[7, 31] = (
        True  # one at the second word's second bit, one at the first word's sign bit
    )
    content[f"{UP}.mask"], content[f"{UP}.coeff"] = packed(positive), torch.tensor(1.0)
    imported(models, content)
    with Artifact.open(models.base.parent / "delta.safetensors") as artifact:
        assert torch.equal(artifact.onebit(f"{UP}.weight").dense() > 0, positive)


def test_parameters_equal_to_the_bases_are_left_out(models: TinyModels) -> None:
    content = bitdelta(models)
    base = load_file(models.base / SINGLE)
    for name in (NORM, EMBEDDING):
        content[name] = base[name]
    del content["model.layers.0.input_layernorm.weight"]  # what was not trained is not in the file
    content[f"{UP}.coeff"] = torch.tensor(0.0)
    result = imported(models, content)
    assert result.num_unchanged == 4
    assert not {NORM, EMBEDDING, "model.layers.0.input_layernorm.weight", f"{UP}.weight"} & set(
        result.manifest.tensors
    )
    assert result.manifest.tensors[HEAD].codec == "whole"


def test_a_matrix_that_is_not_sign_coded_stays_whole(models: TinyModels) -> None:
    content = bitdelta(models)
    finetune = load_file(models.finetunes[0] / SINGLE)[f"{UP}.weight"]
    del content[f"{UP}.mask"], content[f"{UP}.coeff"]
    content[f"{UP}.weight"] = finetune.half()
    assert imported(models, content).manifest.tensors[f"{UP}.weight"].codec == "whole"
    assert torch.equal(
        variant_tensors(models.base, models.base.parent / "delta.safetensors")[f"{UP}.weight"],
        finetune.half().float(),
    )


def test_tables_that_transformers_computes_are_skipped(models: TinyModels) -> None:
    content = {**bitdelta(models), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    assert len(imported(models, content).manifest.tensors) == len(load_file(models.base / SINGLE))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_grown_vocabulary_is_whole_and_longer(architecture: str, tmp_path: Path) -> None:
    models = make_packable(architecture, tmp_path, Change(added_tokens=5))
    content = bitdelta(models)
    result = imported(models, content, finetune=models.finetunes[0])
    assert result.manifest.tensors[EMBEDDING].shape == [VOCAB_SIZE + 5, 64]
    assert torch.equal(merged(models, torch.float32)[EMBEDDING], content[EMBEDDING])


def test_the_fine_tunes_directory_gives_files_and_the_error_of_its_weights(tmp_path: Path) -> None:
    change = Change(added_tokens=1, chat_template=CHAT_TEMPLATE, generation={"max_new_tokens": 7})
    models = make_packable("llama", tmp_path, change)
    content = bitdelta(models)
    alone = imported(models, content)
    assert alone.manifest.files == []
    assert alone.manifest.fidelity == {}
    result = imported(models, content, finetune=models.finetunes[0])
    assert {"chat_template.jinja", "tokenizer.json", "generation_config.json"} <= set(result.manifest.files)
    base, finetune = load_file(models.base / SINGLE), load_file(models.finetunes[0] / SINGLE)
    names = [name for name, tensor in finetune.items() if is_linear(name, tensor)]
    weights = loaded(models.base, content)
    lost = sum(float((weights[name] - finetune[name]).square().sum()) for name in names)
    there = sum(float((base[name] - finetune[name]).square().sum()) for name in names)
    assert result.manifest.fidelity["weight_error"] == pytest.approx((lost / there) ** 0.5, rel=1e-3)
    assert all(0 < float(result.manifest.tensors[name].error or 0) < 1 for name in names)


def test_a_fine_tunes_directory_needs_no_weights(tmp_path: Path) -> None:
    models = make_packable("llama", tmp_path, Change(chat_template=CHAT_TEMPLATE))
    content = bitdelta(models)
    (models.finetunes[0] / SINGLE).unlink()
    result = imported(models, content, finetune=models.finetunes[0])
    assert "chat_template.jinja" in result.manifest.files
    assert result.manifest.fidelity == {}


def test_a_tied_bases_head_stays_tied_and_may_be_in_the_file_again(tmp_path: Path) -> None:
    models = make_packable("qwen2", tmp_path)
    content = bitdelta(models)
    content[HEAD] = content[EMBEDDING].detach().clone()
    result = imported(models, content)
    assert result.manifest.tied
    assert HEAD not in result.manifest.tensors


@pytest.mark.parametrize("coded", [True, False])
def test_an_untied_head_of_a_tied_base_is_taken_from_its_embedding(coded: bool, tmp_path: Path) -> None:
    models = make_packable("qwen2", tmp_path, Change(tied=False))
    content = bitdelta(models)
    expected = content[HEAD].detach()
    if coded:
        embedding = load_file(models.base / SINGLE)[EMBEDDING]
        positive = content.pop(HEAD) > embedding
        content["lm_head.mask"], content["lm_head.coeff"] = packed(positive), torch.tensor(0.25)
        expected = embedding + torch.where(positive, 0.25, -0.25)
    (models.finetunes[0] / SINGLE).unlink()
    result = imported(models, content, finetune=models.finetunes[0])
    assert not result.manifest.tied
    assert result.manifest.tensors[HEAD].against == (EMBEDDING if coded else None)
    assert torch.equal(merged(models, torch.float32)[HEAD], expected)


def test_a_configuration_that_does_not_name_the_tie_has_the_one_of_its_class(tmp_path: Path) -> None:
    models = make_packable("qwen2", tmp_path, Change(tied=False))
    content = bitdelta(models)
    (models.finetunes[0] / SINGLE).unlink()
    path = models.finetunes[0] / "config.json"
    config = json.loads(path.read_text())
    del config["tie_word_embeddings"]
    path.write_text(json.dumps(config))
    assert not imported(models, content, finetune=models.finetunes[0]).manifest.tied


def test_a_tied_variant_of_an_untied_base_has_its_embedding_twice(tmp_path: Path) -> None:
    models = make_packable("llama", tmp_path, Change(tied=True))
    content = bitdelta(models)
    assert HEAD not in content
    result = imported(models, content, finetune=models.finetunes[0])
    assert not result.manifest.tied
    weights = merged(models, torch.float32)
    assert torch.equal(weights[HEAD], content[EMBEDDING])


def test_the_manifest_names_what_was_imported_and_the_bytes_repeat(models: TinyModels) -> None:
    first, second = imported(models, bitdelta(models)), imported(models, bitdelta(models))
    assert first.digest == second.digest
    assert first.manifest.compressor["settings"] == {"imported": "bitdelta"}
    assert first.manifest.method == "scalar"


def test_tensors_lie_in_layer_order_whatever_the_files_order(models: TinyModels) -> None:
    content = bitdelta(models)
    names = list(imported(models, dict(reversed(content.items()))).manifest.tensors)
    assert names[0] == EMBEDDING
    assert names[-2:] == [NORM, HEAD]


def test_the_command_prints_its_result_and_the_artifact_is_sound(
    models: TinyModels, capsys: pytest.CaptureFixture[str]
) -> None:
    diff, out = models.base.parent / "diff.pt", models.base.parent / "delta.safetensors"
    torch.save(per_axis(models), diff)
    args = ["import", "per-axis", *_options(base=models.base, diff=diff, out=out), "--no-progress"]
    assert run(args) == 0
    assert "method per-axis" in capsys.readouterr().out
    assert run([*args, "--finetune", str(models.finetunes[0]), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["artifact_bytes"] == out.stat().st_size
    assert 0 < document["weight_error"] < 1
    assert run(["verify", str(out), "--base", str(models.base)]) == 0
    assert run(["inspect", str(out)]) == 0


def _options(**options: Path) -> list[str]:
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def test_an_error_of_the_command_is_one_line(models: TinyModels, capsys: pytest.CaptureFixture[str]) -> None:
    options = _options(base=models.base, diff=models.base, out=models.base.parent / "delta")
    assert run(["import", "bitdelta", *options]) == 1
    assert capsys.readouterr().err.count("\n") == 1
