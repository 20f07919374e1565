"""The demo's trained models on disk: each is trained once, saved whole and found again by the recipe's digest."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from peraxis.demo.corpus import frequent_words, read_sources
from peraxis.demo.finetune import train_finetune
from peraxis.demo.pretrain import train_base
from peraxis.demo.recipe import DEMO_RECIPE, DemoRecipe
from peraxis.demo.tasks import Task, make_tasks
from peraxis.demo.tokenizer import base_tokenizer, chat_tokenizer

SAVED_DTYPE = torch.float16
# On matrix products this small, more threads wait for each other longer than they compute.
MAX_THREADS = 8
WORDS_FILE = "words.json"


@dataclass(frozen=True, slots=True)
class Models:
    """Hugging Face checkpoints of a base and its fine-tunes, and each fine-tune's task."""

    base: Path
    finetunes: dict[str, Path]  # by task name
    tasks: dict[str, Task]


def prepare(
    workdir: Path,
    progress: Callable[[str], None],
    recipe: DemoRecipe = DEMO_RECIPE,
    names: Collection[str] | None = None,
) -> Models:
    """Train the recipe's models that are missing in `workdir`.

    A model gets its name only when it is complete, so a call after an interruption trains the models that are missing.

    Args:
        workdir: The directory of trained models, by digest of the recipe.
        progress: Gets a line every few seconds of training.
        recipe: The sizes and steps of the models.
        names: The tasks to train fine-tunes for; by default all.

    Raises:
        UsageError: The sources of Python's standard library are not installed.
    """
    home = workdir / recipe.digest()
    home.mkdir(parents=True, exist_ok=True)
    base = home / "base"
    with _threads():
        if not base.exists():
            _make_base(base, recipe, progress)
        known = make_tasks(json.loads((base / WORDS_FILE).read_text()))
        tasks = {name: task for name, task in known.items() if names is None or name in names}
        finetunes = {name: home / name for name in tasks}
        for name, task in tasks.items():
            if not finetunes[name].exists():
                _make_finetune(finetunes[name], base, task, recipe, progress)
    return Models(base, finetunes, tasks)


def _make_base(directory: Path, recipe: DemoRecipe, progress: Callable[[str], None]) -> None:
    sources = read_sources()
    progress(f"training base on {sum(map(len, sources)) / 1e6:.1f} MB of Python's own sources")
    tokenizer = base_tokenizer()
    model = train_base(recipe.base, sources, tokenizer, recipe.seed, progress)
    with _whole(directory) as partial:
        _save(model, tokenizer, partial)
        (partial / WORDS_FILE).write_text(json.dumps(frequent_words(sources)))


def _make_finetune(
    directory: Path, base: Path, task: Task, recipe: DemoRecipe, progress: Callable[[str], None]
) -> None:
    tokenizer = base_tokenizer() if task.plain else chat_tokenizer()
    # The base as it was saved, so that the delta does not hold the base's rounding.
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    finetune = recipe.finetune if task.plain or recipe.chat is None else recipe.chat
    train_finetune(model, tokenizer, task, finetune, recipe.seed, progress)
    with _whole(directory) as partial:
        _save(model, tokenizer, partial)


def _save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    torch.nn.Module.to(model, SAVED_DTYPE)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@contextmanager
def _whole(directory: Path) -> Iterator[Path]:
    """Yield a directory that is renamed to `directory` if the block succeeds and removed if it raises."""
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        partial = Path(scratch) / directory.name
        partial.mkdir()
        yield partial
        # Another process may have trained the same model meanwhile.
        if not directory.exists():
            partial.rename(directory)


@contextmanager
def _threads() -> Iterator[None]:
    """Let torch use at most `MAX_THREADS` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, MAX_THREADS))
    try:
        yield
    finally:
        torch.set_num_threads(before)
