"""A registry in a directory: binds the layout, the objects, gc and the check to one root. Decides nothing itself."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from deltastore.errors import RegistryError, RegistryUnavailable
from deltastore.registry.directory.check import check
from deltastore.registry.directory.collect import Collector, collect_partials
from deltastore.registry.directory.files import DirectoryFiles
from deltastore.registry.directory.layout import FORMAT_FILE, check_present, make_layout
from deltastore.registry.directory.objects import Objects
from deltastore.registry.records import VersionRecord
from deltastore.registry.reports import CheckReport, GcReport, Usage
from deltastore.registry.storage import Storage, explained, read_from_volume
from deltastore.registry.uploads import SealedUpload, Upload


class DirectoryWriter:
    """A publication whose object is `objects/DIGEST`, which all versions of its bytes share."""

    stored_as = None

    def __init__(self, objects: Objects, sealed: SealedUpload) -> None:
        self._objects = objects
        self._sealed = sealed

    def store(self, record: VersionRecord, *, is_known: bool) -> None:
        self._objects.put(self._sealed)

    def confirm(self) -> None:
        # A gc that began before there was the record may have removed the object.
        self._objects.ensure(self._sealed)


class DirectoryBackend:
    """The store of a registry in a directory, which any number of servers may share."""

    def __init__(self, root: Path, storage: Storage) -> None:
        self.root = root.absolute()
        self.location = str(self.root)
        self.files = DirectoryFiles(self.root, storage)
        self._storage = storage
        self._objects = Objects(self.root, storage)
        self._collector = Collector(self.files, self._objects, storage)

    def prepare(self) -> None:
        with self.explained():
            make_layout(self.root, self._storage)
        self.files.reserve.fill()

    def check_present(self) -> None:
        check_present(self.root)

    def probe(self) -> None:
        check_present(self.root)
        read_from_volume(self.root / FORMAT_FILE)
        with os.scandir(self.root / "variants") as tenants:
            next(tenants, None)

    def explained(self) -> AbstractContextManager[None]:
        return explained(self.root)

    def open_upload(self, max_bytes: int | None) -> Upload:
        return Upload(self.root / "uploads", self._storage, max_bytes, self.explained)

    @contextlib.contextmanager
    def writing(self, sealed: SealedUpload) -> Iterator[DirectoryWriter]:
        try:
            yield DirectoryWriter(self._objects, sealed)
        except (OSError, RegistryError, RegistryUnavailable):
            with contextlib.suppress(OSError, RegistryError, RegistryUnavailable):
                self._collector.withdraw(sealed.digest, sealed.path)
            raise

    def object_path(self, record: VersionRecord) -> Path:
        return self._objects.path(record.digest)

    def is_local(self, record: VersionRecord) -> bool:
        return True

    def quarantine(self, record: VersionRecord, reason: str, found_in: os.stat_result | None) -> bool:
        return self._objects.quarantine(record.digest, reason, found_in, self.files.reserve)

    def recover(self, record: VersionRecord) -> bool:
        return self._objects.recover(record.digest)

    def is_quarantined(self, record: VersionRecord) -> bool:
        return self._objects.is_quarantined(record.digest)

    def reason(self, record: VersionRecord) -> str:
        return self._objects.reason(record.digest)

    def usage(self) -> Usage:
        return self._objects.usage()

    def collect(self, *, dry_run: bool) -> GcReport:
        report = self._collector.collect(dry_run=dry_run)
        if not dry_run:
            self.files.reserve.fill()
        return report

    def remove_abandoned_uploads(self) -> int:
        return collect_partials(self.root / "uploads", self._storage, dry_run=False)[0]

    def check(self) -> CheckReport:
        return check(self.files, self._objects)
