"""Runs one task for all that wait for the same result. Event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Tasks under way, by key. A task is cancelled when all callers that wait for it were cancelled."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[T]] = {}
        self._num_waiting: dict[Hashable, int] = {}

    async def run(self, key: Hashable, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of the task of `key`; start it if none is under way. Its exception reaches every caller."""
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(start())
            self._num_waiting[key] = 0
        task = self._tasks[key]
        self._num_waiting[key] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._leave(key, task)

    def _leave(self, key: Hashable, task: asyncio.Task[T]) -> None:
        if self._tasks.get(key) is not task:
            return
        self._num_waiting[key] -= 1
        if task.done() or not self._num_waiting[key]:
            task.cancel()
            del self._tasks[key], self._num_waiting[key]
