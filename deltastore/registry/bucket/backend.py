"""A registry in a bucket: binds small files, objects, gc and the check to one prefix. Decides nothing itself."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self

import obstore

from deltastore.errors import RegistryError, StorageFull
from deltastore.registry.bucket.check import check
from deltastore.registry.bucket.client import Bucket
from deltastore.registry.bucket.collect import collect
from deltastore.registry.bucket.files import BucketFiles
from deltastore.registry.bucket.objects import BucketObjects, BucketWriter, identity_of, writing
from deltastore.registry.directory.collect import collect_partials
from deltastore.registry.directory.layout import FORMAT, FORMAT_FILE, parse_format
from deltastore.registry.object_cache import ObjectCache
from deltastore.registry.records import VersionRecord
from deltastore.registry.reports import CheckReport, GcReport, Usage
from deltastore.registry.storage import FULL, Storage
from deltastore.registry.uploads import SealedUpload, Upload

# The registry is looked for once in this time: `is_live` asks often.
PRESENT_FOR_S = 1.0


class BucketBackend:
    """The store of a registry in a bucket, which any number of servers may share.

    Args:
        bucket: The prefix of a bucket.
        cache: This machine's copies of objects. Its file system holds uploads until they are published, too.
    """

    def __init__(self, bucket: Bucket, cache: ObjectCache) -> None:
        self.location = bucket.location
        self.files = BucketFiles(bucket)
        self._bucket = bucket
        self._uploads = cache.directory / "uploads"
        self._storage = Storage()
        self._objects = BucketObjects(bucket, self.files, cache)
        self._found_at = float("-inf")

    @classmethod
    def open(cls, location: str, cache: ObjectCache) -> Self:
        """Open a bucket by its location. Raises UsageError if that is malformed."""
        return cls(Bucket.open(location), cache)

    def prepare(self) -> None:
        path = self.files.root / FORMAT_FILE
        with self.explained():
            self._uploads.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                parse_format(self.files.read(path), str(path))
            except FileNotFoundError:
                self.files.add(path, json.dumps({"format": FORMAT}).encode() + b"\n")

    def check_present(self) -> None:
        if time.monotonic() - self._found_at > PRESENT_FOR_S:
            begun = time.monotonic()
            try:
                self.files.status(self.files.root / FORMAT_FILE)
            except FileNotFoundError as error:
                raise self._bucket.gone() from error
            self._found_at = begun

    def probe(self) -> None:
        try:
            with self._bucket.calls():
                obstore.get(self._bucket.small, FORMAT_FILE).bytes()
                # One page of names, however many there are.
                next(iter(obstore.list(self._bucket.small, "variants")), None)
        except FileNotFoundError as error:
            raise self._bucket.gone() from error

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn an OSError of this machine's files inside the block into StorageFull or RegistryError."""
        try:
            yield
        except OSError as error:
            if error.errno in FULL:
                raise StorageFull(
                    f"the disk of {self._uploads}, which holds uploads until they are in the bucket, is full: free "
                    "some space there",
                    public="the disk for uploads is full: ask the server's operator to free some space",
                ) from error
            raise RegistryError(
                f"{error.filename or self._uploads}: {error.strerror or error}: nothing was acknowledged; check this "
                "machine's disk and the rights of this user, then try again",
                public=f"the server's disk failed: {error.strerror or 'unknown error'}: nothing was acknowledged",
            ) from error

    def open_upload(self, max_bytes: int | None) -> Upload:
        return Upload(self._uploads, self._storage, max_bytes, self.explained)

    def writing(self, sealed: SealedUpload) -> AbstractContextManager[BucketWriter]:
        return writing(self._objects, sealed)

    def object_path(self, record: VersionRecord) -> Path:
        return self._objects.local_path(record)

    def is_local(self, record: VersionRecord) -> bool:
        return self._objects.cache.holds(record.digest)

    def quarantine(self, record: VersionRecord, reason: str, found_in: os.stat_result | None) -> bool:
        return self._objects.quarantine(record, reason, found_in)

    def recover(self, record: VersionRecord) -> bool:
        return self._objects.identity(record) is not None and not self._objects.is_quarantined(record)

    def is_quarantined(self, record: VersionRecord) -> bool:
        return self._objects.is_quarantined(record)

    def reason(self, record: VersionRecord) -> str:
        return self._objects.reason(record)

    def usage(self) -> Usage:
        stored, marks = self._objects.stored(), self._objects.marks()
        identities = {name: identity_of(meta) for name, meta in stored.items()}
        num_quarantined = sum(identities.get(name) == identity for name, identity in marks.items())
        return Usage(len(stored), sum(meta["size"] for meta in stored.values()), None, num_quarantined)

    def collect(self, *, dry_run: bool) -> GcReport:
        num_partials, num_bytes = collect_partials(self._uploads, self._storage, dry_run=dry_run)
        return collect(self.files, self._objects, num_partials, num_bytes, dry_run=dry_run)

    def remove_abandoned_uploads(self) -> int:
        return collect_partials(self._uploads, self._storage, dry_run=False)[0]

    def check(self) -> CheckReport:
        return check(self.files, self._objects)
