"""Real text that is on any machine with Python: the standard library's sources. Knows files; nothing of models."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from pathlib import Path

from deltastore.errors import UsageError

MAX_FILE_BYTES = 200_000
MIN_TOTAL_BYTES = 1_000_000
# Tests and tables, and what others installed beside the library.
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
# A word stands by itself or between underscores; two times, so that few are slips of the pen.
WORD = re.compile(r"(?<![A-Za-z])[a-z]{3,8}(?![A-Za-z])")
MIN_WORD_COUNT = 2


def read_sources(stdlib: Path | None = None) -> list[bytes]:
    """The contents of the library's source files, in the order of their paths.

    Args:
        stdlib: another folder of Python files than this interpreter's own library.

    Raises:
        UsageError: there are no sources to speak of, as where Python came as a zip file.
    """
    root = stdlib or Path(sysconfig.get_paths()["stdlib"])
    sources = [path.read_bytes() for path in sorted(root.rglob("*.py")) if _is_wanted(path, root)]
    if sum(map(len, sources)) < MIN_TOTAL_BYTES:
        raise UsageError(f"{root} holds too few Python sources to train on: run the demo under a full Python")
    return sources


def frequent_words(sources: list[bytes]) -> list[str]:
    """Lower-case words of 3 to 8 letters that stand in the sources more than once, sorted."""
    counts = Counter[str]()
    for source in sources:
        counts.update(WORD.findall(source.decode("utf-8", "replace")))
    return sorted(word for word, count in counts.items() if count >= MIN_WORD_COUNT)


def _is_wanted(path: Path, root: Path) -> bool:
    return SKIPPED.isdisjoint(path.relative_to(root).parts) and path.stat().st_size <= MAX_FILE_BYTES
