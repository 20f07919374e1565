"""Starts a worker in the background in place of one that ended. Event loop only.

Work that kills its worker again and again lengthens the pause before the next start, so that it costs others' processor
time only what its own tasks ask for: a task never waits for the pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from server.errors import Draining
from server.workers.worker_process import WorkerProcess

log = logging.getLogger(__name__)

# The pause after the second loss within `CALM_S`; it doubles with each further one.
MIN_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
# Without a loss for this long, the next one is replaced at once.
CALM_S = 60.0


class Backoff:
    """The pause before a worker is started in the background.

    Args:
        now: a clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.pause_s = 0.0
        self._now = now
        self._lost_at: float | None = None

    def lost(self) -> None:
        """Count a worker that ended."""
        before, self._lost_at = self._lost_at, self._now()
        is_calm = before is None or self._lost_at - before >= CALM_S
        self.pause_s = 0.0 if is_calm else min(max(2 * self.pause_s, MIN_PAUSE_S), MAX_PAUSE_S)


class Replacement:
    """A worker that starts after a pause, or at once when a task claims it; one task may.

    Args:
        start: starts a worker, and returns it when it takes tasks.
        pause_s: seconds before the start.
    """

    def __init__(self, start: Callable[[], Coroutine[Any, Any, WorkerProcess]], pause_s: float) -> None:
        self.is_asleep = True
        self.claimer: asyncio.Future[WorkerProcess] | None = None
        self._hurry = asyncio.Event()
        self.task = asyncio.create_task(self._run(start, pause_s))

    @property
    def is_claimed(self) -> bool:
        return self.claimer is not None and not self.claimer.done()

    def claim(self) -> asyncio.Future[WorkerProcess]:
        """End the pause, and return what `hand_over` gives the worker or the error of its start."""
        self.hurry()
        self.claimer = asyncio.get_running_loop().create_future()
        return self.claimer

    def hurry(self) -> None:
        """End the pause."""
        self._hurry.set()

    def hand_over(self) -> WorkerProcess | None:
        """Give the outcome of the ended start to the task that claims it; return the worker if none does."""
        error = self.task.exception()
        if self.claimer is None or self.claimer.done():
            if error is None:
                return self.task.result()
            if not isinstance(error, Draining):
                log.warning("no worker could be started in place of one that ended: %s", error)
        elif error is None:
            self.claimer.set_result(self.task.result())
        else:
            self.claimer.set_exception(error)
        return None

    async def _run(
        self, start: Callable[[], Coroutine[Any, Any, WorkerProcess]], pause_s: float
    ) -> WorkerProcess:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._hurry.wait()
        self.is_asleep = False
        return await start()
