"""The store that a registry is kept in, a directory or a bucket: its small files (records, states, claims) and objects.

`directory/` makes these calls on a volume, `bucket/` in a bucket. The order in which small files change is the same
for both and stands in `registry.py`; how objects are stored and collected differs, and `REGISTRY.md` has both
protocols. Must not know what the files mean, nor which changes are allowed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PurePath
from typing import NamedTuple, Protocol, TypeVar

from deltastore.errors import StorageFull
from deltastore.registry.records import CheckReport, GcReport, Usage, VersionRecord
from deltastore.registry.storage import FULL
from deltastore.registry.uploads import SealedUpload, Uploads

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

    def each_name(self, directory: PurePath) -> Iterator[str]:
        """Yield what `names` returns of a new listing, in any order, without a list of all."""

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


class ObjectWriter(Protocol):
    """One publication's part in the store of objects."""

    @property
    def stored_as(self) -> str | None:
        """The name of the object for the record of a new version; None if the digest names it."""

    def store(self, record: VersionRecord, *, is_known: bool) -> None:
        """Make sure, durably, that a record's object is there; a quarantined one is replaced.

        Args:
            record: The record that is created next, or of a live version that has the same bytes.
            is_known: It is that of a live version.
        """

    def confirm(self) -> None:
        """Make sure of it again, now that a record refers to the object."""


class Objects(Protocol):
    """The stored artifacts, by the records of versions that refer to them."""

    def local_path(self, record: VersionRecord) -> Path:
        """Return a local file with the object's bytes, which are not verified. It may be gone when it is opened."""

    def is_local(self, record: VersionRecord) -> bool:
        """True if `local_path` downloads nothing now."""

    def quarantine(self, record: VersionRecord, reason: str, found_in: os.stat_result | None) -> bool:
        """Stop serving a corrupt object; with `found_in`, only if the object is still that file."""

    def recover(self, record: VersionRecord) -> bool:
        """Look for an object that was not found once more; True if it is there."""

    def is_quarantined(self, record: VersionRecord) -> bool:
        """True if a version's object was found corrupt and not replaced since."""

    def reason(self, record: VersionRecord) -> str:
        """Return why an object is quarantined."""

    def usage(self) -> Usage:
        """Count the objects."""


class Store(Protocol):
    """Small files, objects and the uploads that become objects."""

    @property
    def files(self) -> SmallFiles:
        """The small files."""

    @property
    def objects(self) -> Objects:
        """The artifacts."""

    @property
    def uploads(self) -> Uploads:
        """The uploads of this machine, or of all that share the directory."""

    def prepare(self) -> None:
        """Make what a new registry consists of. Raises RegistryError if another version of Peraxis wrote this one."""

    def probe(self) -> None:
        """Read the files of the registry's own from the store itself; raises as `SmallFiles.check_present` does."""

    def explained(self) -> AbstractContextManager[None]:
        """Turn the errors of the store inside the block into StorageFull, RegistryUnavailable or RegistryError."""

    def writing(self, sealed: SealedUpload) -> AbstractContextManager[ObjectWriter]:
        """Store a sealed upload for the records that are made in the block; if it raises, remove what is unused."""

    def collect(self, *, dry_run: bool) -> GcReport:
        """Remove garbage. Raises RegistryError if a record or state is damaged."""

    def check(self) -> CheckReport:
        """Read and check every file."""
