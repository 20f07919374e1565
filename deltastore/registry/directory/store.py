"""A registry in a directory: its directories, and what a publication does with an object there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from deltastore.errors import RegistryError, RegistryUnavailable
from deltastore.registry import variants
from deltastore.registry.directory.check import check
from deltastore.registry.directory.collect import Collector
from deltastore.registry.directory.files import DirectoryFiles
from deltastore.registry.directory.objects import DirectoryObjects
from deltastore.registry.place import FORMAT_FILE, LAYOUT, STATED_FORMAT, check_format, older
from deltastore.registry.records import VersionRecord
from deltastore.registry.reports import CheckReport, GcReport
from deltastore.registry.storage import Storage, explained, listed_names, read_from_volume
from deltastore.registry.uploads import SealedUpload, Uploads


class DirectoryWriter:
    """A publication whose object is `objects/DIGEST`, which all versions of its bytes share."""

    stored_as = None

    def __init__(self, objects: DirectoryObjects, sealed: SealedUpload) -> None:
        self._objects = objects
        self._sealed = sealed

    def store(self, record: VersionRecord, *, is_known: bool) -> None:
        self._objects.put(self._sealed)

    def confirm(self) -> None:
        # A gc that began before there was the record may have removed the object.
        self._objects.ensure(self._sealed)


class DirectoryStore:
    """The store of a registry in a directory, which any number of servers may share."""

    def __init__(self, root: Path, storage: Storage) -> None:
        self.root = root.absolute()
        self.files = DirectoryFiles(self.root, storage)
        self.objects = DirectoryObjects(self.root, storage, self.files.reserve)
        self.uploads = Uploads(self.root / "uploads", storage, self.explained)
        self._storage = storage
        self._collector = Collector(self.files, self.objects, self.uploads, storage)

    def prepare(self) -> None:
        """Create the missing directories of a registry.

        Raises:
            RegistryError: Another version of Peraxis wrote it, or the disk failed.
        """
        with self.explained():
            self._make_format()
            for name in LAYOUT:
                self._storage.make_dirs(self.root / name)
            # Existing directories too: the process that made them may have died before its fsync.
            self._storage.fsync_dir(self.root)
            # Without the right to open the parent, this user did not create the root either.
            with contextlib.suppress(PermissionError):
                self._storage.fsync_dir(self.root.parent)
        self.files.reserve.fill()

    def probe(self) -> None:
        self.files.check_present()
        read_from_volume(self.root / FORMAT_FILE)
        with os.scandir(self.root / variants.DIRECTORY) as tenants:
            next(tenants, None)

    def explained(self) -> AbstractContextManager[None]:
        return explained(self.root)

    @contextlib.contextmanager
    def writing(self, sealed: SealedUpload) -> Iterator[DirectoryWriter]:
        try:
            yield DirectoryWriter(self.objects, sealed)
        except (OSError, RegistryError, RegistryUnavailable):
            with contextlib.suppress(OSError, RegistryError, RegistryUnavailable):
                self._collector.withdraw(sealed.digest, sealed.path)
            raise

    def collect(self, *, dry_run: bool) -> GcReport:
        report = self._collector.collect(dry_run=dry_run)
        if not dry_run:
            self.files.reserve.fill()
        return report

    def check(self) -> CheckReport:
        return check(self.files, self.objects, self.uploads)

    def _make_format(self) -> None:
        path = self.root / FORMAT_FILE
        try:
            check_format(path.read_bytes(), str(path))
        except FileNotFoundError:
            if listed_names(self.root / variants.DIRECTORY):
                raise older(self.files.location) from None
            self._storage.make_dirs(self.root)
            # Before the directories: one with variants and without it counts as an older registry.
            self._storage.add(path, STATED_FORMAT)
