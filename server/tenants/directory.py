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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from deltastore.registry.storage import Storage, explained

log = logging.getLogger(__name__)

# The age at which records are looked at again before they are used.
FRESH_S = 0.5
# Between two readings for records that `current` does not have: unknown names must not keep the disk busy.
REREAD_S = 0.05
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


class RecordDirectory(Generic[R]):
    """The valid records of one directory by name: the file `NAME.json` holds the record `NAME`.

    A file that is damaged, half-written, too large or unreadable is left out and logged, and read again when it
    changes. Methods raise RegistryError or StorageFull if the disk fails.

    Args:
        root: the registry.
        name: of the directory below `tenants/`; it need not exist.
        kind: the type of the records.
        pattern: matches the names of records; no name may lead out of the directory. Other files are ignored.
        storage: changes the files.
    """

    def __init__(
        self, root: Path, name: str, kind: type[R], pattern: re.Pattern[str], storage: Storage
    ) -> None:
        self._root = root
        self._path = root / DIRECTORY / name
        self._pattern = pattern
        self._storage = storage
        self._decoder = msgspec.json.Decoder(kind)
        self._records: Mapping[str, R] = {}
        # Of the files, the damaged ones included.
        self._versions: dict[str, FileVersion] = {}
        # The files that were read so long after their last change that no other can hide behind it.
        self._settled: frozenset[str] = frozenset()
        self._read_at = float("-inf")
        self._refreshing = asyncio.Lock()
        self._reading = threading.Lock()
        # Its own: tenants' work can fill the pools that requests share.
        self._thread = ThreadPoolExecutor(1, f"tenants-{name}")

    @property
    def damaged(self) -> frozenset[str]:
        """The names of records that were left out when they were read last."""
        return frozenset(self._versions.keys() - self._records.keys())

    async def current(self) -> Mapping[str, R]:
        """Return all records with the changes by this object, and those by others that are older than `FRESH_S`.

        Event loop only; files are read on a thread.
        """
        if time.monotonic() - self._read_at > FRESH_S:
            async with self._refreshing:
                # Not again for those that waited for the lock.
                if time.monotonic() - self._read_at > FRESH_S:
                    await asyncio.get_running_loop().run_in_executor(self._thread, self.read)
        return self._records

    async def latest(self) -> Mapping[str, R]:
        """Return all records with every change made before the call. Waits until the files may be read again.

        Event loop only; files are read on a thread, at most once per `REREAD_S`.
        """
        asked = time.monotonic()
        async with self._refreshing:
            # Not again for those that waited for the lock.
            if self._read_at < asked:
                await asyncio.sleep(max(0.0, self._read_at + REREAD_S - time.monotonic()))
                await asyncio.get_running_loop().run_in_executor(self._thread, self.read)
        return self._records

    def read(self) -> Mapping[str, R]:
        """Read the files that have changed, and return all records as they are now."""
        with self._reading, explained(self._root):
            begun = time.monotonic()
            self._read_changed()
            self._read_at = begun
            return self._records

    def write(self, name: str, record: R) -> None:
        """Write or replace a record in one atomic step that is durable on return."""
        with explained(self._root):
            self._storage.make_dirs(self._path)
            self._storage.replace(self._path / f"{name}{SUFFIX}", msgspec.json.encode(record), MODE)
        self._expire()

    def remove(self, name: str) -> bool:
        """Remove a record, durably. Return False if there is none."""
        with explained(self._root):
            try:
                self._storage.unlink(self._path / f"{name}{SUFFIX}")
                is_removed = True
            except FileNotFoundError:
                is_removed = False
            # Also without a file: the process that removed it may have died before its sync.
            if self._path.is_dir():
                self._storage.fsync_dir(self._path)
        self._expire()
        return is_removed

    def _expire(self) -> None:
        """Make the next use of the records read them again."""
        # After a reading under way, which may have missed the change and sets the time when it ends.
        with self._reading:
            self._read_at = float("-inf")

    def _read_changed(self) -> None:
        settled_before_ns = time.time_ns() - SETTLED_NS
        versions = self._scan()
        records = {}
        for name, version in versions.items():
            is_known = version == self._versions.get(name)
            record = self._records.get(name) if is_known and name in self._settled else None
            # A file that could not be read is tried again, and logged once.
            record = record or self._read_file(name, is_logged=is_known)
            if record is not None:
                records[name] = record
        self._records, self._versions = records, versions
        self._settled = frozenset(
            name for name, version in versions.items() if version.changed_ns < settled_before_ns
        )

    def _scan(self) -> dict[str, FileVersion]:
        """Return the version of every regular file whose name is a record's. Opening another kind may block."""
        versions: dict[str, FileVersion] = {}
        try:
            found = os.scandir(self._path)
        except FileNotFoundError:
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
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            if not is_logged:
                log.error("%s is left out: %s: restore or remove it", path, error)
            return None
