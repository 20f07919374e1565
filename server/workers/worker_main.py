"""The body of a worker process: runs one task after the other until its parent closes the pipe.

Started by `worker_process.py` as ``python -P -m server.workers.worker_main PARENT_PID NICENESS [MODULE ...]``. A
message in either direction is a pickle behind its length. Imports no module of the parent's program.
"""

from __future__ import annotations

import importlib
import os
import pickle
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

from deltastore.errors import PeraxisError
from server.workers.limits import Limits, allow, data_bytes, set_up_process

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
