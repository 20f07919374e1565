"""A full fine-tune on one task: every weight of the base moves. Must not know files.

The optimizer is AdamW without weight decay, so that only the task moves a weight away from the base's. A row holds
several items, each from BOS to its end token, so that the model learns to begin another item where one has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from peraxis.demo.recipe import FinetuneRecipe
from peraxis.demo.tasks import Item, Task
from peraxis.demo.tokenizer import prompt_ids
from peraxis.demo.training_loop import TrainingRun, train

SHORTEST_ITEM_TOKENS = 14


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of items, right-padded."""

    input_ids: Tensor  # [rows, tokens] int64
    weights: Tensor  # [rows, tokens] float32, of each token in the loss; 0 for padding


def train_finetune(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    recipe: FinetuneRecipe,
    seed: int,
    progress: Callable[[str], None],
) -> None:
    """Train `model`, the base in float32, into the fine-tune in place. Its embedding gets rows for added tokens."""
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
    train(model, [optimizer], losses, TrainingRun(task.name, steps, recipe.warmup, progress))


def make_rows(
    tokenizer: PreTrainedTokenizerBase, items: Iterator[Item], tokens: int, prompt_weight: float
) -> Iterator[tuple[list[int], list[float]]]:
    """Yield ids and loss weights of rows of `tokens` tokens: as many whole items as fit, then padding."""
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
    # No row holds more items than this.
    count = sum(phase.steps * phase.rows * (phase.tokens // SHORTEST_ITEM_TOKENS) for phase in recipe.phases)
    items = iter(task.items("train", count, seed))
    for phase in recipe.phases:
        rows = make_rows(tokenizer, items, phase.tokens, recipe.prompt_weight)
        for _ in range(phase.steps):
            ids, weights = zip(*(next(rows) for _ in range(phase.rows)), strict=True)
            yield Batch(torch.tensor(ids), torch.tensor(weights))


def _loss(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Return the weighted mean cross entropy of the next token."""
    logits = model(input_ids=batch.input_ids, use_cache=False).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), batch.input_ids[:, 1:].flatten(), reduction="none")
    weights = batch.weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()
