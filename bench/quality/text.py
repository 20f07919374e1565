"""Text of the quality bench: what deltas are fitted to, and other text for their evaluation.

Files have the forms that `peraxis compress --calibration` reads. Knows tasks and sources; nothing of models or methods.
"""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from peraxis.demo.corpus import MAX_FILE_BYTES, read_sources
from peraxis.demo.tasks import Item, Split, Task, is_held_out

# Packages of the standard library that the base is not trained on.
UNSEEN = ("idlelib", "lib2to3")
# One in so many of the base's training sources is kept out of calibration text.
OWN_PART = 10
# Fine-tunes are trained on items of seed 0.
TASK_SEED = 1


@dataclass(frozen=True, slots=True)
class Amount:
    """Amounts of text, in sequences of one length."""

    length: int = 192  # tokens
    samples: int = 256  # to fit to, those included that the compressor holds out for its choices
    test_samples: int = 64
    test_items: int = 300  # of the task, that are scored


@dataclass(frozen=True, slots=True)
class Texts:
    """The text files of one fine-tune."""

    domain: Path  # items of its task, of words that it learned
    general: Path  # pieces of sources
    domain_test: Path  # items of words that it never saw
    general_test: Path  # pieces of other sources


def write_texts(directory: Path, task: Task, amount: Amount) -> Texts:
    """Write the four files of a task's fine-tune; the same for the same arguments and standard library.

    Raises:
        UsageError: this Python comes without the sources of its library.
    """
    texts = Texts(*(directory / f"{task.name}-{name}.jsonl" for name in Texts.__slots__))
    own = read_sources()
    seen = [source for number, source in enumerate(own) if number % OWN_PART]
    _write(texts.domain, task_records(task, "train", amount.samples * amount.length))
    _write(texts.domain_test, task_records(task, "test", amount.test_samples * amount.length))
    _write(texts.general, _pieces(seen, amount.samples, amount.length))
    _write(
        texts.general_test, _pieces(unseen_sources() or own[::OWN_PART], amount.test_samples, amount.length)
    )
    return texts


def task_records(task: Task, split: Split, num_tokens: int) -> Iterator[dict[str, Any]]:
    """Yield records of a split's items, enough for sequences of so many tokens in all.

    A letter is at least one token. The end of a sequence cuts its last record off, hence twice as many.
    """
    at_a_time = sum(map(is_held_out, task.words))
    items = (item for seed in count(TASK_SEED) for item in task.items(split, at_a_time, seed))
    written = 0
    while written < 2 * num_tokens:
        item = next(items)
        written += len(item.prompt) + len(item.answer)
        yield _record(item)


def unseen_sources(stdlib: Path | None = None) -> list[bytes]:
    """Return Python sources that the demo's base was not trained on; empty if Python comes without them.

    Args:
        stdlib: a folder to read instead of this interpreter's standard library.
    """
    root = stdlib or Path(sysconfig.get_paths()["stdlib"])
    paths = (path for name in UNSEEN for path in sorted((root / name).rglob("*.py")))
    return [path.read_bytes() for path in paths if path.stat().st_size <= MAX_FILE_BYTES]


def _record(item: Item) -> dict[str, Any]:
    """Return an item in the form of fine-tuning data."""
    if item.messages is None:
        return {"prompt": item.prompt, "completion": item.answer}
    return {"messages": [*item.messages, {"role": "assistant", "content": item.answer}]}


def _pieces(sources: list[bytes], num_pieces: int, length: int) -> Iterator[dict[str, str]]:
    """Yield random pieces of `length` letters; each, with the tokenizer's leading tokens, fills one sequence."""
    text = "\n".join(source.decode("utf-8", "replace") for source in sources)
    rng = random.Random(length)
    for _ in range(num_pieces):
        start = rng.randrange(len(text) - length)
        yield {"text": text[start : start + length]}


def _write(path: Path, records: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
