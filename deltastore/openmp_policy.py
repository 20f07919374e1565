"""How OpenMP's threads wait, which the OpenMP runtime reads when torch is imported. Imports no torch.

By default, the threads of libgomp spin for milliseconds at the end of every operation. As soon as another process runs
beside a thread per core, one that spins keeps the core from the one that it waits for. Threads that sleep at once take
up to twice as long over operations of some microseconds. So they spin for some ten microseconds and then sleep: of the
policies of `bench.waiting`, the one whose worst case is best, alone and beside a busy process.
"""

from __future__ import annotations

from collections.abc import MutableMapping

# Looks at the barrier before a thread sleeps.
SPIN_COUNT = 3000
# Variables with which an operator has chosen: those of OpenMP, of GNU's runtime and of Intel's and LLVM's.
CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def bound_spinning(environment: MutableMapping[str, str]) -> None:
    """Let the waiting threads of processes with this environment spin shortly, unless the operator has chosen."""
    if not any(name in environment for name in CHOICES):
        environment["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
