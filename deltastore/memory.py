"""Memory of the process: recognise errors for lack of it, make glibc return what was freed. Must not import torch."""

from __future__ import annotations

import contextlib
import ctypes

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
