"""The only code that changes a registry's files: paths and descriptors. Must not know variants.

Each method of `Storage` down to `unlink` is one change on disk, so a test that replaces the class can crash between any
two changes. A file's bytes are durable after `fsync`, a name after `fsync_dir` of its directory. Between servers, only
`link` and `rename` are relied upon to be atomic. Reads do not go through this class.

The `Reserve` is disk space that is set aside for small changes which must succeed on a full disk: deletion, promotion,
quarantine. It is one file, `reserve/space`. On a full disk it is moved beside the file that is to be written,
overwritten in place, which takes no new block, and given its name. No other writer can take the space meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import TypeVar

from deltastore.errors import RegistryUnavailable, StorageFull

T = TypeVar("T")

TEMPORARY = ".tmp"
FULL = (errno.ENOSPC, errno.EDQUOT)
# Mode of files that other users may read, within the umask.
MODE = 0o666
FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
SYNC_FILE_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None)
if SYNC_FILE_RANGE is not None:
    SYNC_FILE_RANGE.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
SYNC_FILE_RANGE_WRITE = 2


class Storage:
    """Changes on disk. Every method raises the operating system's OSError."""

    def make_dir(self, path: Path) -> None:
        os.mkdir(path)

    def create(self, path: Path, mode: int = MODE) -> int:
        """Create a file and open it for reading and writing. Raises FileExistsError if the name is taken."""
        return os.open(path, FLAGS | os.O_EXCL, mode)

    def open_log(self, path: Path, mode: int) -> int:
        """Open a file to append to it and to read it, created if missing."""
        return os.open(path, FLAGS | os.O_APPEND, mode)

    def open_again(self, path: Path) -> int:
        """Open an existing file to overwrite it from its beginning. Changes nothing on disk."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def write(self, fd: int, data: memoryview) -> None:
        while data:
            data = data[os.write(fd, data) :]

    def truncate(self, fd: int, num_bytes: int) -> None:
        os.ftruncate(fd, num_bytes)

    def begin_writeback(self, fd: int, start: int, num_bytes: int) -> None:
        """Make the kernel begin writing bytes to the disk, so that a later `fsync` waits less. Guarantees nothing."""
        if SYNC_FILE_RANGE is not None:
            SYNC_FILE_RANGE(fd, start, num_bytes, SYNC_FILE_RANGE_WRITE)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fsync_dir(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file atomically; an existing target is replaced."""
        os.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name atomically. Raises FileExistsError if the name is taken."""
        os.link(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def touch(self, path: Path) -> float:
        """Set the times of a file or directory to now, by the clock of the file system, and return it in seconds."""
        os.utime(path)
        return path.stat().st_mtime

    def make_dirs(self, path: Path) -> None:
        """Create a directory and its missing parents, each durable before the next."""
        if path.is_dir():
            return
        self.make_dirs(path.parent)
        # If another server created it first, its name may still need the sync below.
        with contextlib.suppress(FileExistsError):
            self.make_dir(path)
        self.fsync_dir(path.parent)

    @contextlib.contextmanager
    def temporary(self, directory: Path, data: bytes, mode: int = MODE) -> Iterator[Path]:
        """Write `data` durably to a file with a temporary name, which is removed after the block."""
        path = directory / f".{secrets.token_hex(8)}{TEMPORARY}"
        fd = self.create(path, mode)
        try:
            try:
                self.write(fd, memoryview(data))
                self.fsync(fd)
            finally:
                os.close(fd)
            yield path
        finally:
            with contextlib.suppress(FileNotFoundError):  # the block may have renamed it
                self.unlink(path)

    def linked(self, source: Path, target: Path) -> bool:
        """Give a file a second name atomically; return False if another file has the name."""
        try:
            self.link(source, target)
        except FileExistsError:
            # A client of a network file system that misses the reply repeats the call, and finds its own file.
            with contextlib.suppress(FileNotFoundError):
                return os.path.samefile(source, target)
            return False
        return True

    def add(self, path: Path, data: bytes, mode: int = MODE) -> bool:
        """Create a file with its contents in one atomic step that is durable on return; False if the name is taken."""
        is_made = self._finished(path, data, mode, lambda temporary: self.linked(temporary, path))
        if is_made:
            self.fsync_dir(path.parent)
        return is_made

    def replace(self, path: Path, data: bytes, mode: int = MODE) -> None:
        """Replace a file's contents in one atomic step that is durable on return."""
        self._finished(path, data, mode, lambda temporary: self.rename(temporary, path))
        self.fsync_dir(path.parent)

    def append(self, path: Path, lines: bytes, mode: int) -> None:
        """Append whole lines to a file in one durable write. A line that a crash cut short is ended first."""
        fd = self.open_log(path, mode)
        try:
            end = os.fstat(fd).st_size
            is_cut = end > 0 and os.pread(fd, 1, end - 1) != b"\n"
            self.write(fd, memoryview(b"\n" + lines if is_cut else lines))
            self.fsync(fd)
        finally:
            os.close(fd)
        self.fsync_dir(path.parent)

    def _finished(self, path: Path, data: bytes, mode: int, finish: Callable[[Path], T]) -> T:
        """Write a temporary file beside `path` and give it its name by `finish`."""
        for is_last in (False, False, False, True):
            with self.temporary(path.parent, data, mode) as temporary:
                try:
                    return finish(temporary)
                except FileNotFoundError:
                    # The gc of another server took it for one that a crash left behind.
                    if is_last or temporary.exists():
                        raise
        raise AssertionError("the last attempt returns or raises")


