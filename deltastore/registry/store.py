"""The store that a registry is kept in, a directory or a bucket, as the calls that `registry.py` makes.

The order in which small files change is the same for both and stands in `registry.py`; how objects are stored and
collected differs, and `REGISTRY.md` has both protocols. Must not know which changes are allowed.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from deltastore.registry.files import SmallFiles
from deltastore.registry.records import VersionRecord
from deltastore.registry.reports import CheckReport, GcReport, Usage
from deltastore.registry.uploads import SealedUpload, Uploads


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
