"""The small files of a registry in a directory: read, listed and created on a volume. Must not know what they mean."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePath
from typing import Self, TypeVar

from deltastore.registry.directory.reserve import Reserve
from deltastore.registry.files import FileVersion
from deltastore.registry.place import check_present
from deltastore.registry.storage import FULL, Storage, listed_names

# Mode of files that hold the hashes of keys, or audit lines.
OWNERS_MODE = 0o600

T = TypeVar("T")
Result = TypeVar("Result")


class DirectoryFiles:
    """The small files of a registry in a directory, on which `storage` makes the changes."""

    def __init__(self, root: Path, storage: Storage) -> None:
        self.root = root
        self.location = str(root)
        self.reserve = Reserve(root, storage)
        self._storage = storage

    def check_present(self, *, is_fresh: bool = False) -> None:
        check_present(self.root)

    def read(self, path: PurePath, *, is_fresh: bool = False) -> bytes:
        return Path(path).read_bytes()

    def is_directory(self, path: PurePath) -> bool:
        return Path(path).is_dir()

    def names(self, directory: PurePath, *, is_fresh: bool = False) -> list[str]:
        return listed_names(Path(directory))

    def subdirectories(self, directory: PurePath) -> list[str]:
        try:
            with os.scandir(directory) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except FileNotFoundError:
            return []

    def each(self, function: Callable[[T], Result], items: Sequence[T]) -> list[Result]:
        return [function(item) for item in items]

    def listed(self, *directories: PurePath) -> Self:
        return self

    def make_directory(self, directory: PurePath) -> None:
        self._storage.make_dirs(Path(directory))

    def make_durable(self, *directories: PurePath) -> None:
        for directory in directories:
            self._storage.fsync_dir(Path(directory))

    def add(self, path: PurePath, data: bytes) -> bool:
        return self._storage.add(Path(path), data)

    def add_or_make_room(
        self, path: PurePath, data: bytes, dispensable: Callable[[], Iterable[PurePath]]
    ) -> bool:
        try:
            return self.add(path, data)
        except OSError as error:
            if error.errno not in FULL:
                raise
        self.remove(dispensable())
        return self.reserve.create(Path(path), data)

    def replace(self, path: PurePath, data: bytes) -> None:
        self._storage.replace(Path(path), data, OWNERS_MODE)

    def append(self, path: PurePath, lines: bytes) -> None:
        self._storage.append(Path(path), lines, OWNERS_MODE)

    def delete(self, path: PurePath) -> bool:
        try:
            self._storage.unlink(Path(path))
            is_removed = True
        except FileNotFoundError:
            is_removed = False
        # Also without a file: the process that removed it may have died before its sync.
        if Path(path).parent.is_dir():
            self._storage.fsync_dir(Path(path).parent)
        return is_removed

    def versions(self, directory: PurePath) -> dict[str, FileVersion]:
        found: dict[str, FileVersion] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                # Opening a file of another kind may block.
                if stat.S_ISREG(status.st_mode):
                    identity = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                    found[entry.name] = FileVersion(identity, status.st_size, status.st_ctime_ns)
        return found

    def remove(self, paths: Iterable[PurePath]) -> None:
        with contextlib.suppress(OSError):
            for path in paths:
                # Another server may remove it at the same time.
                with contextlib.suppress(FileNotFoundError):
                    self._storage.unlink(Path(path))
