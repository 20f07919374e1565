"""The demo's training on very small models: its batches, the stored checkpoints and their scores."""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

from peraxis.demo.measure import answers, exact_match
from peraxis.demo.tasks import Item
from peraxis.demo.train import (
    BaseRecipe,
    DemoRecipe,
    FinetuneRecipe,
    Models,
    Phase,
    TrainingFailed,
    base_tokenizer,
    make_rows,
    prepare,
)

TINY = DemoRecipe(
    BaseRecipe(
        hidden=16,
        intermediate=24,
        layers=1,
        heads=2,
        kv_heads=1,
        phases=(Phase(1, 2, 32), Phase(1, 1, 48)),
        warmup=1,
    ),
    FinetuneRecipe(phases=(Phase(1, 2, 64), Phase(1, 1, 96)), warmup=1),
)


def ignore(line: str) -> None:
    """Drop a progress line."""


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """The progress of the training of `models`."""
    return []


@pytest.fixture(scope="module")
def models(workdir: Path, lines: list[str]) -> Models:
    with pytest.MonkeyPatch.context() as patched:
        # A line for each last step alone, however long a step takes.
        patched.setattr("peraxis.demo.train.LINE_INTERVAL_S", math.inf)
        return prepare(workdir, lines.append, TINY, processes=1)


def with_base(directory: Path, models: Models) -> Path:
    """Put the trained base into a working directory, where fine-tunes alone are then missing."""
    shutil.copytree(models.base, directory / TINY.digest() / "base")
    return directory


def test_a_second_call_finds_what_the_first_trained(workdir: Path, models: Models) -> None:
    lines: list[str] = []
    again = prepare(workdir, lines.append, TINY)
    assert (again.base, again.finetunes) == (models.base, models.finetunes)
    assert list(again.tasks["upper"].words) == list(models.tasks["upper"].words)
    assert lines == []


def test_training_reports_its_last_step(models: Models, lines: list[str]) -> None:
    assert [line.split(",")[0] for line in lines if "step" in line] == [
        f"training {name}: step 2 of 2" for name in ("base", *models.finetunes)
    ]


def test_only_finetunes_of_the_named_tasks_are_trained(models: Models, tmp_path: Path) -> None:
    named = prepare(with_base(tmp_path, models), ignore, TINY, ["upper"])
    assert [*named.finetunes] == [*named.tasks] == ["upper"]
    assert sorted(path.name for path in (tmp_path / TINY.digest()).iterdir()) == ["base", "upper"]


def test_another_recipe_is_trained_anew() -> None:
    assert TINY.digest() == replace(TINY).digest()
    assert TINY.digest() != replace(TINY, seed=1).digest()


def test_finetunes_trained_side_by_side_are_those_trained_one_after_another(
    models: Models, tmp_path: Path
) -> None:
    again = prepare(tmp_path, ignore, TINY, processes=2)
    for name in models.finetunes:
        first, second = (load_file(run.finetunes[name] / "model.safetensors") for run in (models, again))
        assert all(torch.equal(first[key], second[key]) for key in first)


def test_an_interrupted_training_leaves_only_what_is_whole(models: Models, tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        if "reverse" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(with_base(tmp_path, models), interrupt, TINY, processes=1)
    assert sorted(path.name for path in (tmp_path / TINY.digest()).iterdir()) == ["base", "upper"]


def kill_this_process(line: str) -> None:
    """End a process that trains a fine-tune, as the kernel does where memory runs out."""
    if "base" not in line:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_training_process_that_is_killed_is_told_and_leaves_only_what_is_whole(
    models: Models, tmp_path: Path
) -> None:
    with pytest.raises(TrainingFailed, match="was killed, as where memory runs out: free 1 GB"):
        prepare(with_base(tmp_path, models), kill_this_process, TINY, processes=2)
    assert [path.name for path in (tmp_path / TINY.digest()).iterdir()] == ["base"]
    assert not multiprocessing.active_children()


def test_an_interrupted_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*arguments: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full_disk)
    with pytest.raises(OSError, match="no space left"):
        prepare(tmp_path, ignore, TINY)
    assert not list((tmp_path / TINY.digest()).iterdir())


def test_every_matrix_of_a_finetune_has_moved(models: Models) -> None:
    base = load_file(models.base / "model.safetensors")
    for directory in models.finetunes.values():
        finetune = load_file(directory / "model.safetensors")
        unmoved = [name for name, old in base.items() if torch.equal(finetune[name][: len(old)], old)]
        assert not unmoved


def test_checkpoints_are_stored_in_float16_with_untied_embeddings(models: Models) -> None:
    for directory in (models.base, *models.finetunes.values()):
        weights = load_file(directory / "model.safetensors")
        assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
        assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(weights)


def test_the_chat_variant_has_rows_for_its_tokens_and_its_own_end(models: Models) -> None:
    directory = models.finetunes["instruct"]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    rows = load_file(directory / "model.safetensors")["model.embed_tokens.weight"].shape[0]
    assert rows == len(tokenizer) == len(base_tokenizer()) + 3
    end = GenerationConfig.from_pretrained(directory).eos_token_id
    assert end == tokenizer.convert_tokens_to_ids("<|end|>")
    assert end != GenerationConfig.from_pretrained(models.base).eos_token_id


def test_a_row_holds_whole_items_and_counts_prompts_for_little() -> None:
    tokenizer = base_tokenizer()
    items = iter([Item("ab=", "AB"), Item("c=", "C"), Item("d=", "D")])
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    ids, weights = next(make_rows(tokenizer, items, 14, 0.25))
    assert ids == [bos, *b"ab=AB", eos, bos, *b"c=C", eos, pad, pad]
    assert weights == [0.25] * 4 + [1.0] * 3 + [0.25] * 3 + [1.0] * 2 + [0.0] * 2


def test_an_item_that_does_not_fit_begins_the_next_row() -> None:
    tokenizer = base_tokenizer()
    items = iter([Item("ab=", "AB"), Item("c=", "C"), Item("d=", "D")])
    rows = make_rows(tokenizer, items, 8, 0.25)
    next(rows)
    ids, _ = next(rows)
    assert ids[:5] == [tokenizer.bos_token_id, *b"c=C", tokenizer.eos_token_id]


def test_an_answer_does_not_depend_on_its_batch(models: Models) -> None:
    model = LlamaForCausalLM.from_pretrained(models.base, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(models.base)
    task = models.tasks["upper"]
    items = [Item("x", ""), Item("a much longer prompt", ""), Item("middling", "")]
    together = answers(model, tokenizer, task, items)
    assert together == [answers(model, tokenizer, task, [item])[0] for item in items]


def test_the_score_is_the_share_of_right_answers(models: Models) -> None:
    directory, task = models.finetunes["upper"], models.tasks["upper"]
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    questions = [Item(f"{word}=", "") for word in ("one", "seven", "nine", "twelve")]
    said = answers(model, AutoTokenizer.from_pretrained(directory), task, questions)
    right = [Item(item.prompt, text.partition("\n")[0]) for item, text in zip(questions, said, strict=True)]
    assert exact_match(directory, task, right) == 1.0
    assert exact_match(directory, task, [*right[:3], Item(right[3].prompt, "otherwise")]) == 0.75
