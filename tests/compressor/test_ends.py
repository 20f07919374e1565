"""Embedding and output head are the tensors that transformers takes for them, however a checkpoint stores them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3ForConditionalGeneration

from compressor.adapters import finetune_directory
from compressor.config import Calibration, FitSettings
from compressor.convert.merge import MergeConfig, merge
from deltastore.base import Base
from deltastore.checkpoint import Checkpoint
from deltastore.errors import CheckpointError
from tests.compressor.helpers.compressing import SINGLE, compressed, rewrite, rewrite_config
from tests.helpers.tiny_models import Change, TinyModels, make_pair
from tests.server.helpers.served import generate, same_up_to_a_tie, serving

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Form = Callable[[Path], object]


def without_key(directory: Path) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    del config["tie_word_embeddings"]
    path.write_text(json.dumps(config))


def tie(directory: Path) -> None:
    rewrite_config(directory, tie_word_embeddings=True)


def head_alone(directory: Path) -> None:
    tie(directory)
    rewrite(directory, lambda tensors: tensors.pop(EMBEDDING))


def embedding_alone(directory: Path) -> None:
    tie(directory)
    rewrite(directory, lambda tensors: tensors.pop(HEAD))


def both_equal(directory: Path) -> None:
    tie(directory)
    rewrite(directory, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))


def both_equal_untied(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))


def without_prefix(directory: Path) -> None:
    tensors = load_file(directory / SINGLE)
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, directory / SINGLE)


def then(*forms: Form) -> Form:
    return lambda directory: [form(directory) for form in forms]


# Of a checkpoint with a head of its own.
FORMS: Mapping[str, Form] = {
    "as saved": lambda _: None,
    "no key": without_key,
    "embedding alone": embedding_alone,
    "head alone": head_alone,
    "both equal": both_equal,
    "both equal and untied": both_equal_untied,
    "both equal and no key": then(both_equal_untied, without_key),
    "both different and tied": tie,
}
WITHOUT_A_HEAD: Mapping[str, Form] = {
    "untied": lambda directory: rewrite(directory, lambda tensors: tensors.pop(HEAD)),
    "no key": then(without_key, lambda directory: rewrite(directory, lambda tensors: tensors.pop(HEAD))),
    "no embedding": lambda directory: rewrite(directory, lambda tensors: tensors.pop(EMBEDDING)),
    "no embedding, no prefix": then(
        lambda directory: rewrite(directory, lambda tensors: tensors.pop(EMBEDDING)), without_prefix
    ),
}


def ends(directory: Path) -> list[Tensor]:
    """Return embedding and output head as transformers loads them; it misses none."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    model, info = loaded
    assert not info["missing_keys"]
    return [model.get_input_embeddings().weight, model.get_output_embeddings().weight]


@pytest.mark.parametrize("prefix", [True, False], ids=["", "without a prefix"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma", "gpt_neox"])
@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_is_tied_where_transformers_ties_it(
    form: str, architecture: str, prefix: bool, tmp_path: Path
) -> None:
    base = make_pair(architecture, tmp_path, changes=(), tie_word_embeddings=False).base
    if architecture == "gpt_neox" and (
        form not in ("as saved", "no key", "both different and tied") or not prefix
    ):
        pytest.skip("its tensors have names of their own")
    FORMS[form](base)
    if not prefix:
        without_prefix(base)
    embedding, head = ends(base)
    checkpoint = Checkpoint.open(base)
    assert checkpoint.tied is (embedding is head)
    assert (checkpoint.head_name is None) is checkpoint.tied
    assert torch.equal(checkpoint.read(str(checkpoint.embedding_name)), embedding)
    assert torch.equal(checkpoint.read(checkpoint.head_name or str(checkpoint.embedding_name)), head)


@pytest.mark.parametrize("form", WITHOUT_A_HEAD)
def test_a_missing_end_is_an_error(form: str, tmp_path: Path) -> None:
    base = make_pair("llama", tmp_path, changes=()).base
    WITHOUT_A_HEAD[form](base)
    missing = EMBEDDING if "embedding" in form else HEAD
    with pytest.raises(CheckpointError, match=f"'{missing}' is in none of its shards"):
        Checkpoint.open(base)


@pytest.mark.parametrize("said", [{}, {"tie_word_embeddings": False}, {"tie_word_embeddings": True}])
def test_a_wrapper_is_tied_where_transformers_ties_it(said: dict[str, bool], tmp_path: Path) -> None:
    """Its own key decides; its text part says the contrary."""
    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config: Any = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4, tie_word_embeddings=False,
        image_token_index=63, boi_token_index=62, eoi_token_index=61,
    )  # fmt: skip
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    del document["tie_word_embeddings"]
    document["text_config"]["tie_word_embeddings"] = not said.get("tie_word_embeddings", True)
    (tmp_path / "config.json").write_text(json.dumps({**document, **said}))
    if said.get("tie_word_embeddings", True):
        rewrite(tmp_path, lambda tensors: [tensors.pop(name) for name in [*tensors] if name.endswith(HEAD)])
    embedding, head = ends(tmp_path)
    assert Checkpoint.open(tmp_path).tied is (embedding is head)


def test_two_forms_of_one_tied_base_have_one_fingerprint(tmp_path: Path) -> None:
    base = make_pair("qwen2", tmp_path, changes=()).base
    for form in ("twice", "alone"):
        shutil.copytree(base, tmp_path / form)
    rewrite(tmp_path / "twice", lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    rewrite(tmp_path / "alone", lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}))
    prints = {
        Base.of(Checkpoint.open(each)).fingerprint for each in (base, tmp_path / "twice", tmp_path / "alone")
    }
    assert len(prints) == 1


