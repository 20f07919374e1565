"""The calls on small files (records, states, claims; keys, limits, audit lines) that a registry needs of a store.

`directory/files.py` makes them on a volume, `bucket/files.py` in a bucket. Must not know what the files mean.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import NamedTuple, Protocol, TypeVar

from deltastore.errors import StorageFull
from deltastore.registry.storage import FULL

T = TypeVar("T")
Result = TypeVar("Result")


class FileVersion(NamedTuple):
    """The identity of a file's contents, without reading them."""

    identity: Hashable
    size_bytes: int
    changed_ns: int  # when it may have changed last; 0 if no change leaves the identity as it was


class SmallFiles(Protocol):
    """Small files by path, all below `root`. The protocol of `REGISTRY.md` never changes a file that exists.

    Every method raises OSError, RegistryUnavailable, RegistryError or StorageFull if the store fails.
    """

    @property
    def root(self) -> PurePath:
        """The beginning of every path."""

    @property
    def location(self) -> str:
        """The value of `--registry`, for messages."""

    def check_present(self, *, is_fresh: bool = False) -> None:
        """Raise RegistryUnavailable if the registry is gone: it must not look like one without variants.

        Args:
            is_fresh: Ask the store, even if it was asked a moment ago.
        """

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

    def replace(self, path: PurePath, data: bytes) -> None:
        """Write a file that may exist, in one atomic step that is durable on return. Only its owner may read it."""

    def append(self, path: PurePath, lines: bytes) -> None:
        """Append whole lines to a file that only its owner may read, in one step that is durable on return.

        In a bucket, where nothing can be appended to, the path without its suffix is a directory with a file per call.
        """

    def delete(self, path: PurePath) -> bool:
        """Remove a file, durably. Return False if there is none."""

    def versions(self, directory: PurePath) -> Mapping[str, FileVersion]:
        """Return the version of each regular file in a directory by its name; empty if the directory is missing."""

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
