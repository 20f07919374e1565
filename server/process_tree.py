"""Ties a process to its parent, so that no child outlives a server that was killed. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_id: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, and exit if its parent is gone already.

    The parent must start it on a thread that lives as long as the parent, such as the main thread.

    Args:
        parent_id: the parent's process id, as the parent gave it.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    # It may have died before the kernel knew.
    if os.getppid() != parent_id:
        sys.exit(1)
