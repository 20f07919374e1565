"""Memory of the process: what running out of it looks like, and how glibc keeps what was freed.

Knows the words of errors of torch and the system alone; torch is not imported to ask.
"""

from __future__ import annotations

import contextlib
import ctypes

MMAP_THRESHOLD, MMAPPED_BYTES = -3, 1 << 20  # of `mallopt`
SIGNS = ("DefaultCPUAllocator", "out of memory", "not enough memory", "can't start new thread", "bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was too little memory, on the CPU or a GPU."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SIGNS)


def return_freed_memory() -> None:
    """Have glibc give every tensor of a mebibyte or more back to the system when it is freed, from now on.

    By itself it raises that limit to 32 MiB with the first large tensor that is freed; what is smaller then lies among
    tensors that live on, and a fit of many layers doubles its memory. It costs page faults.
    """
    with contextlib.suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, MMAPPED_BYTES)
