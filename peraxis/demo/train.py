"""The demo's trained models on disk: each is trained once, saved whole and found again by the recipe's digest.

Fine-tunes are trained side by side, in a process per core: small matrix products gain little from a second thread.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from deltastore.errors import PeraxisError, UsageError
from peraxis.demo.corpus import frequent_words, read_sources
from peraxis.demo.finetune import train_finetune
from peraxis.demo.pretrain import train_base
from peraxis.demo.recipe import DEMO_RECIPE, DemoRecipe
from peraxis.demo.tasks import Task, make_tasks
from peraxis.demo.tokenizer import base_tokenizer, chat_tokenizer

SAVED_DTYPE = torch.float16
WORDS_FILE = "words.json"
# On matrix products this small, more threads wait for each other longer than they compute.
MAX_THREADS = 8
# Of one fine-tune: its directory, the base's, its task, the recipe and the receiver of progress lines.
FinetuneArguments = tuple[Path, Path, Task, DemoRecipe, Callable[[str], None]]


class TrainingFailed(PeraxisError):
    """A fine-tune's process ended before its training did."""


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
    processes: int | None = None,
) -> Models:
    """Train the recipe's models that are missing in `workdir`.

    A model gets its name only when it is complete, so a call after an interruption trains the models that are missing.

    Args:
        workdir: The directory of trained models, by digest of the recipe.
        progress: Gets a line every few seconds of training; with several processes it must be picklable.
        recipe: The sizes and steps of the models.
        names: The tasks to train fine-tunes for; by default all.
        processes: How many fine-tunes are trained at a time; by default one per core.

    Raises:
        UsageError: `workdir` cannot be written, or the sources of Python's standard library are not installed.
    """
    home = workdir / recipe.digest()
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{home}: the models cannot be kept there ({error.strerror}): give --work a directory that can be written"
        ) from error
    base = home / "base"
    num_cores = len(os.sched_getaffinity(0))
    if not base.exists():
        with _threads(num_cores):
            _make_base(base, recipe, progress)
    known = make_tasks(json.loads((base / WORDS_FILE).read_text()))
    tasks = {name: task for name, task in known.items() if names is None or name in names}
    finetunes = {name: home / name for name in tasks}
    missing = [
        (finetunes[name], base, task, recipe, progress)
        for name, task in tasks.items()
        if not finetunes[name].exists()
    ]
    # The longest first, so that none is left alone at the end.
    missing.sort(key=lambda arguments: recipe.of(arguments[2]).num_tokens, reverse=True)
    num_processes = min(processes or num_cores, len(missing))
    if num_processes > 1:
        _side_by_side(missing, num_processes, num_cores // num_processes)
    else:
        with _threads(num_cores):
            for arguments in missing:
                _make_finetune(*arguments)
    return Models(base, finetunes, tasks)


def _side_by_side(missing: list[FinetuneArguments], num_processes: int, num_threads: int) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, _start_worker, (num_threads,)) as pool:
        try:
            for future in [pool.submit(_make_finetune, *arguments) for arguments in missing]:
                future.result()
        except BrokenProcessPool as error:
            raise TrainingFailed(
                f"a process that trained was killed, as where memory runs out: free 1 GB for each of {num_processes}"
            ) from error
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _start_worker(num_threads: int) -> None:
    # Ctrl-C reaches the whole process group. The parent alone reports it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    disable_progress_bar()
    torch.set_num_threads(min(max(1, num_threads), MAX_THREADS))


def _end_with_parent() -> None:
    # A parent that is killed ends no worker.
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os._exit(1)


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
    train_finetune(model, tokenizer, task, recipe.of(task), recipe.seed, progress)
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
def _threads(num_cores: int) -> Iterator[None]:
    """Let torch use a thread per core, but at most `MAX_THREADS`, inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(num_cores, MAX_THREADS))
    try:
        yield
    finally:
        torch.set_num_threads(before)
