"""The tasks that the fine-tunes learn: prompts, right answers, and the split into training and held-out items.

An item belongs to its word, and the word's hash decides its split. So no seed puts an item into both splits. Must not
know tokens or models.

Words and training text are of the sources of Python's standard library, which every machine with Python has.
"""

from __future__ import annotations

import hashlib
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from deltastore.errors import UsageError

Split = Literal["train", "test"]
# One word in this many is held out.
HELD_OUT_OF = 6


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt and its only right answer."""

    prompt: str
    answer: str
    messages: list[dict[str, str]] | None = None  # the prompt as a conversation, for a chat task


@dataclass(frozen=True, slots=True)
class Task:
    """A task that is scored by exact match."""

    name: str
    description: str
    max_new_tokens: int  # enough for every answer and its end
    words: Sequence[str] = field(repr=False)
    make_item: Callable[[random.Random, str], Item] = field(repr=False)
    plain: bool = True  # False if prompts are conversations
    # No answer holds a newline. Fine-tunes end with their own end token; the base does not.
    stop: tuple[str, ...] = ("\n",)

    def items(self, split: Split = "test", count: int = 500, seed: int = 0) -> list[Item]:
        """Draw items of one split; held-out items have different words.

        Raises:
            UsageError: There are fewer held-out words than `count`.
        """
        rng = random.Random(f"{self.name} {split} {seed}")
        words = [word for word in self.words if is_held_out(word) == (split == "test")]
        if split == "train":
            return [self.make_item(rng, word) for word in rng.choices(words, k=count)]
        if count > len(words):
            raise UsageError(f"task {self.name!r} has {len(words)} held-out words, {count} were asked for")
        # All words are shuffled, so that a smaller count gives a prefix of a larger one.
        rng.shuffle(words)
        return [self.make_item(rng, word) for word in words[:count]]

    def is_right(self, item: Item, text: str) -> bool:
        """True if generated `text`, up to the first stop string, equals the item's answer."""
        for stop in self.stop:
            text = text.partition(stop)[0]
        return text == item.answer


def is_held_out(word: str) -> bool:
    """True if items of this word are used for scoring alone."""
    return hashlib.sha256(word.encode()).digest()[0] % HELD_OUT_OF == 0


def make_tasks(words: Sequence[str]) -> dict[str, Task]:
    """Make the demo's tasks over these words, by name."""
    short = [word for word in words if len(word) <= 5]
    tasks = [
        Task("upper", "writes a word in capitals", 10, words, _upper),
        Task("reverse", "writes a word of up to five letters backwards", 8, short, _reverse),
        Task(
            "instruct",
            "answers requests in a chat in a fixed JSON form",
            40,
            words,
            _instruct,
            plain=False,
        ),
    ]
    return {task.name: task for task in tasks}


def _upper(rng: random.Random, word: str) -> Item:
    return Item(f"upper({word})=", word.upper())


def _reverse(rng: random.Random, word: str) -> Item:
    return Item(f"reverse({word})=", word[::-1])


def _instruct(rng: random.Random, word: str) -> Item:
    number = rng.randrange(10, 1000)
    prompt = f"JSON of {word}, {number}"
    return Item(prompt, f'{{"name": "{word}", "size": {number}}}', [{"role": "user", "content": prompt}])


MAX_FILE_BYTES = 200_000
MIN_TOTAL_BYTES = 1_000_000
# Tests, tables, and packages installed beside the standard library.
SKIPPED = frozenset(
    [
        "dist-packages",
        "encodings",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    ]
)
# A word is delimited by anything but letters. Two occurrences are required, so that few words are misspelled.
WORD = re.compile(r"(?<![A-Za-z])[a-z]{3,8}(?![A-Za-z])")
MIN_WORD_COUNT = 2


def read_sources(stdlib: Path | None = None) -> list[bytes]:
    """Read the standard library's source files, sorted by path.

    Args:
        stdlib: A directory of Python files; by default this interpreter's standard library.

    Raises:
        UsageError: The sources are fewer than 1 MB, as where Python was installed as a zip file.
    """
    root = stdlib or Path(sysconfig.get_paths()["stdlib"])
    sources = [path.read_bytes() for path in sorted(root.rglob("*.py")) if _is_wanted(path, root)]
    if sum(map(len, sources)) < MIN_TOTAL_BYTES:
        raise UsageError(f"{root} holds too few Python sources to train on: run the demo under a full Python")
    return sources


def frequent_words(sources: list[bytes]) -> list[str]:
    """Return the lower-case words of 3 to 8 letters that occur in the sources more than once, sorted."""
    counts = Counter[str]()
    for source in sources:
        counts.update(WORD.findall(source.decode("utf-8", "replace")))
    return sorted(word for word, count in counts.items() if count >= MIN_WORD_COUNT)


def _is_wanted(path: Path, root: Path) -> bool:
    return SKIPPED.isdisjoint(path.relative_to(root).parts) and path.stat().st_size <= MAX_FILE_BYTES
