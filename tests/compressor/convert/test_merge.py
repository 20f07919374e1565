"""Tests of merging: the same numbers as base plus delta, in files that transformers loads."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from compressor.convert.merge import DtypeName, MergeConfig, OutputTensor, merge, split_into_shards
from deltastore.base import Base
from deltastore.checkpoint import Checkpoint
from deltastore.errors import ArtifactError, BaseMismatch, PeraxisError, StorageFull, UsageError
from deltastore.format.artifact import Artifact, ArtifactWriter
from deltastore.format.validate import check_artifact, check_base
from tests.compressor.helpers.compressing import compressed, enriched, rewrite, variant_tensors
from tests.conftest import SmallDisk
from tests.helpers.tiny_models import ARCHITECTURES, CHAT_TEMPLATE, VOCAB_SIZE, Change, TinyModels, make_pair

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def merged(models: TinyModels, directory: Path, dtype: DtypeName | None = None) -> Checkpoint:
    """Compress and merge, and check every number against plain torch."""
    compressed(models, directory / "delta")
    out = directory / f"merged-{dtype}"
    result = merge(MergeConfig(str(models.base), directory / "delta", out, dtype))
    checkpoint, expected = Checkpoint.open(out), variant_tensors(models.base, directory / "delta")
    assert checkpoint.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read(name), tensor.to(getattr(torch, result.dtype))), name
    assert checkpoint.config["dtype"] == result.dtype
    return checkpoint


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_transformers_loads_a_merged_variant_and_saves_the_same(architecture: str, tmp_path: Path) -> None:
    checkpoint = merged(make_pair(architecture, tmp_path, changes=(Change(added_tokens=3),)), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(checkpoint.path)
    model.save_pretrained(tmp_path / "again")
    again = Checkpoint.open(tmp_path / "again")
    assert again.tensors.keys() == checkpoint.tensors.keys()
    assert all(torch.equal(again.read(name), checkpoint.read(name)) for name in again.tensors)
    logits = model(torch.arange(VOCAB_SIZE - 10, VOCAB_SIZE + 3)[None]).logits
    assert logits.shape[-1] == VOCAB_SIZE + 3
    assert logits.isfinite().all()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_every_dtype_is_read_and_float32_written_exactly(
    stored: torch.dtype, dtype: DtypeName | None, tmp_path: Path
) -> None:
    models = make_pair("llama", tmp_path, changes=(Change(added_tokens=1),), dtype=stored)
    checkpoint = merged(models, tmp_path, dtype)
    assert checkpoint.read(HEAD).dtype == (stored if dtype is None else torch.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_planes_and_residuals_are_all_added(stored: torch.dtype, dtype: DtypeName, tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, changes=(Change(added_tokens=1),), dtype=stored)
    compressed(models, tmp_path / "delta")
    layer = "model.layers.1"
    forms = {
        EMBEDDING: (2, 0),
        f"{layer}.self_attn.q_proj.weight": (1, 3),
        f"{layer}.mlp.down_proj.weight": (4, 5),
    }
    rich = enriched(tmp_path / "delta", tmp_path / "rich", forms)
    merge(MergeConfig(str(models.base), rich, tmp_path / "merged", dtype))
    checkpoint, plain = Checkpoint.open(tmp_path / "merged"), variant_tensors(models.base, tmp_path / "delta")
    for name, tensor in variant_tensors(models.base, rich).items():
        assert torch.equal(checkpoint.read(name), tensor.to(getattr(torch, dtype))), name
        assert torch.equal(tensor, plain[name]) == (name not in forms)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float32_is_rounded_to_what_is_asked(dtype: DtypeName, tmp_path: Path) -> None:
    merged(make_pair("qwen2", tmp_path), tmp_path, dtype)


@pytest.mark.parametrize(
    ("architecture", "tied", "expected"),
    [("qwen2", None, True), ("qwen2", False, False), ("llama", None, False), ("llama", True, False)],
)
def test_a_merged_variant_is_tied_where_both_models_are(
    architecture: str, tied: bool | None, expected: bool, tmp_path: Path
) -> None:
    checkpoint = merged(make_pair(architecture, tmp_path, changes=(Change(2, tied=tied),)), tmp_path)
    assert checkpoint.config["tie_word_embeddings"] is expected
    assert checkpoint.config["vocab_size"] == VOCAB_SIZE + 2
    assert (checkpoint.head_name is None) is expected
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.path)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (embedding.data_ptr() == head.data_ptr()) is expected


def test_a_head_untied_and_left_as_the_base_s_embedding_is_written(tmp_path: Path) -> None:
    models = make_pair("qwen2", tmp_path, changes=(Change(tied=False),))
    embedding = Checkpoint.open(models.base).read(EMBEDDING)
    rewrite(models.finetunes[0], lambda tensors: tensors.update({HEAD: embedding}))
    assert torch.equal(merged(models, tmp_path).read(HEAD), embedding)


def test_the_variants_own_files_go_with_it(tmp_path: Path) -> None:
    change = Change(
        2, chat_template=CHAT_TEMPLATE, generation={"eos_token_id": [257, 5], "max_new_tokens": 7}
    )
    path = merged(make_pair("llama", tmp_path, changes=(change,)), tmp_path).path
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert len(tokenizer) == VOCAB_SIZE + 2
    assert GenerationConfig.from_pretrained(path).max_new_tokens == 7
    assert json.loads((path / "config.json").read_text())["eos_token_id"] == [257, 5]


def test_templates_with_names_go_with_it(tmp_path: Path) -> None:
    templates = {"default": CHAT_TEMPLATE, "tool_use": "T"}
    change = Change(chat_template=templates)
    path = merged(make_pair("llama", tmp_path, changes=(change,)), tmp_path).path
    assert AutoTokenizer.from_pretrained(path).chat_template == templates


def test_the_bases_files_go_with_a_variant_that_shares_them(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path)
    path = merged(models, tmp_path).path
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (path / name).read_bytes() == (models.base / name).read_bytes()
    assert (path.stat().st_mode & 0o777) == 0o755


def test_a_large_model_is_written_in_shards_with_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "compressor.convert.merge.split_into_shards", lambda outputs: split_into_shards(outputs, 100_000)
    )
    models = make_pair("llama", tmp_path)
    path = merged(models, tmp_path).path
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(list(path.glob("model-*-of-*.safetensors"))) > 1
    assert AutoModelForCausalLM.from_pretrained(path).config.vocab_size == VOCAB_SIZE


def test_shards_hold_no_more_than_they_may() -> None:
    outputs = [
        OutputTensor(str(number), "BF16", (size,))
        for number, size in enumerate([40, 20, 200, 10, 10, 10, 30])
    ]
    shards = split_into_shards(outputs, 100)
    names = ["".join(output.name for output in shard.outputs) for shard in shards]
    assert names == ["0", "1", "2", "345", "6"]
    assert [shard.file for shard in split_into_shards(outputs)] == ["model.safetensors"]


def refused(config: MergeConfig, kind: type[PeraxisError]) -> str:
    before = sorted(config.delta.parent.rglob("*"))
    with pytest.raises(kind) as caught:
        merge(config)
    assert sorted(config.delta.parent.rglob("*")) == before
    return str(caught.value)


@pytest.fixture
def config(tmp_path: Path) -> MergeConfig:
    models = make_pair("llama", tmp_path)
    compressed(models, tmp_path / "delta")
    return MergeConfig(str(models.base), tmp_path / "delta", tmp_path / "merged")


def test_another_base_is_refused(config: MergeConfig) -> None:
    rewrite(Path(config.base), lambda tensors: tensors[EMBEDDING].add_(1))
    assert "compress the fine-tune against this base again" in refused(config, BaseMismatch)


def test_a_broken_artifact_is_refused(config: MergeConfig) -> None:
    config.delta.write_bytes(config.delta.read_bytes()[:-1])
    assert "truncated" in refused(config, ArtifactError)


def test_weights_beyond_float16_are_refused_and_not_made_infinite(tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, dtype=torch.bfloat16)
    for directory in (models.base, models.finetunes[0]):
        rewrite(directory, lambda tensors: tensors[EMBEDDING].mul_(1e6))
    compressed(models, tmp_path / "delta")
    config = MergeConfig(str(models.base), tmp_path / "delta", tmp_path / "merged", "float16")
    assert f"'{EMBEDDING}' goes beyond float16" in refused(config, UsageError)


def test_a_directory_that_holds_something_is_not_overwritten(config: MergeConfig) -> None:
    config.out.mkdir()
    (config.out / "notes.txt").write_text("mine")
    assert "it is there already" in refused(config, UsageError)


def test_an_empty_directory_is_filled(config: MergeConfig) -> None:
    config.out.mkdir()
    assert merge(config).size_bytes > 0
    assert (config.out / "model.safetensors").exists()


def test_a_parent_that_is_not_there_is_refused(config: MergeConfig) -> None:
    missing = MergeConfig(config.base, config.delta, config.out / "below")
    assert "no such directory" in refused(missing, UsageError)


def test_a_full_disk_is_refused_before_work(config: MergeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert "1000 bytes are free and the checkpoint takes" in refused(config, StorageFull)


def test_a_disk_that_fills_up_leaves_nothing(config: MergeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_a_part(directory: Path, *_: object) -> None:
        (directory / "model.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("compressor.convert.merge.write_shard", write_a_part)
    message = refused(config, StorageFull)
    assert f"{config.out.parent}: No space left on device after 4 of " in message


def test_a_disk_that_fills_up_at_nine_tenths_leaves_nothing_and_says_what_is_missing(
    config: MergeConfig, small_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge(config)
    needed = sum(path.stat().st_size for path in config.out.iterdir())
    disk = small_disk(needed * 9 // 10)
    usage = shutil.disk_usage
    answers = iter([SimpleNamespace(free=needed)])  # there is room until the merge has begun
    monkeypatch.setattr(shutil, "disk_usage", lambda path: next(answers, None) or usage(path))
    with pytest.raises(StorageFull) as refusal:
        merge(MergeConfig(config.base, config.delta, disk / "merged"))
    found = re.fullmatch(
        r"(.*): No space left on device after (\d+) of (\d+) bytes: free at least (\d+) more there .*",
        str(refusal.value),
    )
    assert found is not None
    assert found[1] == str(disk)
    written, whole, missing = (int(found[group]) for group in (2, 3, 4))
    assert whole - written - 4096 <= missing <= whole - written
    assert needed * 8 // 10 < written < whole <= needed
    assert list(disk.iterdir()) == []


def test_a_vocabulary_padded_to_a_multiple_of_64_goes_all_the_way(tmp_path: Path) -> None:
    padding = -VOCAB_SIZE % 64
    assert padding > 0
    models = make_pair("llama", tmp_path, changes=(Change(added_tokens=padding),))
    checkpoint = merged(models, tmp_path)
    with Artifact.open(tmp_path / "delta") as artifact:
        check_artifact(artifact)
        check_base(artifact, Base.of(Checkpoint.open(models.base)))
        assert artifact.manifest.tensors[EMBEDDING].added_rows == padding
    assert checkpoint.read(EMBEDDING).shape[0] % 64 == checkpoint.read(HEAD).shape[0] % 64 == 0
    added = Checkpoint.open(models.finetunes[0]).read(EMBEDDING)[VOCAB_SIZE:]
    assert torch.equal(checkpoint.read(EMBEDDING)[VOCAB_SIZE:], added)


@pytest.mark.parametrize(
    "own",
    [
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"_attn_implementation": "flash_attention_2"},
        {"attn_implementation": "flash_attention_3", "quantization_config": {"quant_method": "awq"}},
    ],
)
def test_how_a_base_was_packed_and_loaded_stays_with_the_base(own: dict[str, Any], tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path)
    path = models.base / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    checkpoint = merged(models, tmp_path)
    assert own.keys().isdisjoint(json.loads((checkpoint.path / "config.json").read_text()))
    AutoModelForCausalLM.from_pretrained(checkpoint.path)


@pytest.mark.parametrize("content", [b"5", b"[]", b"{", b"\xff"])
def test_a_generation_config_that_is_none_is_refused(
    content: bytes, config: MergeConfig, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    with Artifact.open(config.delta) as artifact, ArtifactWriter(broken) as writer:
        writer.add_file("generation_config.json", content)
        none = {"tensors": {}, "device_bytes": 0, "files": ["generation_config.json"]}
        writer.finish(artifact.manifest.model_copy(update=none))
    refusal = refused(MergeConfig(config.base, broken, config.out), ArtifactError)
    assert "broken: generation_config.json" in refusal
