"""The page cache: drop a file's pages and verify that they are gone."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

# Readahead of a neighbouring file may bring a few pages back.
MAX_CACHED_FRACTION = 0.01


def drop(paths: Iterable[Path]) -> bool:
    """Drop files from the page cache and return True if they are verified to be out of it.

    The kernel may keep a file that is in memory alone or mapped elsewhere. Caches of the disk or a hypervisor are not
    affected.
    """
    # A list, so that every file is dropped even if an earlier one was not.
    dropped = [_drop(path) for path in paths]
    return all(dropped)


def cached_fraction(path: Path) -> float:
    """Return the share of a file's pages in the page cache, from 0 to 1. Needs write permission on the file."""
    size_bytes = path.stat().st_size
    if size_bytes == 0:
        return 0.0
    libc = ctypes.CDLL(None, use_errno=True)
    residency = (ctypes.c_ubyte * -(-size_bytes // mmap.PAGESIZE))()
    # A private mapping, never written to: ctypes takes the address of a writable buffer alone.
    with path.open("rb") as file, mmap.mmap(file.fileno(), size_bytes, flags=mmap.MAP_PRIVATE) as mapping:
        start = ctypes.c_char.from_buffer(mapping)
        failed = libc.mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size_bytes), residency
        )
        # The mapping cannot be closed while a buffer points into it.
        del start
    if failed:
        raise OSError(ctypes.get_errno(), "mincore failed", str(path))
    return sum(page & 1 for page in residency) / len(residency)


def _drop(path: Path) -> bool:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        # A dirty page cannot be dropped.
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return cached_fraction(path) < MAX_CACHED_FRACTION
