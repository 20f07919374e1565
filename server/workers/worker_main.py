"""The template that forks worker processes, and the body of a worker: tasks within limits until its parent leaves.

Started by `worker_process.py` as ``python -P -m server.workers.worker_main PARENT_PID NICENESS [MODULE ...]``, with a
socket for orders as standard input. The template imports what workers need once, which takes seconds, and reads nothing
of a tenant; a fork takes milliseconds and shares its memory. A message between parent and worker is a pickle behind its
length. Imports no module of the parent's program.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import math
import os
import pickle
import resource
import selectors
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
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


def end_with(parent_pid: int) -> None:
    """Make this process end with its parent.

    The kernel sends SIGKILL when the thread that started this process ends, which also ends a process in a loop.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before the call.
    if os.getppid() != parent_pid:
        os._exit(1)


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


# An order for a worker: a directory for its temporary files, with the ends of two sockets. On one it gets its tasks;
# when the parent shuts the other, the template kills the worker and sends the exit code there.
MAX_ORDER_BYTES = 4096
EXIT_CODE = struct.Struct("<i")
# Between looks at a worker that was killed and has not ended yet.
REAP_S = 0.005
# Header of a message to the parent: its length, and whether the worker ends after it.
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
    """Import `modules`, and fork workers until the parent closes the orders. Each fork returns here as a worker."""
    end_with(parent_pid)
    # Kept from terminals, from core files, and from the engine's processor time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(niceness)
    for module in modules:
        importlib.import_module(module)
    # A collection in a worker would write to the pages that it shares.
    gc.freeze()
    orders = socket.socket(fileno=os.dup(0))
    _leave_standard_streams()
    if (order := _fork_workers(orders)) is not None:
        _run_tasks(*order)


def _leave_standard_streams() -> None:
    """Lead the standard streams nowhere: tasks could write to them."""
    with open(os.devnull, "r+b") as nothing:
        for stream in (0, 1, 2):
            os.dup2(nothing.fileno(), stream)


def _fork_workers(orders: socket.socket) -> tuple[socket.socket, str] | None:
    """Follow the orders until they end; return the socket of its tasks and its directory in a worker."""
    template_pid = os.getpid()
    # By the descriptor that the parent shuts; the latter have been killed.
    running: dict[int, int] = {}
    ending: dict[int, int] = {}
    with orders, selectors.PollSelector() as selector:
        selector.register(orders, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select(REAP_S if ending else None):
                if key.fd != orders.fileno():
                    selector.unregister(key.fd)
                    ending[key.fd] = running.pop(key.fd)
                    os.kill(ending[key.fd], signal.SIGKILL)
                    continue
                directory, descriptors, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, 2)
                if not directory:
                    return None
                tasks, life = descriptors
                # Where no process can be made, the parent finds both sockets closed.
                with suppress(OSError):
                    running[life] = os.fork()
                if running.get(life) == 0:
                    end_with(template_pid)
                    for descriptor in (*running, *ending):
                        os.close(descriptor)
                    return socket.socket(fileno=tasks), os.fsdecode(directory)
                os.close(tasks)
                if life in running:
                    selector.register(life, selectors.EVENT_READ)
                else:
                    os.close(life)
            for life, pid in list(ending.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del ending[life]
                    # The parent may have ended.
                    with suppress(OSError):
                        os.write(life, EXIT_CODE.pack(os.waitstatus_to_exitcode(status)))
                    os.close(life)


def _run_tasks(connection: socket.socket, directory: str) -> None:
    """Send an empty message, then run tasks until the parent closes the connection."""
    os.environ["TMPDIR"] = directory
    tempfile.tempdir = None
    with connection, connection.makefile("rb") as tasks, connection.makefile("wb") as replies:
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
                reply = pickle.dumps(
                    Reply("died", f"needed more than {limits.memory_bytes >> 20} MiB of memory")
                )
                is_last = True
            except BaseException:
                _send(replies, pickle.dumps(Reply("failed", traceback.format_exc())), is_last=True)
                raise
            _send(replies, reply, is_last)
            if is_last:
                return


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
