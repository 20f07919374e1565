"""Score model directories on tasks of lm-evaluation-harness, zero-shot and without a chat template."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from deltastore.errors import CheckpointError, UsageError

PAPER = ("arc_challenge", "arc_easy", "hellaswag", "piqa", "winogrande")  # Table 1 of the paper
FILE_SUFFIXES = (".yaml", ".yml")
MAIN_METRICS = ("acc_norm", "acc")  # the first of them that a task has, else its first
BATCH_SIZE = 8  # requests of one forward
BOOTSTRAPS = 1000  # for standard errors of metrics that are no means
# Loggers that would write beside the one error line.
NOISY = ("lm_eval", "datasets", "huggingface_hub", "transformers")
# Raised by lm_eval, which has no exceptions of its own, for tasks that it cannot load or run.
UNUSABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, AssertionError)


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
            try:
                results = _harness("lm_eval.evaluator").evaluate(
                    model, self.loaded, bootstrap_iters=BOOTSTRAPS, log_samples=False
                )
            except _unusable() as error:
                raise UsageError(
                    f"tasks {', '.join(self.names)}: the harness fails: {_reason(error)}"
                ) from error
        members = {name for children in self.loaded["group_map"].values() for name in children}
        return {name: _score(values) for name, values in results["results"].items() if name not in members}


def _load(manager: Any, name: str) -> Any:
    if _is_file(name) and not Path(name).is_file():
        raise UsageError(f"--tasks {name}: no such file")
    if not _is_file(name) and name not in manager.all_tasks:
        raise UsageError(
            f"--tasks {name}: lm-evaluation-harness has no such task: "
            "give one that `lm-eval ls tasks` lists, or a .yaml file"
        )
    try:
        with _quiet(progress=False):
            return manager.load([name])
    except _unusable() as error:
        remedy = (
            "correct the file"
            if _is_file(name)
            else "try again where the hub is reachable, or give a .yaml file"
        )
        raise UsageError(f"--tasks {name}: it cannot be loaded ({_reason(error)}): {remedy}") from error


def _is_file(name: str) -> bool:
    return name.endswith(FILE_SUFFIXES)


def _model(directory: Path) -> Any:
    """Return lm_eval's wrapper of a checkpoint, on a GPU if there is one."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    from compressor.io.tokenizer import load_tokenizer

    wrapper = _harness("lm_eval.models.huggingface").HFLM
    tokenizer = load_tokenizer(directory)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{directory}: transformers cannot load it: {_reason(error)}") from error
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
            f"--tasks needs lm-evaluation-harness ({_reason(error)}): pip install 'peraxis[eval]'"
        ) from error


def _unusable() -> tuple[type[BaseException], ...]:
    from jinja2 import TemplateError

    others = (import_module("yaml").YAMLError, import_module("datasets").exceptions.DatasetsError)
    return (*UNUSABLE, TemplateError, *others)


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
