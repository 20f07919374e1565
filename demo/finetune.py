"""A full fine-tune on one task: every weight of the base moves. Knows items and weights; nothing of files.

AdamW without weight decay: nothing but the task pulls a weight away from the base's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from demo.pace import Pace, train
from demo.recipe import FinetuneRecipe
from demo.tasks import Item, Task
from demo.tokenizer import prompt_ids

IGNORED = -100  # a label that counts for no loss


@dataclass(frozen=True, slots=True)
class Batch:
    """Items as the model reads them, each ``[rows, tokens]``, padded behind."""

    input_ids: Tensor  # int64
    attention_mask: Tensor  # int64
    labels: Tensor  # int64; IGNORED in prompts and padding


def train_finetune(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    recipe: FinetuneRecipe,
    seed: int,
    progress: Callable[[str], None],
) -> None:
    """Turn `model`, the base in float32, into the fine-tune, in place. Its embedding gets rows for added tokens."""
    if len(tokenizer) > model.config.vocab_size:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    batches = _batches(tokenizer, task, recipe, seed)
    losses = (
        model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            labels=batch.labels,
            use_cache=False,
        ).loss
        for batch in batches
    )
    optimizer = AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.99), weight_decay=0.0)
    train(model, [optimizer], losses, Pace(task.name, recipe.steps, recipe.warmup, progress))


def make_batch(tokenizer: PreTrainedTokenizerBase, items: list[Item]) -> Batch:
    """Prompts, answers and the end token after each; only the latter two are learned."""
    prompts = [torch.tensor(prompt_ids(tokenizer, item)) for item in items]
    answers = [
        torch.tensor([*tokenizer(item.answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id])
        for item in items
    ]
    pairs = list(zip(prompts, answers, strict=True))
    rows = [torch.cat(pair) for pair in pairs]
    labels = [torch.cat([torch.full_like(prompt, IGNORED), answer]) for prompt, answer in pairs]
    return Batch(
        pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id),
        pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    )


def _batches(
    tokenizer: PreTrainedTokenizerBase, task: Task, recipe: FinetuneRecipe, seed: int
) -> Iterator[Batch]:
    items = task.items("train", recipe.steps * recipe.rows, seed)
    for start in range(0, len(items), recipe.rows):
        yield make_batch(tokenizer, items[start : start + recipe.rows])
