"""The stored artifacts of a registry in a bucket: `objects/DIGEST.TOKEN`.

Each publication puts its bytes under a name of its own, which its record holds, so no two share a name. Before that it
puts an intent, `uploads/DIGEST.TOKEN`, which keeps gc from the object until there is the record. A mark,
`quarantine/DIGEST.TOKEN.json`, quarantines an object while the object is the one in which the mismatch was found.

An object is fetched into a file by ranges, several at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import obstore
from obstore.store import S3Store

from deltastore.errors import CorruptObject, PeraxisError, RegistryError
from deltastore.registry.bucket.client import Bucket
from deltastore.registry.bucket.files import BucketFiles
from deltastore.registry.object_cache import ObjectCache
from deltastore.registry.records import Usage, VersionRecord
from deltastore.registry.uploads import ChunkedDigest, SealedUpload, hash_file

if TYPE_CHECKING:
    from obstore import ObjectMeta

RANGE_BYTES = 8 << 20
# Ranges of one object at once. One connection to S3 gives 50 to 100 MB/s.
NUM_THREADS = 8


def fetch_object(store: S3Store, key: str, size_bytes: int, fd: int) -> None:
    """Write an object to an open file from the file's beginning.

    Args:
        store: The store of the bucket.
        key: The object's key below the store's prefix.
        size_bytes: The size that its record gives.
        fd: The file.

    Raises:
        CorruptObject: The object has another size.
        FileNotFoundError: There is no such object.
        obstore.exceptions.BaseError: The store failed.
        OSError: The file cannot be written.
    """

    def fetch(start: int) -> None:
        end = min(start + RANGE_BYTES, size_bytes)
        found = obstore.get(store, key, options={"range": (start, end)})
        if found.meta["size"] != size_bytes:
            raise CorruptObject(
                f"{key} has {found.meta['size']} bytes where its record says {size_bytes}: upload it again"
            )
        _write(fd, memoryview(found.bytes()), start)

    threads = ThreadPoolExecutor(NUM_THREADS, "object-fetch")
    try:
        for running in [threads.submit(fetch, start) for start in range(0, size_bytes, RANGE_BYTES)]:
            running.result()
    finally:
        # No thread may write to the file when the caller has it back.
        threads.shutdown(wait=True, cancel_futures=True)


def _write(fd: int, data: memoryview, position: int) -> None:
    while data:
        count = os.pwrite(fd, data, position)
        data, position = data[count:], position + count


OBJECTS, INTENTS, MARKS = "objects", "uploads", "quarantine"
# Without a token: objects of a registry in a directory that was copied into a bucket.
STORED = re.compile(r"([0-9a-f]{64})(?:\.[0-9a-f]{32})?")
MARK = ".json"
# gc takes the intent of a publication for abandoned after a day; the publication ends itself before.
GIVE_UP_AFTER_S = 12 * 3600
# Marks are listed once in this time, so that a resolution costs no further call.
MARKS_FRESH_S = 0.5
# S3 allows 10,000 parts of an object.
PART_BYTES, MAX_PARTS, NUM_PARTS_AT_ONCE = 16 << 20, 9_000, 4


class BucketObjects:
    """The objects, their intents and marks. For any thread."""

    def __init__(self, bucket: Bucket, files: BucketFiles, cache: ObjectCache) -> None:
        self._cache = cache
        self._bucket = bucket
        self._files = files
        self._marks: frozenset[str] = frozenset()
        self._marks_listed = float("-inf")
        self._listing = threading.Lock()

    def put(self, sealed: SealedUpload, name: str) -> None:
        """Put the bytes of an upload under a name, durably."""
        part = max(PART_BYTES, -(-sealed.size_bytes // MAX_PARTS))
        with self._bucket.calls():
            obstore.put(
                self._bucket.large,
                f"{OBJECTS}/{name}",
                sealed.path,
                chunk_size=part,
                max_concurrency=NUM_PARTS_AT_ONCE,
            )

    def announce(self, name: str) -> None:
        """Put the intent of a publication."""
        self._files.replace(self._files.root / INTENTS / name, b"{}\n")

    def withdraw(self, name: str, *, is_used: bool) -> None:
        """Remove the intent of a publication that has ended, after its object unless a record names it.

        A failure is not reported: gc removes what is left.
        """
        if not is_used:
            self._files.remove([self._files.root / OBJECTS / name])
        self._files.remove([self._files.root / INTENTS / name])

    def keep(self, sealed: SealedUpload) -> None:
        """Make the file of a published upload this machine's copy of the object."""
        # The publication is done; without the copy, the object is fetched when it is used.
        with contextlib.suppress(PeraxisError, OSError):
            self._cache.adopt(sealed.digest, sealed.path)

    def heal(self, record: VersionRecord, sealed: SealedUpload) -> None:
        """Put the bytes of a live version again if its object is quarantined or missing."""
        if self.identity(record) is None or self.is_quarantined(record, is_fresh=True):
            self.put(sealed, stored_name(record))
            self._files.remove([self._mark_path(stored_name(record))])
            self._marks_listed = float("-inf")

    def local_path(self, record: VersionRecord) -> Path:
        """Return this machine's copy, fetched if there is none; a path without a file if the object is missing."""

        def fetch(fd: int) -> None:
            with self._bucket.calls():
                fetch_object(self._bucket.large, f"{OBJECTS}/{stored_name(record)}", record.size_bytes, fd)

        try:
            return self._cache.path(record.digest, record.size_bytes, fetch)
        except FileNotFoundError:
            return self._cache.directory / "missing" / record.digest
        except CorruptObject as error:
            # The store has another size than the record: its bytes cannot be right.
            self._mark(record, str(error), self.identity(record))
            return self._cache.directory / "missing" / record.digest

    def is_local(self, record: VersionRecord) -> bool:
        return self._cache.holds(record.digest)

    def quarantine(self, record: VersionRecord, reason: str, found_in: os.stat_result | None) -> bool:
        """Mark an object as corrupt. With `found_in`, a copy of it, only if the store's bytes are corrupt, too."""
        if found_in is None:
            self._mark(record, reason, self.identity(record))
            self._cache.discard(record.digest)
            return True
        # The copy may be damaged by this machine's disk or by the transfer.
        self._cache.discard(record.digest, found_in)
        before = self.identity(record)
        path = self.local_path(record)
        try:
            found = hash_file(path)
        except FileNotFoundError:
            return self.is_quarantined(record, is_fresh=True)
        if found.chunk_digests() == record.chunk_sha256 and found.num_bytes == record.size_bytes:
            return False
        self._cache.discard(record.digest)
        if self.identity(record) != before:
            return False
        self._mark(record, reason, before)
        return True

    def recover(self, record: VersionRecord) -> bool:
        return self.identity(record) is not None and not self.is_quarantined(record)

    def is_quarantined(self, record: VersionRecord, *, is_fresh: bool = False) -> bool:
        """True if a mark names the object that is stored now."""
        name = stored_name(record)
        if name not in self._marked(is_fresh=is_fresh):
            return False
        try:
            mark = self._read_mark(name)
        except FileNotFoundError:
            return False
        # An unreadable mark still quarantines.
        return mark is None or mark.get("object") == self.identity(record)

    def reason(self, record: VersionRecord) -> str:
        """Return why an object is quarantined."""
        with contextlib.suppress(FileNotFoundError):
            if mark := self._read_mark(stored_name(record)):
                return str(mark.get("reason"))
        return "its mark cannot be read"

    def usage(self) -> Usage:
        stored, marks = self.stored(), self.marks()
        identities = {name: identity_of(meta) for name, meta in stored.items()}
        num_quarantined = sum(identities.get(name) == identity for name, identity in marks.items())
        return Usage(len(stored), sum(meta["size"] for meta in stored.values()), None, num_quarantined)

    def identity(self, record: VersionRecord) -> str | None:
        """Return a value that changes when an object is put again; None if there is none."""
        try:
            return identity_of(self._files.status(self._files.root / OBJECTS / stored_name(record)))
        except FileNotFoundError:
            return None

    def stored(self) -> dict[str, ObjectMeta]:
        """List the objects by name."""
        return self._below(OBJECTS)

    def intents(self) -> dict[str, ObjectMeta]:
        """List the intents of publications by the name of their object."""
        return self._below(INTENTS)

    def marks(self) -> dict[str, str | None]:
        """Return the identity of the object that each mark is about by the object's name."""
        found = {}
        for name in self._marked(is_fresh=True):
            with contextlib.suppress(FileNotFoundError):
                mark = self._read_mark(name)
                found[name] = None if mark is None else mark.get("object")
        return found

    def hash(self, name: str) -> ChunkedDigest:
        """Return the digests of a stored object's bytes. Raises FileNotFoundError."""
        found = ChunkedDigest()
        with self._bucket.calls():
            for part in obstore.get(self._bucket.large, f"{OBJECTS}/{name}").stream():
                found.update(memoryview(part))
        return found

    def remove(self, names: list[str]) -> None:
        """Remove objects and their marks. Raises RegistryUnavailable if some may be left."""
        self._files.remove_surely([self._files.root / OBJECTS / name for name in names])
        self.remove_marks(names)

    def remove_marks(self, names: list[str]) -> None:
        self._files.remove_surely([self._mark_path(name) for name in names])

    def _mark(self, record: VersionRecord, reason: str, identity: str | None) -> None:
        mark = {"digest": record.digest, "reason": reason, "object": identity}
        self._files.replace(self._mark_path(stored_name(record)), json.dumps(mark).encode() + b"\n")
        self._marks_listed = float("-inf")

    def _mark_path(self, name: str) -> PurePosixPath:
        return self._files.root / MARKS / f"{name}{MARK}"

    def _marked(self, *, is_fresh: bool = False) -> frozenset[str]:
        with self._listing:
            if is_fresh or time.monotonic() - self._marks_listed > MARKS_FRESH_S:
                begun = time.monotonic()
                names = self._files.names(self._files.root / MARKS)
                self._marks = frozenset(name.removesuffix(MARK) for name in names)
                self._marks_listed = begun
            return self._marks

    def _read_mark(self, name: str) -> dict[str, str | None] | None:
        """Read a mark; None if it is damaged. Raises FileNotFoundError."""
        try:
            mark = json.loads(self._files.read(self._mark_path(name)))
        except ValueError:
            return None
        return mark if isinstance(mark, dict) else None

    def _below(self, directory: str) -> dict[str, ObjectMeta]:
        found = self._files.below(self._files.root / directory)
        return {PurePosixPath(meta["path"]).name: meta for meta in found}