@pytest.mark.parametrize("finetune", FORMS)
@pytest.mark.parametrize("base", FORMS)
def test_a_merged_and_a_served_variant_have_the_ends_that_transformers_loads(
    base: str, finetune: str, tmp_path: Path
) -> None:
    models = make_pair("llama", tmp_path)
    FORMS[base](models.base)
    FORMS[finetune](models.finetunes[0])
    delta, out = tmp_path / "delta.safetensors", tmp_path / "merged"
    compressed(models, delta, embeddings="whole")
    merge(MergeConfig(str(models.base), delta, out))
    for merged, own in zip(ends(out), ends(models.finetunes[0]), strict=True):
        assert torch.equal(merged, own)
    if finetune in ("as saved", "head alone"):
        check_served(models, delta, out, tmp_path)


@pytest.mark.parametrize("form", ["both different and tied", "both equal", "head alone"])
def test_a_fit_takes_the_ends_that_transformers_loads(form: str, tmp_path: Path) -> None:
    """A fit that took another head for the fine-tune's would make a delta far from it."""
    models = make_pair("llama", tmp_path, changes=(Change(noise=0.1),))
    for directory in (models.base, models.finetunes[0]):
        FORMS[form](directory)
    settings = FitSettings(Calibration("self", 12, 16), distill_epochs=1)
    written = compressed(models, tmp_path / "delta", fit_settings=settings)
    said = written.manifest.fidelity["held_out"]["kl"]
    merge(MergeConfig(str(models.base), tmp_path / "delta", tmp_path / "merged"))
    ids = torch.arange(200)[None] * 97 % 256
    with torch.inference_mode():
        both: list[Any] = [
            AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32)
            for each in (models.finetunes[0], tmp_path / "merged")
        ]
        logits = [model(ids).logits[0].log_softmax(-1) for model in both]
    kl = float((logits[0].exp() * (logits[0] - logits[1])).sum(-1).mean())
    assert said / 4 < kl < 4 * said


def check_served(models: TinyModels, delta: Path, out: Path, tmp_path: Path) -> None:
    prompt = [10, 20, 30]
    with serving(models.base, tmp_path / "registry", slot_headroom=16.0) as served:
        for record, directory in ((None, models.base), (served.publish(delta, "variant"), out)):
            reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
            tokens, margins = generate(reference, prompt, 8)
            answer = served.ask(record, prompt, max_new_tokens=8).token_ids
            assert same_up_to_a_tie(answer, tokens, margins)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # what peft itself warns of
@pytest.mark.parametrize("form", ["both different and tied", "both equal", "head alone"])
@pytest.mark.parametrize("added", [0, 3])
def test_an_adapter_keeps_the_ends_of_its_base(form: str, added: int, tmp_path: Path) -> None:
    base = make_pair("llama", tmp_path, changes=()).base
    FORMS[form](base)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    embedding, head = (
        end.weight.clone() for end in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    if added:
        if form == "both different and tied":
            model.config.tie_word_embeddings = False
        model.resize_token_embeddings(len(embedding) + added, mean_resizing=False)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    adapted.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=bool(added))
    with finetune_directory(str(tmp_path / "adapter"), base) as directory:
        assert Checkpoint.open(directory).tied is Checkpoint.open(base).tied
        merged = ends(directory)
    assert torch.equal(merged[0][: len(embedding)], embedding)
    assert torch.equal(merged[1][: len(head)], head)
