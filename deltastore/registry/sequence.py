"""A value that servers change without a lock: a sequence of numbered files, of which the newest holds the value.

A change reads the newest entry, number n, and creates entry n + 1 exclusively. If another server was first, the change
reads again. So every change rests on the one before it, and all servers see one order. Must not know what the values
mean. `REGISTRY.md` says why a change that was acknowledged is never lost, also when old entries are removed.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath

from deltastore.errors import RegistryError
from deltastore.registry.files import SmallFiles

# Entries that are kept. A writer that is this many changes late may find that the one after its own is gone.
NUM_KEPT = 64
# A change removes older entries when there are more than this, so that repeated changes do not fill the disk until gc.
MAX_ENTRIES = 2 * NUM_KEPT
MAX_ATTEMPTS = 100
LONGEST_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry. Number 0, without `raw`, is the beginning of the sequence."""

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
        files: Reads and creates the entries.
    """

    def __init__(self, directory: PurePath, prefix: str, files: SmallFiles) -> None:
        self.directory = directory
        self._prefix = prefix
        self._pattern = re.compile(rf"{re.escape(prefix)}([0-9]{{6,18}})\.json")
        self._files = files

    def path(self, number: int) -> PurePath:
        return self.directory / f"{self._prefix}{number:06}.json"

    def numbers(self, names: Iterable[str]) -> list[int]:
        """Return the numbers of the entries among file names, ascending, without entry 0."""
        begin, match = self._prefix, self._pattern.fullmatch
        return sorted(int(found[1]) for name in names if name.startswith(begin) and (found := match(name)))

    def newest(self, names: Collection[str] | None = None) -> Entry:
        """Read the newest entry; with `names`, the newest of a listing of the directory."""
        listed = self.numbers(self._files.names(self.directory) if names is None else names)
        for _ in attempts(self.directory):
            if not listed:
                return Entry(0, None)
            try:
                return Entry(listed[-1], self._files.read(self.path(listed[-1])))
            except FileNotFoundError:
                pass
            # It was removed, because there are many newer ones.
            listed = self.numbers(self._files.names(self.directory, is_fresh=True))
        raise AssertionError("attempts() ends with an exception")

    def append(self, newest: Entry, raw: bytes) -> bool:
        """Create the entry after `newest`, durably; return False if another change came first and nothing was done.

        Args:
            newest: The entry that the change rests on.
            raw: A JSON document whose `after` is the digest of `newest`.

        Raises:
            RegistryError: So many changes came in between that this one may have been made or not.
        """
        number = newest.number + 1
        # An entry stays, unlike the space of a file that is replaced: repeated changes would use up the reserve.
        if not self._files.add_or_make_room(self.path(number), raw, lambda: self._dispensable(num_kept=1)):
            return False
        # While this writer was suspended, an entry of this number may have been made and removed.
        numbers = self.numbers(self._files.names(self.directory, is_fresh=True))
        is_made = max(numbers, default=number) <= number or self._after(number + 1) == _sha256(raw)
        if len(numbers) > MAX_ENTRIES:
            self._files.remove(self._dispensable(NUM_KEPT))
        return is_made

    def superseded(self, num_kept: int = NUM_KEPT) -> list[PurePath]:
        """Return the entries that may be removed, oldest first."""
        numbers = self.numbers(self._files.names(self.directory))
        return [self.path(number) for number in numbers[:-num_kept]]

    def _dispensable(self, num_kept: int) -> list[PurePath]:
        """Return a bounded number of the entries that one change may remove."""
        return self.superseded(num_kept)[:MAX_ENTRIES]

    def _after(self, number: int) -> object:
        """Return the digest of the entry that another one was made after; None if it cannot be read."""
        path = self.path(number)
        try:
            return json.loads(self._files.read(path))["after"]
        except FileNotFoundError as error:
            raise RegistryError(
                f"{path.parent}: other servers made too many changes meanwhile: look at its state and try again"
            ) from error
        except (ValueError, LookupError, TypeError):
            return None


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def attempts(path: PurePath) -> Iterator[None]:
    """Yield for each attempt of a change, after a growing random pause from the second one on.

    Raises:
        RegistryError: Other servers were first at every attempt.
    """
    for number in range(MAX_ATTEMPTS):
        if number:
            time.sleep(random.uniform(0, min(0.001 * 2**number, LONGEST_PAUSE_S)))
        yield
    raise RegistryError(f"{path}: other servers change it all the time: try again in a moment")
