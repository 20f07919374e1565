"""The calls that the registry needs of the store that it is kept in: a directory or a bucket.

The order in which small files change is the same for both and stands in `registry.py`; how objects are stored and
collected differs, and `REGISTRY.md` has both protocols. Must not know which changes are allowed.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from deltastore.errors import UsageError
from deltastore.registry.directory.backend import DirectoryBackend
from deltastore.registry.files import SmallFiles
from deltastore.registry.object_cache import ObjectCache
from deltastore.registry.place import is_bucket, is_registry
from deltastore.registry.records import VersionRecord
from deltastore.registry.reports import CheckReport, GcReport, Usage
from deltastore.registry.storage import Storage
from deltastore.registry.uploads import SealedUpload, Upload


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


class Backend(Protocol):
    """A store of small files and objects."""

    @property
    def files(self) -> SmallFiles:
        """The small files."""

    @property
    def location(self) -> str:
        """The value of `--registry`, for messages."""

    def prepare(self) -> None:
        """Make what a new registry consists of. Raises RegistryError if another version of Peraxis wrote this one."""

    def check_present(self) -> None:
        """Raise RegistryUnavailable if the registry is gone: it must not look like one without variants."""

    def probe(self) -> None:
        """Read the files of the registry's own from the store itself; raises as `check_present` does."""

    def explained(self) -> AbstractContextManager[None]:
        """Turn the errors of the store inside the block into StorageFull, RegistryUnavailable or RegistryError."""

    def open_upload(self, max_bytes: int | None) -> Upload:
        """Begin an upload."""

    def writing(self, sealed: SealedUpload) -> AbstractContextManager[ObjectWriter]:
        """Store a sealed upload for the records that are made in the block; if it raises, remove what is unused."""

    def object_path(self, record: VersionRecord) -> Path:
        """Return a local file with the object's bytes, which are not verified. It may be gone when it is opened."""

    def is_local(self, record: VersionRecord) -> bool:
        """True if `object_path` downloads nothing now."""

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

    def collect(self, *, dry_run: bool) -> GcReport:
        """Remove garbage. Raises RegistryError if a record or state is damaged."""

    def remove_abandoned_uploads(self) -> int:
        """Remove the partial files of uploads whose process has died, and return their number."""

    def check(self) -> CheckReport:
        """Read and check every file."""


def open_backend(location: str, cache: ObjectCache | None, *, is_made: bool) -> Backend:
    """Return the store that a location names: a directory, or a bucket as `s3://BUCKET/PREFIX`.

    Args:
        location: The value of `--registry`.
        cache: This machine's copies of a bucket's objects; a directory needs none.
        is_made: A registry that is missing will be made.

    Raises:
        UsageError: The location is malformed or no registry, or a bucket's cache or library is missing.
        RegistryUnavailable: The bucket is no registry, or cannot be reached.
    """
    if not is_bucket(location):
        if not is_made and not is_registry(Path(location)):
            raise UsageError(
                f"{location} is not a registry: give the directory that `peraxis serve --registry` was given"
            )
        return DirectoryBackend(Path(location), Storage())
    if cache is None:
        raise UsageError(f"{location} needs a cache on a local disk: give --registry-cache a directory")
    try:
        from deltastore.registry.bucket.backend import BucketBackend
    except ModuleNotFoundError as error:
        raise UsageError(f"{location} needs obstore: run `pip install 'peraxis[s3]'`") from error
    backend = BucketBackend.open(location, cache)
    if not is_made:
        backend.check_present()
    return backend
