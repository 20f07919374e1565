"""The calls on small files (records, states, claims) that the protocol of `REGISTRY.md` needs of a store.

`directory/files.py` makes them on a volume, `bucket/files.py` in a bucket. Must not know what the files mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import Protocol, TypeVar

from deltastore.errors import StorageFull
from deltastore.registry.storage import FULL

T = TypeVar("T")
Result = TypeVar("Result")


class SmallFiles(Protocol):
    """Small files by path, all below `root`. A file that exists is never changed in place.

    Every method raises OSError, RegistryUnavailable, RegistryError or StorageFull if the store fails.
    """

    @property
    def root(self) -> PurePath:
        """The beginning of every path."""

    def read(self, path: PurePath, *, is_fresh: bool = False) -> bytes:
        """Return a file's contents. Raises FileNotFoundError.

        Args:
            path: The file.
            is_fresh: Ask the store, and do not keep the answer.
        """

    def is_directory(self, path: PurePath) -> bool:
        """True if there is a directory of this path; in a bucket, if it has a file."""

    def names(self, directory: PurePath, *, is_fresh: bool = False) -> list[str]:
        """List a directory with every name that was made before, of files and directories; empty if it is missing.

        Args:
            directory: The directory.
            is_fresh: Ask the store, also where `listed` has listed the directory.
        """

    def subdirectories(self, directory: PurePath) -> list[str]:
        """Return the sorted names of a directory's subdirectories; empty if it does not exist."""

    def each(self, function: Callable[[T], Result], items: Sequence[T]) -> list[Result]:
        """Return a function's results, in order; several calls run at once where one waits for a network."""

    def listed(self, *directories: PurePath) -> SmallFiles:
        """Return these files for reading many of them below some directories, with as few calls as the store allows."""

    def make_directory(self, directory: PurePath) -> None:
        """Create a directory with its parents, durably; do nothing if it exists."""

    def make_durable(self, *directories: PurePath) -> None:
        """Make the names in directories durable, whichever process made them. Raises FileNotFoundError."""

    def add(self, path: PurePath, data: bytes) -> bool:
        """Create a file in one atomic step that is durable on return; False if another one has the name."""

    def add_or_make_room(
        self, path: PurePath, data: bytes, dispensable: Callable[[], Iterable[PurePath]]
    ) -> bool:
        """Create a file as `add` does. If the store is full, remove the `dispensable` files and use reserved space."""

    def remove(self, paths: Iterable[PurePath]) -> None:
        """Remove files, those that exist. A failure is not reported: others may be left for gc."""


@contextmanager
def dropped_when_full(files: SmallFiles, companion: PurePath, path: PurePath) -> Iterator[None]:
    """Remove a file that was made for another one, `path`, if the store is full and has not made that in the block."""
    try:
        yield
    except (OSError, StorageFull) as error:
        is_full = isinstance(error, StorageFull) or error.errno in FULL
        if is_full and path.name not in files.names(path.parent, is_fresh=True):
            files.remove([companion])
        raise
