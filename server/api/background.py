"""Runs long computations on low-priority threads for coroutines that may be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

import anyio

from deltastore.thread_priority import NICENESS, lower_thread_priority

P = ParamSpec("P")
R = TypeVar("R")


class BackgroundThreads:
    """A number of threads that computing threads of the process and of its neighbours have priority over.

    Args:
        niceness: of the threads, above that of the process.
    """

    def __init__(self, num_threads: int, name: str, niceness: int = NICENESS) -> None:
        lower = partial(lower_thread_priority, niceness)
        self._threads = ThreadPoolExecutor(num_threads, name, initializer=lower)

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function on one of the threads. A cancelled caller still waits until it has ended."""
        # The thread's log lines name the caller's request.
        call = partial(copy_context().run, function, *args, **kwargs)
        # Starlette cancels a request's task repeatedly; the scope and the shield make it wait for the thread.
        with anyio.CancelScope(shield=True):
            work = asyncio.get_running_loop().run_in_executor(self._threads, call)
            try:
                result = await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.wait({work})
                raise
        return result

    @asynccontextmanager
    async def entered(self, manager: AbstractContextManager[R]) -> AsyncIterator[R]:
        """Enter and leave a context manager on a thread; a caller that is cancelled meanwhile leaves it, too."""
        entering = asyncio.ensure_future(self.run(manager.__enter__))
        try:
            with anyio.CancelScope(shield=True):
                entered = await asyncio.shield(entering)
            yield entered
        finally:
            with anyio.CancelScope(shield=True):
                await asyncio.wait({entering})
                if not entering.cancelled() and entering.exception() is None:
                    await self.run(manager.__exit__, None, None, None)
