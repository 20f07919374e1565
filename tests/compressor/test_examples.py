"""Tests of a model card's examples: greedy continuations of base, fine-tune and delta, decoded to text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.convert.merge import MergeConfig, merge
from compressor.decoder.weights import DeltaModel, base_with_added_rows
from compressor.pairs import pair_up
from compressor.tasks import NEW_TOKENS, PROMPT_TOKENS, Example, examples
from deltastore.checkpoint import Checkpoint
from deltastore.errors import CheckpointError
from deltastore.format.artifact import Artifact
from deltastore.format.files import TOKENIZER_FILES
from tests.compressor.helpers.compressing import compressed, rewrite
from tests.compressor.helpers.decoders import CPU, whole_model
from tests.helpers.tiny_models import Change, TinyModels, make_pair, make_tokenizer

SENTENCES = ("The quick brown fox jumps over", "It was the best of times, and")
TEXTS = [torch.tensor(make_tokenizer()(sentence)["input_ids"]) for sentence in SENTENCES]
LENGTH = len(TEXTS[1]) // 2
LETTER = int(TEXTS[0][0])


def pair(directory: Path, **config: Any) -> TinyModels:
    models = make_pair("llama", directory, changes=(Change(added_tokens=2),), **config)
    compressed(models, directory / "delta")
    return models


def written(models: TinyModels, texts: list[torch.Tensor] = TEXTS) -> list[Example]:
    base, finetune = map(Checkpoint.open, (models.base, models.finetunes[0]))
    with Artifact.open(models.base.parent / "delta") as artifact:
        students = base_with_added_rows(pair_up(base, finetune)), DeltaModel(base, artifact)
        return examples(students[0], finetune, students[1], texts, CPU)


def greedy(directory: Path, text: torch.Tensor, length: int) -> str:
    """Return the continuation by transformers of the first tokens of a text."""
    prompt = text[None, :length]
    ids = whole_model(directory).generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    return str(make_tokenizer(2).decode(ids[0, length:]))


def test_fine_tune_and_delta_go_on_as_generate_does(tmp_path: Path) -> None:
    models = pair(tmp_path)
    merge(MergeConfig(str(models.base), tmp_path / "delta", tmp_path / "merged", "float32"))
    for sentence, text, example in zip(SENTENCES, TEXTS, written(models), strict=True):
        assert example.prompt == sentence[:LENGTH]
        assert example.finetune == greedy(models.finetunes[0], text, LENGTH)
        assert example.delta == greedy(tmp_path / "merged", text, LENGTH)
        assert len({example.base, example.finetune, example.delta}) == 3


def test_a_prompt_is_never_longer_than_its_bound(tmp_path: Path) -> None:
    (example,) = written(pair(tmp_path), [torch.full((200,), LETTER)])
    assert example.prompt == "T" * PROMPT_TOKENS


def test_a_continuation_ends_where_the_finetunes_generation_does(tmp_path: Path) -> None:
    models = pair(tmp_path)
    finetune, prompt = models.finetunes[0], TEXTS[0][None, :LENGTH]
    third = int(whole_model(finetune).generate(prompt, max_new_tokens=3, do_sample=False)[0, -1])
    path = finetune / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [257, third]}))
    example = written(models)[0]
    assert example.finetune == greedy(finetune, TEXTS[0], LENGTH)
    assert example.finetune.endswith(str(make_tokenizer().decode([third])))
    assert len(example.finetune) <= 3


def test_a_model_of_few_positions_writes_less(tmp_path: Path) -> None:
    models = pair(tmp_path, max_position_embeddings=20)
    example = written(models, [torch.full((20,), LETTER)])[0]
    assert example.prompt == "T" * 10
    assert len(example.finetune.encode()) < 60  # ten tokens, of which a half character takes three bytes


def test_without_a_tokenizer_there_are_no_examples(tmp_path: Path) -> None:
    models = pair(tmp_path)
    for name in TOKENIZER_FILES:
        (models.finetunes[0] / name).unlink(missing_ok=True)
    assert written(models) == []


def test_without_text_there_are_no_examples(tmp_path: Path) -> None:
    assert written(pair(tmp_path), []) == []


def test_a_model_whose_logits_are_not_finite_is_named(tmp_path: Path) -> None:
    models = pair(tmp_path)
    rewrite(models.finetunes[0], lambda tensors: tensors["lm_head.weight"][:256].fill_(3e38))
    with pytest.raises(CheckpointError, match=r"finetune-0: its logits are not finite"):
        written(models)
