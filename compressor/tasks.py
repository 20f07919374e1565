"""Judge a delta's answers: scores on tasks of lm-evaluation-harness, and continuations for people to compare.

Tasks run zero-shot and without a chat template; continuations are greedy, of base, fine-tune and delta.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compressor.sources import generation_file, tokenizer_files
from deltastore.checkpoint import Checkpoint
from deltastore.errors import CheckpointError, UsageError, failures_as
from deltastore.format.header import parse_json

if TYPE_CHECKING:
    from compressor.decoder.weights import Weights

PAPER = ("arc_challenge", "arc_easy", "hellaswag", "piqa", "winogrande")  # Table 1 of the paper
FILE_SUFFIXES = (".yaml", ".yml")
MAIN_METRICS = ("acc_norm", "acc")  # the first of them that a task has, else its first
BATCH_SIZE = 8  # requests of one forward
BOOTSTRAPS = 1000  # for standard errors of metrics that are no means
# Loggers that would write beside the one error line.
NOISY = ("lm_eval", "datasets", "huggingface_hub", "transformers")


@dataclass(frozen=True, slots=True)
class Score:
    """Metrics of one model in one task or group of tasks."""

    metric: str  # the main one
    metrics: Mapping[str, float]  # `NAME_stderr` is the standard error of `NAME`

    @property
    def value(self) -> float:
        return self.metrics[self.metric]


@dataclass(frozen=True, slots=True, eq=False)
class Tasks:
    """Loaded tasks with their data, to score several models on."""

    names: tuple[str, ...]
    loaded: Any  # from lm_eval's TaskManager

    @classmethod
    def load(cls, names: Sequence[str]) -> Tasks:
        """Find tasks and fetch their data.

        Args:
            names: tasks and groups of lm_eval, paths of YAML files, or `paper` for the paper's five.

        Raises:
            UsageError: lm_eval is not installed, no such task, an invalid file, or data that cannot be fetched.
        """
        _harness("lm_eval")
        wanted = [name for given in names for name in (PAPER if given == "paper" else (given,))]
        manager = _harness("lm_eval.tasks").TaskManager(include_defaults=not all(map(_is_file, wanted)))
        parts = [_load(manager, name) for name in dict.fromkeys(wanted)]
        merged: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
        for part in parts:
            for kind, found in part.items():
                merged[kind] |= found
        for task in merged["tasks"].values():
            task.set_config("num_fewshot", 0)
        return cls(tuple(wanted), merged)

    def score(self, directory: Path, progress: bool = False) -> dict[str, Score]:
        """Score a checkpoint, loaded whole in its own dtype, by task or group.

        Raises:
            CheckpointError: a model or tokenizer that cannot be loaded.
            UsageError: a task that does not fit its data.
        """
        with _quiet(progress):
            model = _model(directory)
            with failures_as(
                lambda reason: UsageError(f"tasks {', '.join(self.names)}: the harness fails: {reason}")
            ):
                results = _harness("lm_eval.evaluator").evaluate(
                    model, self.loaded, bootstrap_iters=BOOTSTRAPS, log_samples=False
                )
        members = {name for children in self.loaded["group_map"].values() for name in children}
        return {name: _score(values) for name, values in results["results"].items() if name not in members}


def _load(manager: Any, name: str) -> Any:
    if _is_file(name) and not Path(name).is_file():
        raise UsageError(f"`tasks` {name}: no such file")
    if not _is_file(name) and name not in manager.all_tasks:
        raise UsageError(
            f"`tasks` {name}: lm-evaluation-harness has no such task: "
            "give one that `lm-eval ls tasks` lists, or a .yaml file"
        )
    remedy = (
        "correct the file" if _is_file(name) else "try again where the hub is reachable, or give a .yaml file"
    )
    with (
        failures_as(lambda reason: UsageError(f"`tasks` {name}: it cannot be loaded ({reason}): {remedy}")),
        _quiet(progress=False),
    ):
        return manager.load([name])


def _is_file(name: str) -> bool:
    return name.endswith(FILE_SUFFIXES)


def _model(directory: Path) -> Any:
    """Return lm_eval's wrapper of a checkpoint, on a GPU if there is one."""
    from compressor.decoder.decoder import whole_model
    from compressor.sources import load_tokenizer

    wrapper = _harness("lm_eval.models.huggingface").HFLM
    tokenizer = load_tokenizer(directory)
    model = whole_model(directory, "auto")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return wrapper(pretrained=model.to(device), backend="causal", tokenizer=tokenizer, batch_size=BATCH_SIZE)


