"""Memory: what a process can still use, errors for lack of it, and the return of what was freed. Imports no torch."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

# The parameter M_MMAP_THRESHOLD of mallopt(3), and its value.
MMAP_THRESHOLD, MMAPPED_BYTES = -3, 1 << 20
SIGNS = ("DefaultCPUAllocator", "out of memory", "not enough memory", "can't start new thread", "bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error was raised for lack of memory, on the CPU or a GPU."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SIGNS)


def return_freed_memory() -> None:
    """Make glibc return each block of 1 MiB or more, such as a tensor, to the system when it is freed, from now on.

    By default glibc raises this threshold up to 32 MiB as large blocks are freed. Smaller ones are then kept in a
    fragmented heap, which doubles the memory of a fit of many layers. The price is page faults.
    """
    # Another libc has no mallopt.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, MMAPPED_BYTES)


CGROUP = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 62


def available_bytes() -> int:
    """Return the host memory that can be used without swapping, within the limits of the process's control groups."""
    # Deferred: every command imports this file, and its help needs no psutil.
    import psutil

    available = int(psutil.virtual_memory().available)
    return min([available, *map(_free_bytes, _control_groups())])


def _control_groups() -> list[Path]:
    """Return the directories of this process's control group (version 2) and of its parents, or an empty list."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None:
        return []
    group = CGROUP / own
    return [path for path in (group, *group.parents) if path.is_relative_to(CGROUP)]


def _free_bytes(group: Path) -> int:
    """Return the bytes left below a control group's limit; file pages in the page cache count as free."""
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return UNLIMITED
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return UNLIMITED
    return int(limit) - used + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
