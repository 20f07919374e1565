"""The queue through which other threads reach the engine thread."""

from __future__ import annotations

import queue
from collections.abc import Callable


class CallQueue:
    """Calls for the engine thread to run between two steps, in order. Any thread may add; one thread runs."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def put(self, call: Callable[[], None]) -> None:
        """Add a call."""
        self._calls.put(call)

    def wake(self) -> None:
        """End the wait in `run`: the engine has something to do although there is no call."""
        self._calls.put(lambda: None)

    def run(self, wait_s: float) -> None:
        """Run every call in the queue; wait up to `wait_s` for the first."""
        try:
            call = self._calls.get(timeout=wait_s) if wait_s else self._calls.get_nowait()
            while True:
                call()
                call = self._calls.get_nowait()
        except queue.Empty:
            return
