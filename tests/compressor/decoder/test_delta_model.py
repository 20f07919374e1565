"""Tests of `DeltaModel`: its tensors and logits are those of the merged checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.convert.merge import MergeConfig, merge
from compressor.decoder.decoder import Decoder
from compressor.decoder.weights import DeltaModel, Weights, base_with_added_rows
from compressor.pairs import pair_up
from deltastore.checkpoint import Checkpoint
from deltastore.format.artifact import Artifact
from tests.compressor.helpers.compressing import compressed, enriched, rewrite, rewrite_config
from tests.compressor.helpers.decoders import CPU, whole_model
from tests.helpers.tiny_models import ARCHITECTURES, Change, make_pair

IDS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(3))
CASES: dict[str, tuple[str, Change, dict[str, Any]]] = {
    **{name: (name, Change(), {}) for name in ARCHITECTURES},
    "tied-added": ("qwen2", Change(added_tokens=5), {}),
    "untied-added": ("llama", Change(added_tokens=5), {}),
    "untied-by-the-finetune": ("qwen2", Change(tied=False, added_tokens=2), {}),
    "tied-by-the-finetune": ("llama", Change(tied=True, added_tokens=2), {}),
    "whole-embeddings": ("llama", Change(added_tokens=5), {"embeddings": "whole"}),
    "own-token-ids": ("llama", Change(generation={"eos_token_id": [257, 10]}), {}),
}


def logits_of(weights: Weights) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = Decoder(weights, CPU, torch.float32).streaming_model(0)(IDS).logits
    return logits


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_merge_writes(case: str, tmp_path: Path) -> None:
    architecture, change, config = CASES[case]
    models = make_pair(architecture, tmp_path, changes=(change,))
    compressed(models, tmp_path / "delta", **config)
    merge(MergeConfig(str(models.base), tmp_path / "delta", tmp_path / "merged", "float32"))
    written = Checkpoint.open(tmp_path / "merged")
    with Artifact.open(tmp_path / "delta") as artifact:
        variant = DeltaModel(Checkpoint.open(models.base), artifact)
        assert variant.tensors.keys() == written.tensors.keys()
        for name in variant.tensors:
            assert torch.equal(variant.read(name).float(), written.read(name)), name
            assert variant.shape(name) == written.tensors[name].shape
        torch.testing.assert_close(logits_of(variant), whole_model(tmp_path / "merged")(IDS).logits)


def test_more_planes_and_a_residual_are_added_up_too(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path)
    compressed(models, tmp_path / "plain")
    name = "model.layers.1.mlp.up_proj.weight"
    enriched(tmp_path / "plain", tmp_path / "delta", {name: (2, 3)})
    merge(MergeConfig(str(models.base), tmp_path / "delta", tmp_path / "merged", "float32"))
    with Artifact.open(tmp_path / "delta") as artifact:
        actual = DeltaModel(Checkpoint.open(models.base), artifact).read(name)
    assert torch.equal(actual, Checkpoint.open(tmp_path / "merged").read(name))


@pytest.mark.parametrize("stored_twice", [False, True])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_base_as_a_variant_answers_as_the_base_does(
    architecture: str, tied: bool, stored_twice: bool, tmp_path: Path
) -> None:
    models = make_pair(architecture, tmp_path, changes=(Change(added_tokens=4, tied=tied),))
    with torch.no_grad():
        expected = whole_model(models.base)(IDS).logits
    if stored_twice and architecture == "qwen2":
        rewrite(
            models.base,
            lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
        )
    base, finetune = Checkpoint.open(models.base), Checkpoint.open(models.finetunes[0])
    weights = base_with_added_rows(pair_up(base, finetune))
    logits = logits_of(weights)
    assert logits.shape[-1] == expected.shape[-1] + 4
    torch.testing.assert_close(logits[..., :-4], expected)
    assert torch.equal(
        weights.read("model.embed_tokens.weight")[-4:], finetune.read("model.embed_tokens.weight")[-4:]
    )


def test_the_base_with_all_of_the_vocabulary_is_itself(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path)
    rewrite_config(models.base, use_cache=False)
    base = Checkpoint.open(models.base)
    assert base_with_added_rows(pair_up(base, Checkpoint.open(models.finetunes[0]))) is base