def _score(values: Mapping[str, Any]) -> Score:
    """Return the score of lm_eval's values, whose keys are a metric and a filter, such as `acc,none`."""
    numbers = {
        key.removesuffix(",none"): float(value)
        for key, value in values.items()
        if "," in key and isinstance(value, (int, float))
    }
    means = [name for name in numbers if "_stderr" not in name]
    if not means:
        raise UsageError(
            f"task {values.get('name')}: it has no metric that is a number: give it a metric_list"
        )
    return Score(next((name for name in MAIN_METRICS if name in means), means[0]), numbers)


def _harness(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"`tasks` needs lm-evaluation-harness ({_reason(error)}): pip install 'peraxis[eval]'"
        ) from error


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


@contextmanager
def _quiet(progress: bool) -> Iterator[None]:
    """Keep stdout for the result, and show lm_eval's bars only on a terminal."""
    loggers = {name: logging.getLogger(name) for name in NOISY}
    levels = {name: logger.level for name, logger in loggers.items()}
    with ExitStack() as stack:
        if not (progress and sys.stderr.isatty()):
            stack.enter_context(redirect_stderr(io.StringIO()))
        stack.enter_context(redirect_stdout(sys.stderr))
        for logger in loggers.values():
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for name, logger in loggers.items():
                logger.setLevel(levels[name])


PROMPT_TOKENS = 48
NEW_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and each model's continuation, decoded with special tokens."""

    prompt: str
    base: str
    finetune: str
    delta: str


def examples(
    base: Weights,  # from `base_with_added_rows`, so that it has the fine-tune's vocabulary
    finetune: Checkpoint,
    delta: Weights,
    texts: Sequence[Tensor],  # [tokens] int64 each, valid for the fine-tune
    device: torch.device,
) -> list[Example]:
    """Continue the first half of each text, at most 48 tokens of it, by up to 40 tokens, one model after the other.

    A continuation ends with the fine-tune's end-of-text token. Blocks that do not fit into memory are read again for
    every token.

    Returns:
        One example per text; none if the fine-tune has no tokenizer.

    Raises:
        CheckpointError: a tokenizer that cannot be loaded, a model that cannot be run or whose logits are not finite.
    """
    if not texts or not tokenizer_files(finetune):
        return []
    # Deferred, because both import transformers, which takes seconds.
    from compressor.decoder.decoder import Decoder
    from compressor.sources import load_tokenizer

    tokenizer, ends = load_tokenizer(finetune.path, base.path), _end_ids(finetune)
    length = max(1, min(PROMPT_TOKENS, *(len(text) // 2 for text in texts)))
    prompts = torch.stack([text[:length] for text in texts])
    written = [
        _continued(Decoder(weights, device, torch.float32), prompts, ends)
        for weights in (base, finetune, delta)
    ]
    return [
        Example(_decoded(tokenizer, prompt), *(_continuation(tokenizer, prompt, ids[row]) for ids in written))
        for row, prompt in enumerate(prompts.tolist())
    ]


@torch.no_grad()
def _continued(decoder: Any, prompts: Tensor, ends: frozenset[int]) -> list[list[int]]:
    """Return the new ids of each prompt of ``[sequences, tokens]``, up to and including the first end token."""
    # Deferred, because it imports transformers, which takes seconds.
    from compressor.decoder.sampling import GenerationPlan, free_bytes

    length = prompts.shape[1] + NEW_TOKENS
    most = getattr(decoder.config.get_text_config(), "max_position_embeddings", None) or length
    plan = GenerationPlan.of(decoder, length, free_bytes(decoder.device))
    model = decoder.streaming_model(plan.num_resident_blocks)
    ids, cache = prompts.to(decoder.device), None
    rows: list[list[int]] = [[] for _ in prompts]
    for _ in range(min(length, most) - prompts.shape[1]):
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits, cache = output.logits[:, -1], output.past_key_values
        if not torch.isfinite(logits).all():
            raise CheckpointError(
                f"{decoder.weights.path}: its logits are not finite: "
                "the checkpoint is damaged, or its training diverged"
            )
        ids = logits.argmax(-1, keepdim=True)
        for row, token in zip(rows, ids[:, 0].tolist(), strict=True):
            if ends.isdisjoint(row):
                row.append(token)
        if not any(ends.isdisjoint(row) for row in rows):
            break
    return rows


def _continuation(tokenizer: Any, prompt: list[int], new: list[int]) -> str:
    """Return the new text, decoded together with the prompt if possible: a tokenizer may drop a leading space."""
    before, text = _decoded(tokenizer, prompt), _decoded(tokenizer, prompt + new)
    return text[len(before) :] if text.startswith(before) else _decoded(tokenizer, new)


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _end_ids(finetune: Checkpoint) -> frozenset[int]:
    facts = parse_json(generation_file(finetune), str(finetune.path))
    ends = facts.get("eos_token_id") if isinstance(facts, dict) else None
    return frozenset(end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int))
