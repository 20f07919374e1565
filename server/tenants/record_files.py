"""The files of small records, `ROOT/tenants/NAME/*.json`, in a registry's directory. Must not know what they mean.

`bucket_files.py` has the same for a bucket. Files have mode 0600. A file is replaced by rename; an operator may
overwrite it in place, which only the status of the file tells.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from deltastore.registry.directory.layout import check_present
from deltastore.registry.storage import Storage, explained

DIRECTORY = "tenants"
SUFFIX = ".json"
MODE = 0o600
# The age at which records are looked at again before they are used.
FRESH_S = 0.5
# Between two readings for records that are not known: unknown names must not keep the disk busy.
REREAD_S = 0.05


class FileVersion(NamedTuple):
    """The identity of a file's contents, without reading them."""

    identity: Hashable
    # When it may have changed last; 0 if no change leaves the identity as it was.
    changed_ns: int


class RecordFiles(Protocol):
    """The files of one kind of record by the records' names. Every method raises RegistryUnavailable or StorageFull.

    `fresh_s` and `reread_s` are the times between two readings of records that are known, and of one that is not.
    """

    fresh_s: float
    reread_s: float

    @property
    def where(self) -> str:
        """The registry, for messages."""

    def path(self, name: str) -> str:
        """Return the path of a record's file, for messages."""

    def explained(self) -> AbstractContextManager[None]:
        """Turn an OSError inside the block into RegistryUnavailable or StorageFull."""

    def check_present(self) -> None:
        """Raise RegistryUnavailable if the registry is gone."""

    def scan(self, pattern: re.Pattern[str]) -> Mapping[str, FileVersion]:
        """Return the version of every file whose name is a record's. Raises FileNotFoundError without a directory."""

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return a file's first bytes, `max_bytes` or more if it has them. Raises FileNotFoundError, OSError."""

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a file in one atomic step that is durable on return."""

    def remove(self, name: str) -> bool:
        """Remove a file, durably. Return False if there is none."""


class DirectoryRecordFiles:
    """Files below a registry's directory; the directories need not exist.

    Args:
        root: the registry.
        kind: the directory's name in `ROOT/tenants`.
        storage: changes the files.
    """

    fresh_s = FRESH_S
    reread_s = REREAD_S

    def __init__(self, root: Path, kind: str, storage: Storage) -> None:
        self._root = root
        self._path = root / DIRECTORY / kind
        self._storage = storage

    @property
    def where(self) -> str:
        return str(self._root)

    def path(self, name: str) -> str:
        return str(self._file(name))

    def explained(self) -> AbstractContextManager[None]:
        return explained(self._root)

    def check_present(self) -> None:
        check_present(self._root)

    def scan(self, pattern: re.Pattern[str]) -> dict[str, FileVersion]:
        """Return the version of every regular file whose name is a record's. Opening another kind may block."""
        versions: dict[str, FileVersion] = {}
        with os.scandir(self._path) as entries:
            for entry in entries:
                name = entry.name.removesuffix(SUFFIX)
                if name == entry.name or not pattern.fullmatch(name):
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    identity = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                    versions[name] = FileVersion(identity, status.st_ctime_ns)
        return versions

    def read(self, name: str, max_bytes: int) -> bytes:
        with self._file(name).open("rb") as file:
            return file.read(max_bytes)

    def write(self, name: str, data: bytes) -> None:
        self._storage.make_dirs(self._path)
        self._storage.replace(self._file(name), data, MODE)

    def remove(self, name: str) -> bool:
        try:
            self._storage.unlink(self._file(name))
            is_removed = True
        except FileNotFoundError:
            is_removed = False
        # Also without a file: the process that removed it may have died before its sync.
        if self._path.is_dir():
            self._storage.fsync_dir(self._path)
        return is_removed

    def _file(self, name: str) -> Path:
        return self._path / f"{name}{SUFFIX}"
