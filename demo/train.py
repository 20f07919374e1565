"""The demo's models on disk: trained once, then found again. Knows files and who is trained from whom."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from demo.corpus import frequent_words, read_sources
from demo.finetune import train_finetune
from demo.pretrain import train_base
from demo.recipe import DemoRecipe
from demo.tasks import Task, make_tasks
from demo.tokenizer import base_tokenizer, chat_tokenizer

SAVED_DTYPE = torch.float16
MAX_THREADS = 8  # more wait for each other longer than they work, on products this small
WORDS_FILE = "words.json"


@dataclass(frozen=True, slots=True)
class Models:
    """Hugging Face checkpoints of a base and of its fine-tunes, and what each fine-tune can do."""

    base: Path
    finetunes: dict[str, Path]  # by task name
    tasks: dict[str, Task]
    seconds: float  # that this call took; near 0 when all was there


def prepare(
    workdir: Path,
    progress: Callable[[str], None],
    recipe: DemoRecipe | None = None,
    names: Collection[str] | None = None,
) -> Models:
    """Train what `workdir` lacks of the recipe's models.

    A model appears under its name only when it is whole, so an interrupted training goes on with the next model.

    Args:
        progress: gets a line now and then.
        recipe: the demo's own by default.
        names: the tasks to train fine-tunes for; all by default.

    Raises:
        UsageError: this Python comes without the sources of its library.
    """
    began = time.monotonic()
    recipe = recipe or DemoRecipe()
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
    return Models(base, finetunes, tasks, time.monotonic() - began)


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
    # The base as it was saved: a delta must not hold the rounding of the base.
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    train_finetune(model, tokenizer, task, recipe.finetune, recipe.seed, progress)
    with _whole(directory) as partial:
        _save(model, tokenizer, partial)


def _save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    torch.nn.Module.to(model, SAVED_DTYPE)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@contextmanager
def _whole(directory: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `directory` when the block has ended well and vanishes when it has not."""
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        partial = Path(scratch) / directory.name
        partial.mkdir()
        yield partial
        if not directory.exists():  # another process may have been first
            partial.rename(directory)


@contextmanager
def _threads() -> Iterator[None]:
    """All of this process's cores for torch, while the block runs."""
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(min(cores, MAX_THREADS))
    try:
        yield
    finally:
        torch.set_num_threads(before)
