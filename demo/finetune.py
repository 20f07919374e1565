"""A full fine-tune on one task: every weight of the base moves. Knows items and weights; nothing of files.

AdamW without weight decay: nothing but the task pulls a weight away from the base's. Items stand one after the other in
a row, each from BOS to its end token, so that a model goes on with another item where one has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from demo.pace import Pace, train
from demo.recipe import FinetuneRecipe
from demo.tasks import Item, Task
from demo.tokenizer import prompt_ids

SHORTEST_ITEM = 14  # tokens; so many items fill a row at the least


@dataclass(frozen=True, slots=True)
class Batch:
    """Items as the model reads them, each ``[rows, tokens]``, padded behind."""

    input_ids: Tensor  # int64
    weights: Tensor  # float32: how much a token counts in the loss, 0 in padding


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
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    losses = (_loss(model, batch) for batch in _batches(tokenizer, task, recipe, seed))
    optimizer = AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.99), weight_decay=0.0)
    steps = sum(phase.steps for phase in recipe.phases)
    train(model, [optimizer], losses, Pace(task.name, steps, recipe.warmup, progress))


def make_rows(
    tokenizer: PreTrainedTokenizerBase, items: Iterator[Item], tokens: int, prompt_weight: float
) -> Iterator[tuple[list[int], list[float]]]:
    """Ids and weights of rows of `tokens`: as many whole items as fit, then padding."""
    ids, weights = list[int](), list[float]()
    for item in items:
        prompt, answer = prompt_ids(tokenizer, item), _answer_ids(tokenizer, item)
        if len(ids) + len(prompt) + len(answer) > tokens:
            missing = tokens - len(ids)
            yield ids + [tokenizer.pad_token_id] * missing, weights + [0.0] * missing
            ids, weights = [], []
        ids += prompt + answer
        weights += [prompt_weight] * len(prompt) + [1.0] * len(answer)


def _answer_ids(tokenizer: PreTrainedTokenizerBase, item: Item) -> list[int]:
    return [*tokenizer(item.answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def _batches(
    tokenizer: PreTrainedTokenizerBase, task: Task, recipe: FinetuneRecipe, seed: int
) -> Iterator[Batch]:
    count = sum(phase.steps * phase.rows * (phase.tokens // SHORTEST_ITEM) for phase in recipe.phases)
    items = iter(task.items("train", count, seed))
    for phase in recipe.phases:
        rows = make_rows(tokenizer, items, phase.tokens, recipe.prompt_weight)
        for _ in range(phase.steps):
            ids, weights = zip(*(next(rows) for _ in range(phase.rows)), strict=True)
            yield Batch(torch.tensor(ids), torch.tensor(weights))


def _loss(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Mean cross entropy of the next token, each weighted."""
    logits = model(input_ids=batch.input_ids, use_cache=False).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), batch.input_ids[:, 1:].flatten(), reduction="none")
    weights = batch.weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()
