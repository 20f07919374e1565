"""The score of a checkpoint at a task: the share of items whose answer it reproduces exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from peraxis.demo.tasks import Item, Task
from peraxis.demo.tokenizer import prompt_ids

BATCH_ROWS = 128


def exact_match(directory: Path, task: Task, items: list[Item]) -> float:
    """Return the share of `items`, from 0 to 1, that a saved checkpoint answers right, decoding greedily in float32.

    Weights, tokenizer and generation defaults are those on disk.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    right = 0
    for start in range(0, len(items), BATCH_ROWS):
        batch = items[start : start + BATCH_ROWS]
        texts = answers(model, tokenizer, task, batch)
        right += sum(task.is_right(item, text) for item, text in zip(batch, texts, strict=True))
    return right / len(items)


@torch.inference_mode()
def answers(model: Any, tokenizer: PreTrainedTokenizerBase, task: Task, items: list[Item]) -> list[str]:
    """Generate answers to all items in one batch, each up to its end token or the task's limit."""
    prompts = [prompt_ids(tokenizer, item) for item in items]
    longest = max(map(len, prompts))
    missing = [longest - len(prompt) for prompt in prompts]
    padded = [[tokenizer.pad_token_id] * gap + prompt for gap, prompt in zip(missing, prompts, strict=True)]
    input_ids = torch.tensor(padded)
    output = model.generate(
        input_ids=input_ids,
        attention_mask=(torch.arange(longest) >= torch.tensor(missing)[:, None]).long(),
        max_new_tokens=task.max_new_tokens,
        do_sample=False,
    )
    return list(tokenizer.batch_decode(output[:, longest:], skip_special_tokens=True))
