"""A directory of small JSON records, one file each, that every server on a registry reads again when it has changed.

Owns reading, watching and atomic writing. Must not know what the records mean. Files have mode 0600. This module
replaces a file by rename; an operator may overwrite it in place, which only the status of the file tells.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import msgspec

from deltastore.registry.directory.layout import check_present
from deltastore.registry.storage import Storage, explained
from server.volume.calls import RegistryCalls

log = logging.getLogger(__name__)

# The age at which records are looked at again before they are used.
FRESH_S = 0.5
# Between two readings for records that `current` does not have: unknown names must not keep the disk busy.
REREAD_S = 0.05
# The longest wait for a look at records that were read before.
PATIENCE_S = 0.5
# Clocks of file systems are coarse: a second change in the same tick leaves a file's times as they were. A file is
# read again until its last change is older than this.
SETTLED_NS = 2_000_000_000
MAX_BYTES = 64 << 10
DIRECTORY = "tenants"
SUFFIX = ".json"
MODE = 0o600

R = TypeVar("R", bound=msgspec.Struct)


class FileVersion(NamedTuple):
    """The identity of a file's contents, without reading them."""

    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int


class Reading(NamedTuple, Generic[R]):
    """The files of a directory at one moment."""

    begun: float = float("-inf")
    records: Mapping[str, R] = MappingProxyType({})
    # Of the files, the damaged ones included.
    versions: Mapping[str, FileVersion] = MappingProxyType({})
    # The files that were read so long after their last change that no other can hide behind it.
    settled: frozenset[str] = frozenset()


class RecordDirectory(Generic[R]):
    """The valid records of one directory by name: the file `NAME.json` holds the record `NAME`.

    A file that is damaged, half-written, too large or unreadable is left out and logged, and read again when it
    changes. Methods raise RegistryUnavailable or StorageFull if the disk fails.

    Args:
        path: `ROOT/tenants/NAME` of the registry ROOT; it need not exist.
        kind: the type of the records.
        pattern: matches the names of records; no name may lead out of the directory. Other files are ignored.
        storage: changes the files.
        calls: reads the files for coroutines. With it the registry must exist: its absence is a failure of the volume.
    """

    def __init__(
        self,
        path: Path,
        kind: type[R],
        pattern: re.Pattern[str],
        storage: Storage,
        calls: RegistryCalls | None = None,
    ) -> None:
        self._root = path.parent.parent
        self._path = path
        self._pattern = pattern
        self._storage = storage
        self._must_exist = calls is not None
        self._calls = calls or RegistryCalls(str(self._root), lambda: None)
        self._decoder = msgspec.json.Decoder(kind)
        self._last: Reading[R] = Reading()
        # Readings may end in another order than they began.
        self._keeping = threading.Lock()
        self._looked_at = float("-inf")  # when the last look began that has ended, also one that failed
        self._changed_at = float("-inf")  # the last change by this object
        self._looking: asyncio.Task[None] | None = None

    @property
    def damaged(self) -> frozenset[str]:
        """The names of records that were left out when they were read last."""
        return frozenset(self._last.versions.keys() - self._last.records.keys())

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
                await asyncio.sleep(max(0.0, self._looked_at + REREAD_S - time.monotonic()))
            # Cancelling one of those that wait must not cancel the look.
            await asyncio.shield(self._look())
        return self._last.records

    def read(self) -> Mapping[str, R]:
        """Read the files that have changed, and return all records as they are now."""
        with explained(self._root):
            reading = self._read_changed(self._last)
        with self._keeping:
            if reading.begun > self._last.begun:
                self._last = reading
        return reading.records

    def write(self, name: str, record: R) -> None:
        """Write or replace a record in one atomic step that is durable on return."""
        with explained(self._root):
            # The directory below a volume that is gone must not be written to.
            self._check_present()
            self._storage.make_dirs(self._path)
            self._storage.replace(self._path / f"{name}{SUFFIX}", msgspec.json.encode(record), MODE)
        self._changed_at = time.monotonic()

    def remove(self, name: str) -> bool:
        """Remove a record, durably. Return False if there is none."""
        with explained(self._root):
            self._check_present()
            try:
                self._storage.unlink(self._path / f"{name}{SUFFIX}")
                is_removed = True
            except FileNotFoundError:
                is_removed = False
            # Also without a file: the process that removed it may have died before its sync.
            if self._path.is_dir():
                self._storage.fsync_dir(self._path)
        with self._keeping:
            # It must not stand until the next reading, which may fail.
            left = {other: record for other, record in self._last.records.items() if other != name}
            self._last = self._last._replace(records=left)
        self._changed_at = time.monotonic()
        return is_removed

    def _is_fresh(self) -> bool:
        return self._looked_at > self._changed_at and time.monotonic() - self._looked_at <= FRESH_S

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
            await self._calls.run(self.read)
        finally:
            self._looked_at = begun

    def _check_present(self) -> None:
        if self._must_exist:
            check_present(self._root)

    def _read_changed(self, last: Reading[R]) -> Reading[R]:
        begun, settled_before_ns = time.monotonic(), time.time_ns() - SETTLED_NS
        versions = self._scan()
        records = {}
        for name, version in versions.items():
            is_known = version == last.versions.get(name)
            record = last.records.get(name) if is_known and name in last.settled else None
            # A file that could not be read is tried again, and logged once.
            record = record or self._read_file(name, is_logged=is_known)
            if record is not None:
                records[name] = record
        # Files that vanished meanwhile may have vanished with their volume.
        self._check_present()
        settled = (name for name, version in versions.items() if version.changed_ns < settled_before_ns)
        return Reading(begun, records, versions, frozenset(settled))

    def _scan(self) -> dict[str, FileVersion]:
        """Return the version of every regular file whose name is a record's. Opening another kind may block."""
        versions: dict[str, FileVersion] = {}
        try:
            found = os.scandir(self._path)
        except FileNotFoundError:
            self._check_present()
            return versions
        with found as entries:
            for entry in entries:
                name = entry.name.removesuffix(SUFFIX)
                if name == entry.name or not self._pattern.fullmatch(name):
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    versions[name] = FileVersion(
                        status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
                    )
        return versions

    def _read_file(self, name: str, *, is_logged: bool) -> R | None:
        path = self._path / f"{name}{SUFFIX}"
        try:
            with path.open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
            if len(raw) > MAX_BYTES:
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
