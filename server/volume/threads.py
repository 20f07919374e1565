"""Threads for calls that may never return. A call that hangs keeps its thread, and nothing else.

They are daemons, unlike those of `concurrent.futures` and anyio: the end of a process must not wait for a call that
hangs. Knows no registry.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from contextvars import copy_context
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class _ErrorsTo(AbstractContextManager[None], Generic[R]):
    """Gives an exception of its block to a future, as `concurrent.futures` does."""

    def __init__(self, future: Future[R]) -> None:
        self._future = future

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            self._future.set_exception(error)
        return True


class DaemonThreads:
    """At most `num_threads` threads, each started when a call finds none idle."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._works: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_started = 0
        self._num_unfinished = 0  # calls, those in the queue included

    def submit(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call a function on a thread. The future of a call that has not begun can be cancelled."""
        future: Future[R] = Future()
        # The thread's log lines name the caller's request.
        context = copy_context()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            with _ErrorsTo(future):
                future.set_result(context.run(function, *args, **kwargs))

        with self._lock:
            self._num_unfinished += 1
            must_start = self._num_started < min(self._num_unfinished, self._num_threads)
            self._num_started += must_start
        self._works.put(call)
        if must_start:
            name = f"{self._name}-{self._num_started}"
            threading.Thread(target=self._run, name=name, daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            call = self._works.get()
            call()
            # No reference to what was called while the thread is idle.
            del call
            with self._lock:
                self._num_unfinished -= 1
