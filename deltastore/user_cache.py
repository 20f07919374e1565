"""Files in the user's cache directory that no other user can have written.

Every file carries a digest of its name and bytes: one that was cut off, damaged or renamed reads as missing.
"""

from __future__ import annotations

import hashlib
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

# Files of one directory; a new one drops the oldest.
MAX_FILES = 64
DIGEST_BYTES = hashlib.sha256().digest_size
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW


def user_cache_dir() -> Path:
    """Return the directory of Peraxis in the user's cache; for a user without a home, one that cannot be written."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        folder = Path(os.devnull)
    return folder / "peraxis"


@dataclass(frozen=True, slots=True)
class CacheDirectory:
    """A directory of small files, each read and replaced as a whole, by any number of processes."""

    path: Path

    def read(self, name: str) -> bytes | None:
        """Return a file's content; None if it is missing, damaged, or others than this user and root can write it."""
        try:
            with self._opened() as directory:
                descriptor = os.open(name, os.O_RDONLY | _OPEN, dir_fd=directory)
                with open(descriptor, "rb") as file:
                    _check_owner(descriptor, name)
                    stored = file.read()
        except OSError:
            return None
        content = stored[DIGEST_BYTES:]
        return content if stored[:DIGEST_BYTES] == _digest(name, content) else None

    def write(self, name: str, content: bytes) -> None:
        """Create or replace a file.

        Raises:
            OSError: the directory cannot be created or written, or others than this user and root can write it.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._opened() as directory:
            partial = f".{uuid.uuid4().hex}"
            descriptor = os.open(
                partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=directory
            )
            try:
                with open(descriptor, "wb") as file:
                    file.write(_digest(name, content) + content)
                os.replace(partial, name, src_dir_fd=directory, dst_dir_fd=directory)
            except BaseException:
                with suppress(OSError):
                    os.unlink(partial, dir_fd=directory)
                raise
            _drop_oldest(directory)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Open the directory and check its owner."""
        # All access goes through this descriptor, so that the directory cannot be exchanged after the check.
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
        try:
            _check_owner(descriptor, str(self.path))
            yield descriptor
        finally:
            os.close(descriptor)


def _check_owner(descriptor: int, name: str) -> None:
    """Raise PermissionError if others than this user and root can write an open file or directory."""
    state = os.fstat(descriptor)
    if state.st_uid not in (0, os.geteuid()) or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{name} can be written by other users: remove it, or chmod go-w it")


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + content).digest()


def _drop_oldest(directory: int) -> None:
    """Keep the newest MAX_FILES files. Partial files of killed processes are dropped like the others."""
    ages: list[tuple[int, str]] = []
    for name in os.listdir(directory):
        # Another process may have dropped it.
        with suppress(OSError):
            ages.append((os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime_ns, name))
    for _, name in sorted(ages, reverse=True)[MAX_FILES:]:
        with suppress(OSError):
            os.unlink(name, dir_fd=directory)