class BucketWriter:
    """One publication's object. It ends with `end`, whatever happened."""

    def __init__(self, objects: BucketObjects, sealed: SealedUpload) -> None:
        self.stored_as = f"{sealed.digest}.{secrets.token_hex(16)}"
        self._objects = objects
        self._sealed = sealed
        self._announced_s: float | None = None
        self._is_put = False
        # A record that names the object exists, or may: a creation that failed may have been made.
        self._may_be_used = False
        self._is_confirmed = False

    def store(self, record: VersionRecord, *, is_known: bool) -> None:
        # An earlier creation was refused, because another record has its number.
        self._may_be_used = False
        if is_known:
            self._objects.heal(record, self._sealed)
            return
        if self._announced_s is None:
            self._objects.announce(self.stored_as)
            self._announced_s = _since_boot_s()
        if not self._is_put:
            self._objects.put(self._sealed, self.stored_as)
            self._is_put = True
        self._check_time(self._announced_s)
        self._may_be_used = True

    def confirm(self) -> None:
        # The last check counts: this process may have been suspended while it created the record.
        if self._may_be_used and self._announced_s is not None:
            self._check_time(self._announced_s)
        self._is_confirmed = True

    def end(self) -> None:
        """Remove the intent, and the object unless a record names it. Leave both if that is unknown."""
        if self._is_confirmed:
            self._objects.keep(self._sealed)
        if self._announced_s is None or (self._may_be_used and not self._is_confirmed):
            return
        self._objects.withdraw(self.stored_as, is_used=self._may_be_used)

    def _check_time(self, announced_s: float) -> None:
        """Raise RegistryError if gc may soon take the publication for abandoned."""
        if _since_boot_s() - announced_s > GIVE_UP_AFTER_S:
            raise RegistryError("the upload took more than twelve hours to store: upload the artifact again")


def stored_name(record: VersionRecord) -> str:
    """Return the name of a version's object below `objects/`."""
    return record.stored_as or record.digest


def identity_of(meta: ObjectMeta) -> str:
    """Return a value that differs between two puts of one key: equal bytes may have equal ETags, but other times."""
    # In seconds: a listing and a single question may give different fractions.
    return f"{meta['e_tag']} {int(meta['last_modified'].timestamp())}"


def _since_boot_s() -> float:
    # It goes on while the machine sleeps.
    return time.clock_gettime(time.CLOCK_BOOTTIME)
