"""What running out of memory looks like: besides MemoryError, errors of torch and the system that have other classes.

Knows their words alone; torch is not imported to ask.
"""

from __future__ import annotations

SIGNS = ("DefaultCPUAllocator", "out of memory", "not enough memory", "can't start new thread", "bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was too little memory, on the CPU or a GPU."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SIGNS)
