"""Tests of adapters as fine-tunes: merged as peft merges them, removed afterwards, refused if they do not fit."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from compressor.adapters import finetune_directory, is_adapter
from compressor.config import CompressConfig
from compressor.pipeline import compress
from compressor.sources import own_files
from deltastore.checkpoint import Checkpoint
from deltastore.errors import CheckpointError, PeraxisError, StorageFull, UsageError
from tests.compressor.helpers.compressing import rewrite_config
from tests.helpers.tiny_models import CHAT_TEMPLATE, VOCAB_SIZE, make_pair, make_tokenizer

IDS = torch.arange(5, 30)[None]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
KINDS: dict[str, Callable[[], Any]] = {
    "lora": lambda: lora("q_proj", "v_proj"),
    "dora": lambda: lora("q_proj", "down_proj", use_dora=True),
    "rslora": lambda: lora("q_proj", use_rslora=True),
    "biases": lambda: lora("q_proj", bias="all"),
    "whole modules": lambda: lora("q_proj", modules_to_save=["embed_tokens", "lm_head"]),
    "tokens": lambda: lora("q_proj", trainable_token_indices=[1, 7]),
    "embeddings": lambda: lora("q_proj", "embed_tokens", "lm_head"),
    "ia3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "loha": lambda: peft.LoHaConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]),
}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set the temporary directory of merged adapters; it must be empty after each test."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with warnings.catch_warnings():  # what peft itself warns of while a test makes its adapter
        warnings.simplefilter("ignore")
        yield place
    assert not list(place.iterdir())


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_pair("llama", tmp_path, dtype=torch.bfloat16).base


def lora(*modules: str, **config: Any) -> Any:
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=list(modules), **config)


def loaded(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


def make_adapter(base: Path, config: Any, num_rows: int = VOCAB_SIZE) -> Path:
    """An adapter of random numbers, saved by peft itself."""
    directory, generator = base.parent / "adapter", torch.Generator().manual_seed(0)
    model = loaded(base)
    if num_rows > VOCAB_SIZE:
        model.resize_token_embeddings(num_rows, mean_resizing=False)
    adapted = peft.get_peft_model(model, config)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(directory)
    return directory


def refused(adapter: Path, base: Path, expected: type[PeraxisError] = CheckpointError) -> str:
    with pytest.raises(expected) as caught, finetune_directory(str(adapter), base):
        pytest.fail("it was merged")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_becomes_the_checkpoint_that_peft_merges(kind: str, base: Path) -> None:
    adapter = make_adapter(base, KINDS[kind]())
    expected = peft.PeftModel.from_pretrained(loaded(base), adapter).merge_and_unload().state_dict()
    with finetune_directory(str(adapter), base) as directory:
        merged = load_file(directory / "model.safetensors")
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], expected[name]) for name in merged)
    own = load_file(base / "model.safetensors")
    assert any(not torch.equal(merged[name], own[name].float()) for name in merged)


def warned(adapter: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    with finetune_directory(str(adapter), base):
        return capsys.readouterr().err


def test_an_adapter_over_another_base_of_the_same_shapes_is_warned_of(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = make_adapter(base, lora("q_proj"))
    other = make_pair("llama", tmp_path / "other", seed=1).base
    assert warned(adapter, base, capsys) == ""
    shutil.copytree(base, tmp_path / "copy")
    assert warned(adapter, tmp_path / "copy", capsys) == ""
    line = warned(adapter, other, capsys)
    assert line.startswith(
        f"warning: {adapter}: it was trained on {str(base)!r}, and {other} is another model"
    )
    assert line.count("\n") == 1


def test_an_adapter_of_a_hub_base_is_warned_of_where_the_base_says_that_it_is_another(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = make_adapter(base, lora("q_proj"))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": "some/base"})
    )
    assert warned(adapter, base, capsys) == ""  # it may be
    for name, is_warned in (("some/base", False), ("another/base", True)):
        rewrite_config(base, _name_or_path=name)
        assert ("it was trained on 'some/base'" in warned(adapter, base, capsys)) is is_warned


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_merged_checkpoint_answers_as_the_base_with_the_adapter_beside_it(
    architecture: str, kind: str, tmp_path: Path
) -> None:
    base = make_pair(architecture, tmp_path).base
    adapter = make_adapter(base, KINDS[kind]())
    expected = logits(peft.PeftModel.from_pretrained(loaded(base), adapter).eval())
    with finetune_directory(str(adapter), base) as directory:
        torch.testing.assert_close(logits(loaded(directory)), expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_on_one_use_of_a_tied_embedding_unties_the_head(tmp_path: Path) -> None:
    base = make_pair("qwen2", tmp_path).base
    with finetune_directory(str(make_adapter(base, lora("embed_tokens"))), base) as directory:
        merged = load_file(directory / "model.safetensors")
    own = load_file(base / "model.safetensors")
    assert torch.equal(merged[HEAD], own[EMBEDDING])
    assert not torch.equal(merged[EMBEDDING], own[EMBEDDING])


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["lora", "whole modules", "embeddings", "tokens"])
def test_added_tokens_come_with_their_rows(kind: str, architecture: str, tmp_path: Path) -> None:
    base = make_pair(architecture, tmp_path).base
    adapter = make_adapter(base, KINDS[kind](), VOCAB_SIZE + 3)
    wide = loaded(base)
    wide.resize_token_embeddings(VOCAB_SIZE + 3, mean_resizing=False)
    expected = logits(peft.PeftModel.from_pretrained(wide, adapter).eval())
    with finetune_directory(str(adapter), base) as directory:
        torch.testing.assert_close(logits(loaded(directory)), expected, rtol=1e-4, atol=1e-4)
        manifest = compress(CompressConfig(str(base), str(directory), tmp_path / "delta")).manifest
    assert manifest.tensors[EMBEDDING].added_rows == 3


def test_the_adapters_own_tokenizer_is_the_fine_tunes(base: Path) -> None:
    adapter = make_adapter(base, lora("q_proj"))
    make_tokenizer(0, CHAT_TEMPLATE).save_pretrained(adapter)
    (base / "vocab.json").write_text("{}")  # of the base's tokenizer, and no part of this one
    with finetune_directory(str(adapter), base) as directory:
        files = own_files(Checkpoint.open(base), Checkpoint.open(directory))
    assert files.keys() == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


def test_what_an_adapter_leaves_alone_is_not_in_its_delta(base: Path) -> None:
    with finetune_directory(str(make_adapter(base, lora("q_proj"))), base) as directory:
        manifest = compress(CompressConfig(str(base), str(directory), base.parent / "delta")).manifest
    assert manifest.tensors.keys() == {QUERY, QUERY.replace(".0.", ".1.")}
    assert manifest.files == []


def test_a_chat_template_alone_joins_the_bases_tokenizer(base: Path) -> None:
    adapter = make_adapter(base, lora("q_proj"))
    (adapter / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (adapter / "additional_chat_templates").mkdir()
    (adapter / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    (adapter / "generation_config.json").write_text('{"max_new_tokens": 9}')
    with finetune_directory(str(adapter), base) as directory:
        files = own_files(Checkpoint.open(base), Checkpoint.open(directory))
    assert files["chat_template.jinja"] == CHAT_TEMPLATE.encode()
    assert files["additional_chat_templates/tool_use.jinja"] == b"T"
    assert files["tokenizer.json"] == (base / "tokenizer.json").read_bytes()
    assert files["generation_config.json"] == b'{"max_new_tokens": 9}'


def test_a_base_without_a_generation_config_gives_none(base: Path) -> None:
    (base / "generation_config.json").unlink()
    with finetune_directory(str(make_adapter(base, lora("q_proj"))), base) as directory:
        assert own_files(Checkpoint.open(base), Checkpoint.open(directory)) == {}


def test_a_checkpoint_is_given_as_it_is_and_stays(base: Path) -> None:
    with finetune_directory(str(base), base) as directory:
        assert directory == base
    assert (base / "model.safetensors").exists()
    (base / "adapter_config.json").write_text("{}")  # left from its training
    assert not is_adapter(base)


def test_nothing_stays_where_the_block_fails(base: Path, temporary: Path) -> None:
    def interrupted() -> None:
        with finetune_directory(str(adapter), base) as directory:
            assert directory.parent == temporary
            raise KeyboardInterrupt

    adapter = make_adapter(base, lora("q_proj"))
    with pytest.raises(KeyboardInterrupt):
        interrupted()


def test_nothing_is_printed(base: Path, capfd: pytest.CaptureFixture[str]) -> None:
    adapter = make_adapter(base, lora("q_proj"))
    capfd.readouterr()
    with finetune_directory(str(adapter), base):
        assert capfd.readouterr() == ("", "")


def test_an_adapter_of_a_base_of_other_sizes_is_refused(tmp_path: Path) -> None:
    base = make_pair("llama", tmp_path / "one").base
    other = make_pair("llama", tmp_path / "other", hidden_size=80).base
    assert "give the base that it was trained on" in refused(make_adapter(other, lora("q_proj")), base)


def test_an_adapter_of_a_deeper_base_is_refused(tmp_path: Path) -> None:
    base = make_pair("llama", tmp_path / "one").base
    other = make_pair("llama", tmp_path / "other", num_hidden_layers=3).base
    message = refused(make_adapter(other, lora("q_proj")), base)
    assert "the base has no parameter for tensor 'base_model.model.model.layers.2." in message


def test_an_adapter_with_a_tensor_missing_is_refused(base: Path) -> None:
    adapter = make_adapter(base, lora("q_proj"))
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors.popitem()
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    assert "it lacks tensor 'base_model.model.model.layers" in refused(adapter, base)


def test_modules_that_the_base_lacks_are_refused(base: Path) -> None:
    adapter = make_adapter(base, lora("q_proj"))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(
        json.dumps({**config, "target_modules": ["query_key_value"]})
    )
    assert "peft cannot merge it" in refused(adapter, base)


def test_rows_for_the_embedding_alone_are_refused(base: Path) -> None:
    adapter = make_adapter(base, lora("q_proj"), VOCAB_SIZE + 3)
    tensors = load_file(adapter / "adapter_model.safetensors")
    del tensors[f"base_model.model.{HEAD}"]
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    assert "save the adapter with save_embedding_layers=True" in refused(adapter, base)


def test_an_adapter_that_changes_no_weights_is_refused(base: Path) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    assert "kind 'PROMPT_TUNING' changes no weights" in refused(make_adapter(base, config), base)


def test_an_adapter_that_peft_cannot_merge_is_refused_in_its_words(base: Path) -> None:
    # Acts only behind these tokens.
    adapter = make_adapter(base, lora("q_proj", alora_invocation_tokens=[5, 6]))
    assert "aLoRA does not support safe merging" in refused(adapter, base)


def test_a_merge_that_changes_answers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_pair("qwen2", tmp_path).base
    # Not untied, so the tied head changes too.
    monkeypatch.setattr("compressor.adapters._untie", lambda peft, model: None)
    adapter = make_adapter(base, lora("embed_tokens"))
    assert "merged, it answers otherwise than beside its base" in refused(adapter, base)


def test_nan_in_an_adapter_is_refused(base: Path) -> None:
    adapter = make_adapter(base, lora("q_proj"))
    tensors = load_file(adapter / "adapter_model.safetensors")
    next(iter(tensors.values())).fill_(float("nan"))
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    assert "NaN" in refused(adapter, base)


def test_a_pickled_adapter_is_refused_with_the_way_to_convert_it(base: Path) -> None:
    adapter = make_adapter(base, lora("q_proj"))
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    assert "adapter_model.bin is a pickle and is not loaded: convert it" in refused(adapter, base)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_damaged_adapter_is_refused(file: str, base: Path) -> None:
    adapter = make_adapter(base, lora("q_proj"))
    (adapter / file).write_bytes((adapter / file).read_bytes()[:300])
    assert "peft cannot merge it" in refused(adapter, base)


def test_an_unknown_kind_is_refused(base: Path) -> None:
    adapter = make_adapter(base, lora("q_proj"))
    (adapter / "adapter_config.json").write_text('{"peft_type": "NOVEL"}')
    assert "peft cannot merge it" in refused(adapter, base)


def test_a_missing_library_is_named_with_its_extra(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = make_adapter(base, lora("q_proj"))
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "pip install 'peraxis[lora]'" in refused(adapter, base, UsageError)


def test_a_full_disk_is_refused_before_work(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = make_adapter(base, lora("q_proj"))
    monkeypatch.setattr("compressor.adapters.shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    assert "1000 bytes are free" in refused(adapter, base, StorageFull)


def test_a_base_that_is_none_is_refused(base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(base, lora("q_proj"))
    assert "no such directory" in refused(adapter, tmp_path / "nowhere")
    rewrite_config(base, model_type="unheard-of")
    assert "transformers cannot load it" in refused(adapter, base)