def file_size(path: Path) -> int | None:
    """Return the bytes of a file; None if it does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def read_from_volume(path: Path) -> bytes:
    """Return the contents of a small file as its volume has them, not those that the kernel keeps in memory."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.readall()


def file_time_s(path: Path) -> float | None:
    """Return the time of a file's last change in seconds; None if it does not exist."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def is_replaced(error: Exception) -> bool:
    """True if an error was raised because another client of a network file system removed or replaced an open file."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno == errno.ESTALE


def listed_names(directory: Path) -> list[str]:
    """List a directory; empty if it is missing.

    Opening a directory makes an NFS client ask the server if it has changed, so the list has every name that was made
    before.
    """
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def try_lock(fd: int) -> bool | None:
    """Lock an open file until its descriptor is closed; False if another one holds it, None if it cannot be locked."""
    try:
        flock(fd, exclusive=True, wait=False)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def flock(fd: int, *, exclusive: bool, wait: bool) -> None:
    """Lock an open file until its descriptor is closed; the kernel releases it when the process dies."""
    fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB))


@contextlib.contextmanager
def explained(root: PurePath) -> Iterator[None]:
    """Turn an OSError inside the block into StorageFull or RegistryUnavailable, which name the path and the way out."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise StorageFull(
                f"the disk or quota under {root} is full: free some space there, "
                f"or run `peraxis registry gc --registry {root}`",
                public="the disk or quota of the registry is full: ask its operator to free some space, "
                "or to run `peraxis registry gc`",
            ) from error
        raise RegistryUnavailable(
            f"{error.filename or root}: {error.strerror or error}: nothing was acknowledged; "
            "check the disk and the rights of this user, then try again",
            public=f"the registry's disk failed: {error.strerror or 'unknown error'}: nothing was acknowledged; "
            "ask its operator to check the volume",
        ) from error


RESERVE_DIRECTORY = "reserve"
RESERVE_NAME = "space"
# The largest is set aside that there is room for.
RESERVE_SIZES = (64 << 10, 16 << 10, 4 << 10)


class Reserve:
    """The registry's reserve, which all its servers share. Each use needs one file of it, and sets the next aside."""

    def __init__(self, root: Path, storage: Storage) -> None:
        self.directory = root / RESERVE_DIRECTORY
        self.path = self.directory / RESERVE_NAME
        self._storage = storage

    def fill(self) -> None:
        """Set space aside if there is any. A failure is not reported: changes then need a disk that is not full."""
        present = file_size(self.path) or 0
        for num_bytes in (size for size in RESERVE_SIZES if size > present):
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
