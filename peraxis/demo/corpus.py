"""Training text that every machine with Python has: the sources of Python's standard library. Must not know models."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from pathlib import Path

from deltastore.errors import UsageError

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
