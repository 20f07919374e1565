"""Directories of a running server, which other users cannot enter: one for its sockets, one for temporary files."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deltastore.errors import SettingsError

PREFIX = "peraxis-server-"
# A directory this young may belong to a server that has not locked it yet.
YOUNG_S = 60.0


@contextmanager
def runtime_directory() -> Iterator[Path]:
    """Make the directory of sockets and remove it at the end; remove those of servers that were killed, too.

    Raises:
        SettingsError: it cannot be made, as on a full disk.
    """
    # The path of a Unix socket has at most 107 bytes, which TMPDIR may exceed.
    parent = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp")
    with _locked_directory(parent, "sockets", "XDG_RUNTIME_DIR") as directory:
        yield directory


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make the directory of temporary files, which may be large, as `runtime_directory` makes that of sockets.

    Raises:
        SettingsError: it cannot be made.
    """
    with _locked_directory(Path(tempfile.gettempdir()), "temporary files", "TMPDIR") as directory:
        yield directory


@contextmanager
def _locked_directory(parent: Path, purpose: str, variable: str) -> Iterator[Path]:
    _remove_stale(parent)
    try:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as error:
        raise SettingsError(
            f"no directory for {purpose} can be made in {parent}: {error.strerror}: set {variable} to another one"
        ) from error
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield directory
    finally:
        os.close(descriptor)
        shutil.rmtree(directory, ignore_errors=True)


def _remove_stale(parent: Path) -> None:
    """Remove this user's directories that no running server has locked."""
    for directory in parent.glob(f"{PREFIX}*"):
        # Another user's, or removed by another server meanwhile.
        with suppress(OSError):
            found = directory.lstat()
            if (
                found.st_uid == os.getuid()
                and time.time() - found.st_mtime > YOUNG_S
                and not _is_locked(directory)
            ):
                shutil.rmtree(directory, ignore_errors=True)


def _is_locked(directory: Path) -> bool:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
