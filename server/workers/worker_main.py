"""The body of a worker process: its limits, and one task after the other until its parent closes the pipe.

Started by `worker_process.py` as ``python -P -m server.workers.worker_main PARENT_PID NICENESS [MODULE ...]``. A
message in either direction is a pickle behind its length. Imports no module of the parent's program.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import pickle
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

from deltastore.errors import PeraxisError

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


# Header of a message to the parent: its length, and whether the process ends after it.
REPLY_HEADER = struct.Struct("<Q?")
# Header of a message to the worker: its length.
TASK_HEADER = struct.Struct("<Q")
# A larger result would move the memory of a task into the parent.
MAX_REPLY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of a task.

    Args:
        kind: ``result``; ``error`` for a PeraxisError that the task raised; ``died`` for a limit that it reached;
            ``failed`` for any other exception.
        value: the result, the error, or a text.
    """

    kind: Literal["result", "error", "died", "failed"]
    value: Any


def main(parent_pid: int, niceness: int, modules: list[str]) -> None:
    """Import `modules`, send an empty message, then run tasks until the parent closes the pipe."""
    set_up_process(parent_pid, niceness)
    for module in modules:
        importlib.import_module(module)
    tasks, replies = _take_streams()
    _send(replies, b"", is_last=False)
    fresh_bytes: int | None = None
    while header := tasks.read(TASK_HEADER.size):
        message = tasks.read(*TASK_HEADER.unpack(header))
        try:
            function, args, limits = pickle.loads(message)
            fresh_bytes = data_bytes() if fresh_bytes is None else fresh_bytes
            reply = _run(function, args, limits)
            # Tasks may keep what they loaded, but it must not add up.
            is_last = data_bytes() - fresh_bytes > 2 * limits.memory_bytes
        except MemoryError:
            reply = pickle.dumps(Reply("died", f"needed more than {limits.memory_bytes >> 20} MiB of memory"))
            is_last = True
        except BaseException:
            _send(replies, pickle.dumps(Reply("failed", traceback.format_exc())), is_last=True)
            raise
        _send(replies, reply, is_last)
        if is_last:
            return


def _take_streams() -> tuple[BinaryIO, BinaryIO]:
    """Move the pipes to the parent away from the standard streams, which tasks could write to; these lead nowhere."""
    tasks, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "r+b") as nothing:
        for stream in (0, 1, 2):
            os.dup2(nothing.fileno(), stream)
    return tasks, replies


def _run(function: Callable[..., Any], args: tuple[Any, ...], limits: Limits) -> bytes:
    """Run a task within its limits and return its pickled `Reply`."""
    allow(limits)
    try:
        reply = pickle.dumps(Reply("result", function(*args)))
    except PeraxisError as error:
        return pickle.dumps(Reply("error", error))
    if len(reply) > MAX_REPLY_BYTES:
        return pickle.dumps(
            Reply("died", f"made a result of {len(reply)} bytes, more than {MAX_REPLY_BYTES}")
        )
    return reply


def _send(replies: BinaryIO, message: bytes, is_last: bool) -> None:
    replies.write(REPLY_HEADER.pack(len(message), is_last))
    replies.write(message)
    replies.flush()


if __name__ == "__main__":
    # Under the name by which the parent unpickles `Reply`.
    from server.workers import worker_main

    worker_main.main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
