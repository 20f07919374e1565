"""Measurements of the demo: the score of a checkpoint at a task, and times to the first token.

A score is the share of items whose answer is reproduced exactly.

A cold start begins with files on disk and a running process, ends with the first token, and leaves every byte in the
process's own memory. The full checkpoint has an advantage: its model is built already and lacks only weights.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from peraxis.demo import page_cache
from peraxis.demo.service import ServerClient, ServerFailed
from peraxis.demo.tasks import Item, Task
from peraxis.demo.train import prompt_ids

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


REPEATS = 10


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Median seconds of ten first tokens: of a resident model, and of one that is read from files."""

    resident_s: float
    warm_s: float  # files in the page cache
    dropped_s: float  # files dropped from it
    dropped: bool  # True if the files were verified to be out of the cache each time


def delta_first_tokens(service: ServerClient, variant: str, prompt: str, artifact: Path) -> FirstTokens:
    """Measure a variant of a running server, which unloads it before each cold start.

    Args:
        service: The running server.
        variant: The variant's name.
        prompt: The prompt of the first token.
        artifact: The stored object that the server reads.

    Raises:
        ServerFailed: The server had unloaded the variant when it should not, or had not when it should.
    """

    def ask(is_cold: bool) -> float:
        timings = service.generate(variant, {"prompt": prompt, "max_new_tokens": 1})["timings"]
        if timings["cold"] != is_cold:
            raise ServerFailed(
                f"variant {variant!r} was {'loaded already' if is_cold else 'unloaded'}: nothing else may use the "
                "demo's server"
            )
        return float(timings["ttft_s"])

    def cold() -> float:
        service.unload(variant)
        return ask(is_cold=True)

    return _measure(cold, lambda: ask(is_cold=False), [artifact])


def checkpoint_first_tokens(directory: Path, prompt: str) -> FirstTokens:
    """Measure a full checkpoint: read its weights into a model without any, then compute one token."""
    ids = torch.tensor([AutoTokenizer.from_pretrained(directory)(prompt)["input_ids"]])
    config = AutoConfig.from_pretrained(directory)
    files = sorted(directory.glob("*.safetensors"))
    dtype = next(iter(load_file(files[0]).values())).dtype

    def empty_model() -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        return model

    def cold() -> float:
        return _load_and_run(empty_model(), files, ids)

    resident = empty_model()
    _load_and_run(resident, files, ids)
    return _measure(cold, lambda: _load_and_run(resident, [], ids), files)


@torch.inference_mode()
def _load_and_run(model: PreTrainedModel, files: Sequence[Path], ids: torch.Tensor) -> float:
    started = time.perf_counter()
    for file in files:
        # Copies, because the tensors of safetensors are views of the mapped file.
        model.load_state_dict(load_file(file), strict=False)
    int(model(input_ids=ids, use_cache=True, logits_to_keep=1).logits.argmax())
    return time.perf_counter() - started


def _measure(cold: Callable[[], float], resident: Callable[[], float], files: Sequence[Path]) -> FirstTokens:
    # The first call also pays for work that later calls do not repeat.
    cold()
    from_memory, warm, dropped, gone = [], [], [], []
    for _ in range(REPEATS):
        warm.append(cold())
        from_memory.append(resident())
        gone.append(page_cache.drop(files))
        dropped.append(cold())
    return FirstTokens(
        statistics.median(from_memory), statistics.median(warm), statistics.median(dropped), all(gone)
    )
