"""Whether a file's bytes are in the page cache: drop them, and verify that they are gone."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

DROPPED_BELOW = 0.01  # of a file's pages: readahead of a neighbour may bring a few back


def drop(paths: Iterable[Path]) -> bool:
    """Take files out of the page cache. True when a look afterwards shows that they are out of it.

    The kernel may refuse (a file in memory, a file that is mapped elsewhere). What a disk or a hypervisor caches below
    the kernel is out of reach.
    """
    dropped = [_drop(path) for path in paths]  # each of them, also after one that stayed
    return all(dropped)


def cached_fraction(path: Path) -> float:
    """The part of a file's pages that is in the page cache, from 0 to 1. Needs the right to write the file."""
    size_bytes = path.stat().st_size
    if size_bytes == 0:
        return 0.0
    libc = ctypes.CDLL(None, use_errno=True)
    residency = (ctypes.c_ubyte * -(-size_bytes // mmap.PAGESIZE))()
    # Private and never written to: a writable buffer is what ctypes needs to tell its address.
    with path.open("rb") as file, mmap.mmap(file.fileno(), size_bytes, flags=mmap.MAP_PRIVATE) as mapping:
        start = ctypes.c_char.from_buffer(mapping)
        failed = libc.mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size_bytes), residency
        )
        del start  # the mapping cannot be closed while something points into it
    if failed:
        raise OSError(ctypes.get_errno(), "mincore failed", str(path))
    return sum(page & 1 for page in residency) / len(residency)


def _drop(path: Path) -> bool:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fsync(fd)  # a page that is not on disk yet cannot be dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return cached_fraction(path) < DROPPED_BELOW
