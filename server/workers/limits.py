"""Limits of a worker process: what one task may use, and how the process ends with its parent.

All but the values themselves runs inside a worker.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import time
from dataclasses import dataclass

PR_SET_PDEATHSIG = 1
# Niceness of a worker that requests wait for. Steps of the engine and streams of other requests come first.
NICENESS = 5


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one task, on top of what its worker used before the task.

    Args:
        memory_bytes: private memory; mapped files do not count.
        cpu_s: processor time of all threads, rounded up to whole seconds.
    """

    memory_bytes: int
    cpu_s: float


def set_up_process(parent_pid: int, niceness: int) -> None:
    """Make this process end with its parent, and keep it from terminals, core files and the engine's processor time.

    The kernel sends SIGKILL when the thread that started this process ends, which also ends a worker in a loop.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before the call.
    if os.getppid() != parent_pid:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(niceness)


def allow(limits: Limits) -> None:
    """Set the limits of the next task.

    Past them, an allocation fails and the kernel ends the process with SIGXCPU. Only soft limits are set, because a
    hard one cannot be raised for the task after.
    """
    _, hard_data = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + limits.memory_bytes, hard_data))
    _, hard_cpu = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + limits.cpu_s), hard_cpu))


def data_bytes() -> int:
    """Return the private writable memory of this process, which RLIMIT_DATA bounds."""
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024
