"""The waiting policy of OpenMP's threads, which the OpenMP runtime reads when torch is imported. Imports no torch.

By default, the threads of libgomp spin for milliseconds at the end of every operation. As soon as another process runs
beside a thread per core, one that spins keeps the core from the one that it waits for: steps took 12 to 150 times as
long on two cores. A thread that sleeps costs some microseconds per operation.
"""

from __future__ import annotations

from collections.abc import MutableMapping

# Variables with which an operator has chosen: those of OpenMP, of GNU's runtime and of Intel's and LLVM's.
CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def let_threads_sleep(environment: MutableMapping[str, str]) -> None:
    """Let the threads of processes with this environment sleep while they wait, unless the operator has chosen."""
    if not any(name in environment for name in CHOICES):
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
