"""A registry in a bucket: publication of objects, garbage collection, and the check of the whole.

Servers publish while gc runs; `REGISTRY.md` says why nothing is lost. The check compares objects, records, states and
names, each against the others. It reads every object, so it takes as long as to download them all, and changes nothing.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import PurePath
from typing import TYPE_CHECKING, Self

import obstore

from deltastore.errors import RegistryError, StorageFull
from deltastore.registry import claims
from deltastore.registry.bucket.client import Bucket
from deltastore.registry.bucket.files import BucketFiles
from deltastore.registry.bucket.objects import (
    INTENTS,
    MARK,
    MARKS,
    OBJECTS,
    STORED,
    BucketObjects,
    BucketWriter,
    identity_of,
    stored_name,
)
from deltastore.registry.checker import Checker, leftovers, listed_reports, records_in_use
from deltastore.registry.claims import DIRECTORY as CLAIMS
from deltastore.registry.claims import (
    FORMAT_FILE,
    INDEX,
    OF_SERVERS,
    PUBLIC_NAMES,
    STATED_FORMAT,
    Claims,
    check_format,
)
from deltastore.registry.object_cache import ObjectCache
from deltastore.registry.records import NAME, REPORT, CheckReport, GcReport, VersionRecord
from deltastore.registry.storage import FULL, Storage
from deltastore.registry.uploads import ChunkedDigest, SealedUpload, Uploads
from deltastore.registry.variants import DIRECTORY, RECORD, REPORTS, STATE, directories

if TYPE_CHECKING:
    from obstore import ObjectMeta

ABANDONED_AFTER = timedelta(days=1)
# Written by gc, to read the clock of the store from its time.
CLOCK = "clock"


def collect(files: BucketFiles, objects: BucketObjects, uploads: Uploads, *, dry_run: bool) -> GcReport:
    """Remove garbage, and abandoned uploads on this machine, or with `dry_run` only report it.

    Raises:
        RegistryError: A record or state is damaged, so the objects in use are unknown; nothing was removed.
    """
    num_partials, partial_bytes = uploads.remove_abandoned(dry_run=dry_run)
    # In this order: reports and objects, intents, records.
    reports = listed_reports(files)
    stored = objects.stored()
    intents = {
        name: meta["last_modified"] for name, meta in objects.intents().items() if STORED.fullmatch(name)
    }
    # Listed before the records are read: the publication of an abandoned intent has ended by now.
    abandoned = _abandoned(files, intents)
    files = files.listed(files.root / DIRECTORY, files.root / claims.DIRECTORY)
    try:
        needed = {stored_name(record) for record in records_in_use(files)}
        left = leftovers(files, reports, intents.keys() - abandoned)
    except RegistryError as error:
        raise RegistryError(f"nothing was collected: {error}") from error
    unused = sorted(stored.keys() - needed - (intents.keys() - abandoned))
    marks = [
        name
        for name, identity in objects.marks().items()
        if name not in needed or (name in stored and identity_of(stored[name]) != identity)
    ]
    entries = [
        *left,
        *(path for name in Claims(files).names() for path in Claims(files).entries(name).superseded()),
        *(path for directory in directories(files) for path in directory.entries.superseded()),
    ]
    if not dry_run:
        objects.remove(unused)
        objects.remove_marks(marks)
        files.remove_surely([*entries, *(files.root / INTENTS / name for name in sorted(abandoned))])
    return GcReport(
        tuple(sorted({name.partition(".")[0] for name in unused})),
        num_partials,
        len(entries) + len(abandoned) + len(marks),
        sum(stored[name]["size"] for name in unused) + partial_bytes,
        dry_run,
    )


def _abandoned(files: BucketFiles, intents: dict[str, datetime]) -> set[str]:
    """Return the intents that are older than a day by the clock of the store."""
    if not intents:
        return set()
    path = files.root / INTENTS / CLOCK
    files.replace(path, b"{}\n")
    now = files.status(path)["last_modified"]
    return {name for name, begun in intents.items() if begun < now - ABANDONED_AFTER}


NUMBER = r"[0-9]{6,18}\.json"
NAMED = NAME.pattern.strip("^$")
KNOWN = re.compile(
    "|".join(
        (
            re.escape(FORMAT_FILE),
            *(f"{folder}/.*" for folder in OF_SERVERS),
            rf"{DIRECTORY}/{NAMED}/{NAMED}/(?:{RECORD.pattern}|{STATE}{NUMBER})",
            rf"{REPORTS}/{NAMED}/(?:{REPORT.pattern})",
            rf"{CLAIMS}/{NAMED}/{NUMBER}",
            rf"{PUBLIC_NAMES}/(?:{INDEX.pattern})",
            rf"{OBJECTS}/{STORED.pattern}",
            rf"{INTENTS}/(?:{STORED.pattern}|{CLOCK})",
            rf"{MARKS}/{STORED.pattern}{re.escape(MARK)}",
        )
    )
)


def check(files: BucketFiles, objects: BucketObjects) -> CheckReport:
    """Read and check every file and object of a registry."""
    found = files.below(files.root)
    checker = _BucketChecker(files.listed(files.root / DIRECTORY, files.root / CLAIMS), objects)
    checker.check_names(found)
    checker.check_variants()
    checker.check_claims()
    checker.check_reports()
    checker.check_objects()
    return checker.report()


class _BucketChecker(Checker):
    def __init__(self, files: BucketFiles, objects: BucketObjects) -> None:
        super().__init__(files)
        self._root = files.root
        self._objects = objects

    def check_names(self, found: list[ObjectMeta]) -> None:
        """Report files that the registry's layout has no place for."""
        for meta in found:
            if not KNOWN.fullmatch(meta["path"]):
                self._find(self._root / meta["path"], "not a file of the registry: move it away")

    def check_objects(self) -> None:
        """Report objects that are missing or whose bytes are not their record's, and those without a record."""
        stored, marks = self._objects.stored(), self._objects.marks()
        self.num_objects = len(stored)
        for directory, record in self.versions:
            path = directory.record_path(record.version)
            name = stored_name(record)
            identity = identity_of(stored[name]) if name in stored else None
            if name in marks and marks[name] in (identity, None):
                self._note(path, f"quarantined ({self._objects.reason(record)}): upload it again")
            elif name not in stored:
                if self._is_live(directory, record.version) and self._objects.identity(record) is None:
                    self._find(path, f"its object {name} is missing: upload the artifact again")
            else:
                # It may be collected meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    self._check_object(path, record, self._objects.hash(name))
        for name in sorted(stored.keys() - {stored_name(record) for _, record in self.versions}):
            self._note(self._root / OBJECTS / name, "no live version refers to it: gc removes it")

    def _check_object(self, path: PurePath, record: VersionRecord, found: ChunkedDigest) -> None:
        if found.digest() != record.digest:
            self._find(
                self._root / OBJECTS / stored_name(record),
                f"its bytes have the digest {found.digest()}: upload the artifact again",
            )
        elif (record.size_bytes, record.chunk_sha256) != (found.num_bytes, found.chunk_digests()):
            self._find(path, "its size or chunk digests are not its object's")


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
