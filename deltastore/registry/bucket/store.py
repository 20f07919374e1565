"""A registry in a bucket: its presence, its errors, and what a publication does with an object there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Self

import obstore

from deltastore.errors import RegistryError, StorageFull
from deltastore.registry.bucket.check import check
from deltastore.registry.bucket.client import Bucket
from deltastore.registry.bucket.collect import collect
from deltastore.registry.bucket.files import BucketFiles
from deltastore.registry.bucket.objects import BucketObjects, BucketWriter
from deltastore.registry.claims import FORMAT_FILE, STATED_FORMAT, check_format
from deltastore.registry.object_cache import ObjectCache
from deltastore.registry.reports import CheckReport, GcReport
from deltastore.registry.storage import FULL, Storage
from deltastore.registry.uploads import SealedUpload, Uploads


class BucketStore:
    """The store of a registry in a bucket, which any number of servers may share.

    Args:
        bucket: The prefix of a bucket.
        cache: This machine's copies of objects. Its file system holds uploads until they are published, too.
    """

    def __init__(self, bucket: Bucket, cache: ObjectCache) -> None:
        self.files = BucketFiles(bucket)
        self.objects = BucketObjects(bucket, self.files, cache)
        self.uploads = Uploads(cache.directory / "uploads", Storage(), self.explained)
        self._bucket = bucket

    @classmethod
    def open(cls, location: str, cache: ObjectCache) -> Self:
        """Open a bucket by its location. Raises UsageError if that is malformed."""
        return cls(Bucket.open(location), cache)

    def prepare(self) -> None:
        path = self.files.root / FORMAT_FILE
        with self.explained():
            self.uploads.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                check_format(self.files.read(path), str(path))
            except FileNotFoundError:
                self.files.add(path, STATED_FORMAT)

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
                    f"the disk of {self.uploads.directory}, which holds uploads until they are in the bucket, "
                    "is full: free some space there",
                    public="the disk for uploads is full: ask the server's operator to free some space",
                ) from error
            raise RegistryError(
                f"{error.filename or self.uploads.directory}: {error.strerror or error}: nothing was acknowledged; "
                "check this machine's disk and the rights of this user, then try again",
                public=f"the server's disk failed: {error.strerror or 'unknown error'}: nothing was acknowledged",
            ) from error

    @contextlib.contextmanager
    def writing(self, sealed: SealedUpload) -> Iterator[BucketWriter]:
        writer = BucketWriter(self.objects, sealed)
        try:
            yield writer
        finally:
            writer.end()

    def collect(self, *, dry_run: bool) -> GcReport:
        return collect(self.files, self.objects, self.uploads, dry_run=dry_run)

    def check(self) -> CheckReport:
        return check(self.files, self.objects)
