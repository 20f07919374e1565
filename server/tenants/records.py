"""Small JSON records of a registry, one file each, that every server reads again when they have changed.

An operator may overwrite a file in place, which only its version tells.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import msgspec

from deltastore.errors import PeraxisError
from deltastore.registry.claims import is_bucket
from deltastore.registry.directory.files import DirectoryFiles
from deltastore.registry.storage import Storage, explained
from deltastore.registry.store import FileVersion, SmallFiles
from server.registry_calls import RegistryCalls

DIRECTORY = "tenants"


class RecordFiles(NamedTuple):
    """The files of one kind of record."""

    files: SmallFiles
    directory: PurePath


def open_files(registry: str | Path, storage: Storage | None = None) -> SmallFiles:
    """Return the small files of a registry.

    Args:
        registry: its directory, or `s3://BUCKET/PREFIX`.
        storage: changes the files of a directory.

    Raises:
        UsageError: the location is malformed.
    """
    if not is_bucket(str(registry)):
        return DirectoryFiles(Path(registry).absolute(), storage or Storage())
    # Deferred: only a bucket needs obstore.
    from deltastore.registry.bucket.client import Bucket
    from deltastore.registry.bucket.files import BucketFiles

    return BucketFiles(Bucket.open(str(registry)))


def record_files(registry: str | Path, kind: str, storage: Storage | None = None) -> RecordFiles:
    """Return the files of one kind of record, `tenants/KIND/*.json`; arguments and errors are those of `open_files`."""
    files = open_files(registry, storage)
    return RecordFiles(files, files.root / DIRECTORY / kind)


log = logging.getLogger(__name__)

SUFFIX = ".json"
# The age at which records are looked at again before they are used.
FRESH_S = 0.5
# Between two readings for records that are not known: unknown names must not keep the disk busy.
REREAD_S = 0.05
# The same in a bucket, where a reading is one call that the store's operator pays for.
BUCKET_FRESH_S = 1.0
BUCKET_REREAD_S = 0.25
# The longest wait for a look at records that were read before.
PATIENCE_S = 0.5
# Clocks of file systems are coarse: a second change in the same tick leaves a file's times as they were. A file is
# read again until its last change is older than this.
SETTLED_NS = 2_000_000_000
MAX_BYTES = 64 << 10

R = TypeVar("R", bound=msgspec.Struct)


class Reading(NamedTuple, Generic[R]):
    """The files of a directory at one moment."""

    begun: float = float("-inf")
    records: Mapping[str, R] = MappingProxyType({})
    # Versions of all files, damaged ones included.
    versions: Mapping[str, FileVersion] = MappingProxyType({})
    # The files that were read so long after their last change that no other can hide behind it.
    settled: frozenset[str] = frozenset()


class RecordDirectory(Generic[R]):
    """The valid records of one directory by name: the file `NAME.json` holds the record `NAME`.

    A file that is damaged, half-written, too large or unreadable is left out and logged, and read again when it
    changes. Methods raise RegistryUnavailable or StorageFull if the disk fails.

    Args:
        files: those of the records.
        kind: the type of the records.
        pattern: matches the names of records; no name may lead out of the directory. Other files are ignored.
        calls: reads the files for coroutines. With it the registry must exist: its absence is a failure of the volume.
    """

    def __init__(
        self,
        files: RecordFiles,
        kind: type[R],
        pattern: re.Pattern[str],
        calls: RegistryCalls | None = None,
    ) -> None:
        self._files, self._path = files
        bucket = is_bucket(self._files.location)
        self._fresh_s, self._reread_s = (BUCKET_FRESH_S, BUCKET_REREAD_S) if bucket else (FRESH_S, REREAD_S)
        self._pattern = pattern
        self._must_exist = calls is not None
        self._calls = calls or RegistryCalls(self._files.location, lambda: None)
        self._decoder = msgspec.json.Decoder(kind)
        self._last: Reading[R] = Reading()
        # Readings may end in another order than they began.
        self._keeping = threading.Lock()
        self._looked_at = float("-inf")  # when the last look began that has ended, also one that failed
        self._changed_at = float("-inf")  # the last change by this object
        self._looking: asyncio.Task[None] | None = None
        self._failure: PeraxisError | None = None  # of the last look that has ended

    @property
    def damaged(self) -> frozenset[str]:
        """The names of records that were left out when they were read last."""
        return frozenset(self._last.versions.keys() - self._last.records.keys())

    @property
    def known(self) -> Mapping[str, R]:
        """The records that were read last, however long ago."""
        return self._last.records

    async def current(self) -> Mapping[str, R]:
        """Return all records with the changes by this object, and those by others that are older than `FRESH_S`.

        While the disk fails, hangs or is slow, the records that were read last stand. Event loop only.
        """
        # Twice: a look under way may have begun before a change.
        for _ in range(2):
            if self._is_fresh():
                break
            look = self._look()
            has_read = self._last.begun > float("-inf")
            await asyncio.wait({look}, timeout=PATIENCE_S if has_read else None)
            if not has_read:
                look.result()
        return self._last.records

    async def latest(self) -> Mapping[str, R]:
        """Return all records with every change made before the call. Waits until the files may be read again.

        Event loop only; files are read at most once per `REREAD_S`.
        """
        asked = time.monotonic()
        while self._last.begun < asked:
            if self._looking is None or self._looking.done():
                await asyncio.sleep(max(0.0, self._looked_at + self._reread_s - time.monotonic()))
            # Cancelling one of those that wait must not cancel the look.
            await asyncio.shield(self._look())
        return self._last.records

    def last_read(self) -> Mapping[str, R]:
        """Return the records that were read last, without waiting.

        Raises:
            RegistryUnavailable: the look after them has failed.
        """
        if self._failure is not None:
            raise self._failure
        return self._last.records

    def read(self) -> Mapping[str, R]:
        """Read the files that have changed, and return all records as they are now."""
        with self._explained():
            reading = self._read_changed(self._last)
        with self._keeping:
            if reading.begun > self._last.begun:
                self._last = reading
        return reading.records

    def write(self, name: str, record: R) -> None:
        """Write or replace a record in one atomic step that is durable on return."""
        with self._explained():
            # The directory below a volume that is gone must not be written to.
            self._check_present()
            self._files.make_directory(self._path)
            self._files.replace(self._file(name), msgspec.json.encode(record))
        self._changed_at = time.monotonic()

    def remove(self, name: str) -> bool:
        """Remove a record, durably. Return False if there is none."""
        with self._explained():
            self._check_present()
            is_removed = self._files.delete(self._file(name))
        with self._keeping:
            # It must not stand until the next reading, which may fail.
            left = {other: record for other, record in self._last.records.items() if other != name}
            self._last = self._last._replace(records=left)
        self._changed_at = time.monotonic()
        return is_removed

    def _is_fresh(self) -> bool:
        return self._looked_at > self._changed_at and time.monotonic() - self._looked_at <= self._fresh_s

    def _look(self) -> asyncio.Task[None]:
        """Begin to read the files, or join the reading under way."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._read_on_thread())
            # A failure is that of the volume, and nothing may wait for the look.
            self._looking.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._looking

    async def _read_on_thread(self) -> None:
        begun = time.monotonic()
        try:
            await self._calls.run(self.read, None)
            self._failure = None
        except PeraxisError as error:
            self._failure = error
            raise
        finally:
            self._looked_at = begun

    def _check_present(self) -> None:
        if self._must_exist:
            self._files.check_present(is_fresh=True)

    def _explained(self) -> AbstractContextManager[None]:
        return explained(self._files.root)

    def _file(self, name: str) -> PurePath:
        return self._path / f"{name}{SUFFIX}"

    def _read_changed(self, last: Reading[R]) -> Reading[R]:
        begun, settled_before_ns = time.monotonic(), time.time_ns() - SETTLED_NS
        versions = self._versions()
        same = {name for name, version in versions.items() if version == last.versions.get(name)}
        records = {name: last.records[name] for name in same & last.settled & last.records.keys()}
        unread = [name for name in versions if name not in records]
        # A file that could not be read is tried again, and logged once.
        found = self._files.each(
            lambda name: self._read_file(name, versions[name].size_bytes, is_logged=name in same), unread
        )
        records |= {name: record for name, record in zip(unread, found, strict=True) if record is not None}
        # Files that vanished meanwhile may have vanished with their volume.
        self._check_present()
        settled = (name for name, version in versions.items() if version.changed_ns < settled_before_ns)
        return Reading(begun, records, versions, frozenset(settled))

    def _versions(self) -> dict[str, FileVersion]:
        """Return the version of every file whose name is a record's by the name of the record."""
        found = {}
        for file_name, version in self._files.versions(self._path).items():
            name = file_name.removesuffix(SUFFIX)
            if name != file_name and self._pattern.fullmatch(name):
                found[name] = version
        return found

    def _read_file(self, name: str, size_bytes: int, *, is_logged: bool) -> R | None:
        path = self._file(name)
        try:
            if size_bytes > MAX_BYTES or len(raw := self._files.read(path)) > MAX_BYTES:
                raise ValueError(f"it has more than {MAX_BYTES} bytes")
            return self._decoder.decode(raw)
        except FileNotFoundError:
            return None
        except OSError as error:
            if is_logged:
                # The file is the same, so the disk has failed: its record stands.
                return self._last.records.get(name)
            log.error("%s is left out: %s: restore or remove it", path, error)
            return None
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            if not is_logged:
                log.error("%s is left out: %s: restore or remove it", path, error)
            return None
