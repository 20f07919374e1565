"""Threads: how those of OpenMP wait, and the priority of those that must not delay others. Imports no torch.

By default, the threads of libgomp spin for milliseconds at the end of every operation. As soon as another process runs
beside a thread per core, one that spins keeps the core from the one that it waits for. Threads that sleep at once take
up to twice as long over operations of some microseconds. So they spin for some ten microseconds and then sleep: of the
policies of `bench.waiting`, the one whose worst case is best, alone and beside a busy process.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

# At the niceness of the engine, a loading thread would take a core from a step that waits for all of its cores.
NICENESS = 10
# The highest: for work that no request waits for.
IDLE_NICENESS = 19


def lower_thread_priority(niceness: int = NICENESS) -> None:
    """Add to the niceness of the calling thread, so that computing threads run first."""
    os.nice(niceness)


# Looks at the barrier before a thread sleeps.
SPIN_COUNT = 3000
# Variables with which an operator has chosen: those of OpenMP, of GNU's runtime and of Intel's and LLVM's.
CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def bound_spinning(environment: MutableMapping[str, str]) -> None:
    """Let the waiting threads of processes with this environment spin shortly, unless the operator has chosen."""
    if not any(name in environment for name in CHOICES):
        environment["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
