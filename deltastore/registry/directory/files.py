"""The small files of a registry in a directory: read, listed and created on a volume. Must not know what they mean."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePath
from typing import Self, TypeVar

from deltastore.registry.directory.reserve import Reserve
from deltastore.registry.storage import FULL, Storage, listed_names

T = TypeVar("T")
Result = TypeVar("Result")


class DirectoryFiles:
    """The small files of a registry in a directory, on which `storage` makes the changes."""

    def __init__(self, root: Path, storage: Storage) -> None:
        self.root = root
        self.reserve = Reserve(root, storage)
        self._storage = storage

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

    def remove(self, paths: Iterable[PurePath]) -> None:
        with contextlib.suppress(OSError):
            for path in paths:
                # Another server may remove it at the same time.
                with contextlib.suppress(FileNotFoundError):
                    self._storage.unlink(Path(path))
