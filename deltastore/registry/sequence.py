"""A value that servers change without a lock: a sequence of numbered files, of which the newest holds the value.

A change reads the newest entry, number n, and creates entry n + 1 exclusively. If another server was first, the change
reads again. So every change rests on the one before it, and all servers see one order. Must not know what the values
mean. `REGISTRY.md` says why a change that was acknowledged is never lost, also when old entries are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deltastore.errors import RegistryError
from deltastore.registry.reserve import Reserve
from deltastore.registry.storage import FULL, Storage, listed_names

# Entries that are kept. A writer that is this many changes late may find that the one after its own is gone.
NUM_KEPT = 64
# A change removes older entries when there are more than this, so that repeated changes do not fill the disk until gc.
MAX_ENTRIES = 2 * NUM_KEPT
MAX_ATTEMPTS = 100
LONGEST_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry. Number 0 is the file of an older layout, or without `raw` the beginning of the sequence."""

    number: int
    raw: bytes | None

    @property
    def digest(self) -> str:
        """The SHA-256 of the entry, which the next one holds as its `after`."""
        return _sha256(self.raw or b"")


class EntrySequence:
    """The entries `PREFIXnnnnnn.json` of one directory.

    Args:
        directory: Holds the entries; it may be missing.
        prefix: Of the entries' names.
        oldest: The file that counts as entry 0, as older versions of Peraxis wrote it.
        storage: Changes the files.
    """

    def __init__(self, directory: Path, prefix: str, oldest: Path, storage: Storage) -> None:
        self.directory = directory
        self._prefix = prefix
        self._pattern = re.compile(rf"{re.escape(prefix)}([0-9]{{6,18}})\.json")
        self._oldest = oldest
        self._storage = storage

    def path(self, number: int) -> Path:
        return self.directory / f"{self._prefix}{number:06}.json" if number else self._oldest

    def numbers(self, names: Iterable[str]) -> list[int]:
        """Return the numbers of the entries among file names, ascending, without entry 0."""
        return sorted(int(found[1]) for name in names if (found := self._pattern.fullmatch(name)))

    def newest(self, names: Collection[str] | None = None) -> Entry:
        """Read the newest entry; with `names`, the newest of a listing of the directory."""
        listed = self.numbers(listed_names(self.directory) if names is None else names)
        for _ in attempts(self.directory):
            if not listed:
                return Entry(0, self._read_oldest(names))
            try:
                return Entry(listed[-1], self.path(listed[-1]).read_bytes())
            except FileNotFoundError:
                pass
            # It was removed, because there are many newer ones.
            listed = self.numbers(listed_names(self.directory))
        raise AssertionError("attempts() ends with an exception")

    def append(self, newest: Entry, raw: bytes, reserve: Reserve) -> bool:
        """Create the entry after `newest`, durably; return False if another change came first and nothing was done.

        Args:
            newest: The entry that the change rests on.
            raw: A JSON document whose `after` is the digest of `newest`.
            reserve: Space for the entry if the disk is full.

        Raises:
            RegistryError: So many changes came in between that this one may have been made or not.
        """
        number = newest.number + 1
        if not self._create(self.path(number), raw, reserve):
            return False
        # While this writer was suspended, an entry of this number may have been made and removed.
        numbers = self.numbers(listed_names(self.directory))
        is_made = max(numbers, default=number) <= number or self._after(number + 1) == _sha256(raw)
        if len(numbers) > MAX_ENTRIES:
            self._remove(self.superseded())
        return is_made

    def superseded(self, num_kept: int = NUM_KEPT) -> list[Path]:
        """Return the entries that may be removed, oldest first."""
        numbers = self.numbers(listed_names(self.directory))
        old = [self.path(number) for number in numbers[:-num_kept]]
        return [*([self._oldest] if old and self._oldest.exists() else []), *old]

    def _create(self, path: Path, raw: bytes, reserve: Reserve) -> bool:
        try:
            return self._storage.add(path, raw)
        except OSError as error:
            if error.errno not in FULL:
                raise
        # An entry stays, unlike the space of a file that is replaced: repeated changes would use up the reserve.
        self._remove(self.superseded(num_kept=1))
        return reserve.create(path, raw)

    def _remove(self, paths: list[Path]) -> None:
        # A bounded number for each change, which a failure to remove others must not make fail.
        with contextlib.suppress(OSError):
            for path in paths[:MAX_ENTRIES]:
                # Another server may remove it at the same time.
                with contextlib.suppress(FileNotFoundError):
                    self._storage.unlink(path)

    def _read_oldest(self, names: Collection[str] | None) -> bytes | None:
        if names is not None and self._oldest.parent == self.directory and self._oldest.name not in names:
            return None
        try:
            return self._oldest.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _after(self, number: int) -> object:
        """Return the digest of the entry that another one was made after; None if it cannot be read."""
        path = self.path(number)
        try:
            return json.loads(path.read_bytes())["after"]
        except FileNotFoundError as error:
            raise RegistryError(
                f"{path.parent}: other servers made too many changes meanwhile: look at its state and try again"
            ) from error
        except (ValueError, LookupError, TypeError):
            return None


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def attempts(path: Path) -> Iterator[None]:
    """Yield for each attempt of a change, after a growing random pause from the second one on.

    Raises:
        RegistryError: Other servers were first at every attempt.
    """
    for number in range(MAX_ATTEMPTS):
        if number:
            time.sleep(random.uniform(0, min(0.001 * 2**number, LONGEST_PAUSE_S)))
        yield
    raise RegistryError(f"{path}: other servers change it all the time: try again in a moment")
