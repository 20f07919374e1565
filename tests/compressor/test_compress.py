"""Tests of `compress`: the tensors that an artifact carries, and the same bytes for the same inputs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from compressor.config import Method
from deltastore.format.artifact import Artifact
from tests.compressor.helpers.compressing import compressed, rewrite, rewrite_config, variant_tensors
from tests.helpers.tiny_models import ARCHITECTURES, VOCAB_SIZE, Change, TinyModels, make_pair

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("method", ["scalar", "per-axis", "both"])
def test_every_architecture_and_method_comes_nearer_to_the_fine_tune(
    architecture: str, method: Method, tmp_path: Path
) -> None:
    models = make_pair(architecture, tmp_path)
    result = compressed(models, tmp_path / "delta", method=method)
    assert result.manifest.method == method
    assert result.num_unchanged == 0
    base, finetune = (
        load_file(models.base / "model.safetensors"),
        load_file(models.finetunes[0] / "model.safetensors"),
    )
    for name, tensor in variant_tensors(models.base, tmp_path / "delta").items():
        spec = result.manifest.tensors[name]
        if spec.codec == "whole":
            assert torch.equal(tensor, finetune[name])
        else:
            left = (tensor - finetune[name]).norm() / (base[name] - finetune[name]).norm()
            assert float(left) == pytest.approx(spec.error, rel=1e-3)
            assert float(left) < 0.65


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_matrices_are_coded_and_norms_and_biases_are_exact(architecture: str, tmp_path: Path) -> None:
    manifest = compressed(make_pair(architecture, tmp_path), tmp_path / "delta").manifest
    for name, spec in manifest.tensors.items():
        assert spec.codec == ("onebit" if len(spec.shape) == 2 else "whole"), name


def test_the_stock_library_opens_the_artifact(tmp_path: Path) -> None:
    compressed(make_pair("llama", tmp_path), tmp_path / "delta", method="both")
    with safe_open(tmp_path / "delta", framework="pt") as opened:
        names = set(opened.keys())
        assert opened.get_tensor("model.layers.0.mlp.up_proj.weight.signs").dtype == torch.uint8
        assert opened.get_tensor("model.layers.0.mlp.up_proj.weight.gain").shape == (1,)
    assert {"model.norm.weight", f"{HEAD}.scale_out", f"{HEAD}.scale_in"} <= names


def test_tensors_lie_in_layer_order(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, num_hidden_layers=11)
    names = list(compressed(models, tmp_path / "delta").manifest.tensors)
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert names[0] == EMBEDDING
    assert layers == sorted(layers)
    assert names[-2:] == ["model.norm.weight", HEAD]
    with Artifact.open(tmp_path / "delta") as artifact:
        stored = [name.removesuffix(".signs") for name in artifact.header.tensors if name.endswith(".signs")]
    assert stored == [name for name in names if not name.endswith("norm.weight")]


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    models = make_pair("qwen2", tmp_path, changes=(Change(added_tokens=2),))
    first, second = (compressed(models, tmp_path / name) for name in ("one", "two"))
    assert first.digest == second.digest
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_sharding_changes_no_byte_of_the_artifact(tmp_path: Path) -> None:
    whole = make_pair("llama", tmp_path / "whole")
    sharded = make_pair("llama", tmp_path / "sharded", max_shard_size="50KB")
    assert (sharded.base / "model.safetensors.index.json").exists()
    assert compressed(whole, tmp_path / "a").digest == compressed(sharded, tmp_path / "b").digest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_whole_keeps_the_fine_tunes_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, changes=(Change(added_tokens=3),), dtype=dtype)
    compressed(models, tmp_path / "delta")
    finetune = load_file(models.finetunes[0] / "model.safetensors")
    with Artifact.open(tmp_path / "delta") as artifact:
        norm, added = artifact.whole("model.norm.weight"), artifact.added(EMBEDDING)
    assert torch.equal(norm, finetune["model.norm.weight"])
    assert added is not None
    assert torch.equal(added, finetune[EMBEDDING][VOCAB_SIZE:])
    assert norm.dtype == added.dtype == dtype


def test_base_and_fine_tune_may_have_different_dtypes(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path)
    rewrite(
        models.finetunes[0], lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()})
    )
    assert compressed(models, tmp_path / "delta").manifest.fidelity["weight_error"] < 0.65


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_fine_tune_s_dtype_changes_no_bit_of_a_matrix(dtype: torch.dtype, tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, dtype=torch.bfloat16)
    # Numbers that all three dtypes hold: few bits, and none so small that float16 would lose some.
    rewrite(
        models.finetunes[0],
        lambda tensors: [tensor.mul_(256).round_().div_(256) for tensor in tensors.values()],
    )
    compressed(models, tmp_path / "same")
    rewrite(models.finetunes[0], lambda tensors: tensors.update({n: t.to(dtype) for n, t in tensors.items()}))
    compressed(models, tmp_path / "other")
    same, other = load_file(tmp_path / "same"), load_file(tmp_path / "other")
    coded = [name for name in same if name.endswith((".signs", ".scale_out", ".scale_in", ".gain"))]
    assert same.keys() == other.keys()
    assert len(coded) > 40
    assert all(torch.equal(same[name], other[name]) for name in coded)


def test_tensors_equal_to_the_bases_are_not_stored(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path)
    base = load_file(models.base / "model.safetensors")
    kept = {"model.norm.weight", "model.layers.1.self_attn.q_proj.weight", EMBEDDING}
    rewrite(models.finetunes[0], lambda tensors: tensors.update({name: base[name] for name in kept}))
    result = compressed(models, tmp_path / "delta")
    assert result.num_unchanged == 3
    assert result.manifest.tensors.keys() == base.keys() - kept


def test_a_fine_tune_that_is_the_base_gives_an_empty_artifact(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path)
    result = compressed(TinyModels(models.base, [models.base]), tmp_path / "delta")
    assert (result.manifest.tensors, result.manifest.device_bytes) == ({}, 0)


def test_zero_differences_are_counted_and_coded_in_turn(tmp_path: Path) -> None:
    name, models = "model.layers.0.mlp.up_proj.weight", make_pair("llama", tmp_path)
    base = load_file(models.base / "model.safetensors")[name]

    def freeze(tensors: dict[str, Tensor]) -> None:
        tensors[name][:10] = base[:10]

    rewrite(models.finetunes[0], freeze)
    specs = compressed(models, tmp_path / "delta").manifest.tensors
    assert (specs[name].num_zeros, specs[name].zeros) == (10 * 64, "alternate")
    assert specs["model.layers.0.mlp.gate_proj.weight"].zeros is None
    with Artifact.open(tmp_path / "delta") as artifact:
        # A row without differences has a scale of 0.
        assert not artifact.onebit(name).dense(slice(0, 10)).any()


def test_a_grown_vocabulary_is_carried_whole_behind_the_coded_rows(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, changes=(Change(added_tokens=5),))
    specs = compressed(models, tmp_path / "delta").manifest.tensors
    for name in (EMBEDDING, HEAD):
        assert (specs[name].shape, specs[name].added_rows) == ([VOCAB_SIZE + 5, 64], 5)


def test_a_vocabulary_may_grow_without_changing(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, changes=(Change(added_tokens=1),))
    base = load_file(models.base / "model.safetensors")

    def restore(tensors: dict[str, Tensor]) -> None:
        for name in (EMBEDDING, HEAD):
            tensors[name][:VOCAB_SIZE] = base[name]

    rewrite(models.finetunes[0], restore)
    spec = compressed(models, tmp_path / "delta").manifest.tensors[EMBEDDING]
    assert (spec.added_rows, spec.num_zeros, spec.error) == (1, VOCAB_SIZE * 64, 0.0)
    assert torch.equal(
        variant_tensors(models.base, tmp_path / "delta")[EMBEDDING][:VOCAB_SIZE], base[EMBEDDING]
    )


@pytest.mark.parametrize("added_tokens", [0, 3])
def test_embeddings_may_stay_whole(added_tokens: int, tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, changes=(Change(added_tokens),))
    result = compressed(models, tmp_path / "delta", embeddings="whole")
    finetune = load_file(models.finetunes[0] / "model.safetensors")
    variant = variant_tensors(models.base, tmp_path / "delta")
    for name in (EMBEDDING, HEAD):
        assert result.manifest.tensors[name].codec == "whole"
        assert torch.equal(variant[name], finetune[name])
    assert result.manifest.compressor["settings"]["embeddings"] == "whole"


def test_both_tied_carry_no_head(tmp_path: Path) -> None:
    manifest = compressed(make_pair("qwen2", tmp_path), tmp_path / "delta").manifest
    assert manifest.tied
    assert HEAD not in manifest.tensors


@pytest.mark.parametrize("embeddings", ["compress", "whole"])
@pytest.mark.parametrize("added_tokens", [0, 2])
def test_a_head_untied_from_a_tied_base_is_a_delta_against_the_embedding(
    embeddings: str, added_tokens: int, tmp_path: Path
) -> None:
    models = make_pair("qwen2", tmp_path, changes=(Change(added_tokens, tied=False),))
    manifest = compressed(models, tmp_path / "delta", embeddings=embeddings).manifest
    assert not manifest.tied
    assert manifest.tensors[HEAD].against == (EMBEDDING if embeddings == "compress" else None)
    base, finetune = (
        load_file(models.base / "model.safetensors"),
        load_file(models.finetunes[0] / "model.safetensors"),
    )
    head = variant_tensors(models.base, tmp_path / "delta")[HEAD]
    assert (head - finetune[HEAD]).norm() < 0.65 * (base[EMBEDDING] - finetune[HEAD][:VOCAB_SIZE]).norm()


def test_a_fine_tune_that_ties_the_base_s_head_codes_it_from_its_embedding(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, changes=(Change(added_tokens=2, tied=True),))
    finetune = load_file(models.finetunes[0] / "model.safetensors")
    assert HEAD not in finetune
    manifest = compressed(models, tmp_path / "delta").manifest
    assert not manifest.tied
    assert manifest.tensors[HEAD].against is None
    variant, base = (
        variant_tensors(models.base, tmp_path / "delta"),
        load_file(models.base / "model.safetensors"),
    )
    lost = variant[HEAD][:VOCAB_SIZE] - finetune[EMBEDDING][:VOCAB_SIZE]
    assert lost.norm() < 0.65 * (base[HEAD] - finetune[EMBEDDING][:VOCAB_SIZE]).norm()


@pytest.mark.parametrize("stored_twice", ["base", "finetune-0"])
def test_a_tied_head_that_is_stored_twice_is_tied_all_the_same(stored_twice: str, tmp_path: Path) -> None:
    models = make_pair("qwen2", tmp_path)
    once = compressed(models, tmp_path / "once")
    rewrite(tmp_path / stored_twice, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    assert compressed(models, tmp_path / "twice").digest == once.digest


def test_tables_that_transformers_computes_are_not_carried(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path)
    before = compressed(models, tmp_path / "one").manifest.tensors
    rewrite(
        models.base,
        lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}),
    )
    assert compressed(models, tmp_path / "two").manifest.tensors == before


def test_a_fact_written_in_another_version_s_words_is_no_difference(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path)
    path = models.finetunes[0] / "config.json"
    path.write_text(path.read_text().replace('"rope_parameters"', '"former"'))
    rewrite_config(models.finetunes[0], rope_theta=10000.0, rope_scaling=None, torch_dtype="float32")
    assert compressed(models, tmp_path / "delta").manifest.config["rope_parameters"]["rope_theta"] == 10000.0


def test_the_file_names_no_path(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path)
    first = compressed(models, tmp_path / "one").digest
    shutil.move(models.base, tmp_path / "elsewhere" / "base")
    shutil.move(models.finetunes[0], tmp_path / "elsewhere" / "tuned")
    moved = TinyModels(tmp_path / "elsewhere" / "base", [tmp_path / "elsewhere" / "tuned"])
    assert compressed(moved, tmp_path / "two").digest == first
    assert str(tmp_path).encode() not in (tmp_path / "two").read_bytes()
