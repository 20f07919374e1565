"""Disk space that is set aside for small changes which must succeed on a full disk: deletion, promotion, quarantine.

The space is one file, `reserve/space`. On a full disk it is moved beside the file that is to be written, overwritten
in place, which takes no new block, and given its name. No other writer can take the space meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from deltastore.registry.storage import FULL, TEMPORARY, Storage, file_size

DIRECTORY = "reserve"
FILE = "space"
# The largest is set aside that there is room for.
SIZES = (64 << 10, 16 << 10, 4 << 10)


class Reserve:
    """The registry's reserve, which all its servers share. Each use needs one file of it, and sets the next aside."""

    def __init__(self, root: Path, storage: Storage) -> None:
        self.directory = root / DIRECTORY
        self.path = self.directory / FILE
        self._storage = storage

    def fill(self) -> None:
        """Set space aside if there is any. A failure is not reported: changes then need a disk that is not full."""
        present = file_size(self.path) or 0
        for num_bytes in (size for size in SIZES if size > present):
            try:
                self._storage.make_dirs(self.directory)
                self._storage.replace(self.path, bytes(num_bytes))
                return
            except OSError as error:
                if error.errno not in FULL:
                    return

    def replace(self, path: Path, data: bytes) -> None:
        """Replace a file's contents as `Storage.replace` does; if the disk is full, in the space of the reserve."""
        try:
            self._storage.replace(path, data)
        except OSError as error:
            if error.errno not in FULL:
                raise
            with self._used(path.parent, data, error) as temporary:
                self._storage.rename(temporary, path)

    def create(self, path: Path, data: bytes) -> bool:
        """Create a file as `Storage.add` does; if the disk is full, in the space of the reserve."""
        try:
            return self._storage.add(path, data)
        except OSError as error:
            if error.errno not in FULL:
                raise
            with self._used(path.parent, data, error) as temporary:
                return self._storage.linked(temporary, path)

    def give_for(self, change: Callable[[], None]) -> None:
        """Make a change that may need a block of a directory; on a full disk, give the reserve back for it."""
        try:
            change()
        except OSError as error:
            if error.errno not in FULL:
                raise
            with contextlib.suppress(FileNotFoundError):
                self._storage.unlink(self.path)
            change()
            self.fill()

    @contextlib.contextmanager
    def _used(self, directory: Path, data: bytes, error: OSError) -> Iterator[Path]:
        """Write `data` into the reserve and move it to a directory, under a temporary name that the block replaces.

        Raises `error` if another change has taken the reserve, or none was set aside.
        """
        temporary = directory / f".{secrets.token_hex(8)}{TEMPORARY}"
        try:
            self._storage.rename(self.path, temporary)
        except FileNotFoundError:
            raise error from None
        try:
            # Before the bytes change: after a power loss, the reserve's name must not lead to the new file.
            self._storage.fsync_dir(self.directory)
            self._overwrite(temporary, data)
            yield temporary
        finally:
            with contextlib.suppress(FileNotFoundError):
                self._storage.unlink(temporary)
        self._storage.fsync_dir(directory)
        self.fill()

    def _overwrite(self, path: Path, data: bytes) -> None:
        fd = self._storage.open_again(path)
        try:
            self._storage.write(fd, memoryview(data))
            self._storage.truncate(fd, len(data))
            self._storage.fsync(fd)
        finally:
            os.close(fd)
