"""Local copies of objects that are kept in a bucket, in one directory that the processes of a machine share.

`objects/DIGEST` is a complete copy, whose last use is its time of change. `fetches/DIGEST` is a copy that is being
fetched: its process holds a lock on it, which the kernel releases when the process dies. `lock` is held while space is
given away. Nothing else is kept, so that any process may be killed at any time.

Must not know buckets, records or what the bytes mean. A copy has its object's size; its bytes are verified where they
are read, which also finds what a crash of the machine left unwritten.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from deltastore.errors import RegistryError, StorageFull
from deltastore.registry.storage import FULL, flock, try_lock

# Fills an open file from its beginning with the bytes of an object. Its length is the object's already.
Fetch = Callable[[int], None]

# For the space of objects that are being fetched.
WAIT_S = 30.0
POLL_S = 0.05
# The unit of a file's `st_blocks`.
BLOCK_BYTES = 512


class _File(NamedTuple):
    """A file of the cache, ordered by its time."""

    changed_ns: int
    path: Path
    num_bytes: int
    num_disk_bytes: int  # that its removal frees


class ObjectCache:
    """Copies of objects by digest, at most `max_bytes` of them, of which the least recently used go first.

    Threads and processes may call it at once. A copy that is evicted while a process reads it keeps its bytes, and its
    space, until they are closed.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """Make the directory. It is made again if it is removed later.

        Raises:
            RegistryError: It cannot be made or written.
        """
        self.directory = directory
        self.max_bytes = max_bytes
        self._objects = directory / "objects"
        self._fetches = directory / "fetches"
        with self._space():
            self._remove_dead_fetches()

    def holds(self, digest: str) -> bool:
        """True if `path` would fetch nothing now."""
        return self._path(digest).exists()

    def path(self, digest: str, size_bytes: int, fetch: Fetch) -> Path:
        """Return a complete copy of an object; fetch it unless there is one. Call it again if the copy is gone.

        Only one thread of all processes fetches an object; the others wait for it, and fetch it if that one fails.

        Args:
            digest: SHA-256 as 64 lowercase hex digits.
            size_bytes: The object's size.
            fetch: Fills the copy. Its exception is passed on, and leaves nothing.

        Raises:
            StorageFull: The disk is full, the object is larger than the cache, or others that are being fetched take
                all its space.
            RegistryError: The directory cannot be read or written.
        """
        while not self._used(digest):
            with self._fetching(digest) as fd:
                # Another process may have finished it before this one had the lock.
                if fd is not None and not self.holds(digest):
                    self._give_space(fd, digest, size_bytes)
                    fetch(fd)
                    with self._space():
                        os.replace(self._fetches / digest, self._path(digest))
        return self._path(digest)

    def adopt(self, digest: str, file: Path) -> None:
        """Make a complete file of an object its copy by a rename; leave the file if there is no space.

        Args:
            digest: The object's digest.
            file: In the file system of the cache's directory.
        """
        with self._space():
            size_bytes = file.stat().st_size
            if not self.holds(digest) and self._evict_for(size_bytes):
                os.replace(file, self._path(digest))
                os.utime(self._path(digest))

    def discard(self, digest: str, found: os.stat_result | None = None) -> None:
        """Remove a copy, so that the next `path` fetches the object again.

        Args:
            digest: The object's digest.
            found: Remove only the file of this status.
        """
        with self._space(), contextlib.suppress(FileNotFoundError):
            if found is None or os.path.samestat(self._path(digest).stat(), found):
                self._path(digest).unlink()

    def _path(self, digest: str) -> Path:
        return self._objects / digest

    def _used(self, digest: str) -> bool:
        """Note the use of a copy; False if there is none."""
        with self._explained():
            try:
                os.utime(self._path(digest))
            except FileNotFoundError:
                return False
            except OSError as error:
                # The copies on a disk that became read-only can still be read.
                if error.errno != errno.EROFS:
                    raise
                return self.holds(digest)
            return True

    @contextlib.contextmanager
    def _fetching(self, digest: str) -> Iterator[int | None]:
        """Open and lock the file of a fetch, which is removed after the block unless it was renamed.

        The block has None if another fetch of the object ended meanwhile.
        """
        path = self._fetches / digest
        with self._locked(path) as fd:
            if not _is_file(path, fd):
                yield None
                return
            try:
                yield fd
            finally:
                if _is_file(path, fd):
                    path.unlink()

    @contextlib.contextmanager
    def _space(self) -> Iterator[None]:
        """Hold the lock under which files become copies and are evicted. Nothing is fetched under it."""
        with self._locked(self.directory / "lock"), self._explained():
            yield

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[int]:
        """Open a file, made if it is missing, and lock it until the end of the block."""
        with self._explained():
            # Again, as an operator or a cleaner of temporary files may have removed them.
            for each in (self._objects, self._fetches):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with self._explained():
                flock(fd, exclusive=True, wait=True)
            yield fd
        finally:
            os.close(fd)

    def _give_space(self, fd: int, digest: str, size_bytes: int) -> None:
        """Give a fetch its space on the disk, once there is enough."""
        if size_bytes > self.max_bytes:
            raise StorageFull(
                f"object {digest} has {size_bytes} bytes and the cache {self.directory} at most {self.max_bytes}: "
                "raise --registry-cache-gb",
                public="the variant is larger than the server's cache of its bucket: ask its operator to enlarge it",
            )
        deadline = time.monotonic() + WAIT_S
        while True:
            with self._space():
                # What a dead process left may be of any length.
                os.ftruncate(fd, 0)
                self._remove_dead_fetches()
                self._check_disk(size_bytes)
                if self._evict_for(size_bytes):
                    self._allocate(fd, size_bytes)
                    return
            if time.monotonic() > deadline:
                raise StorageFull(
                    f"objects that are being fetched take all space of the cache {self.directory}: raise "
                    "--registry-cache-gb",
                    public="the server's cache of its bucket is busy with other variants: try again later",
                )
            time.sleep(POLL_S)

    def _check_disk(self, size_bytes: int) -> None:
        """Raise OSError if the disk had too little space even without any copy, before one is evicted in vain."""
        free = shutil.disk_usage(self.directory).free
        if free < size_bytes and free + sum(copy.num_disk_bytes for copy in self._copies()) < size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.directory))

    def _allocate(self, fd: int, size_bytes: int) -> None:
        """Allocate blocks of the disk, so that it cannot become full during the fetch; evict what it needs."""
        while True:
            try:
                if size_bytes:
                    os.posix_fallocate(fd, 0, size_bytes)
                return
            except OSError as error:
                copies = self._copies()
                if error.errno not in FULL or not copies:
                    raise
                copies[0].path.unlink(missing_ok=True)

    def _evict_for(self, size_bytes: int) -> bool:
        """Remove the least recently used copies until there is space for so many bytes; False if there is not."""
        copies = self._copies()
        free = self.max_bytes - sum(each.num_bytes for each in _files(self._fetches))
        if free < size_bytes:
            return False
        free -= sum(copy.num_bytes for copy in copies)
        for copy in copies:
            if free >= size_bytes:
                break
            copy.path.unlink(missing_ok=True)
            free += copy.num_bytes
        return True

    def _copies(self) -> list[_File]:
        """Return the complete copies, the least recently used first."""
        return sorted(_files(self._objects))

    def _remove_dead_fetches(self) -> None:
        """Remove the files of fetches whose process has died."""
        for path in list(self._fetches.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    if try_lock(fd) and _is_file(path, fd):
                        path.unlink()
                finally:
                    os.close(fd)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn an OSError of the cache's own files into StorageFull or RegistryError."""
        try:
            yield
        except OSError as error:
            if error.errno in FULL:
                raise StorageFull(
                    f"the disk of the cache {self.directory} is full: free some space there, or lower "
                    "--registry-cache-gb",
                    public="the disk of the server's cache is full: ask its operator to free some space",
                ) from error
            raise RegistryError(
                f"{error.filename or self.directory}: {error.strerror or error}: give --registry-cache a directory "
                "on a local disk that this user can write",
                public="the server's cache of its bucket failed: ask its operator to look at its log",
            ) from error


def _is_file(path: Path, fd: int) -> bool:
    """True if a path leads to this open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _files(directory: Path) -> Iterator[_File]:
    for path in list(directory.iterdir()):
        # A fetch may end meanwhile.
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            yield _File(status.st_mtime_ns, path, status.st_size, BLOCK_BYTES * status.st_blocks)
