"""Find the worker processes of a process, and run a test with a pool of them."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import psutil

from server.workers.pool import WorkerPool
from server.workers.worker_main import Limits

WAIT_S = 240.0
LIMITS = Limits(memory_bytes=256 << 20, cpu_s=30.0)

Body = Callable[[WorkerPool], Awaitable[None]]


def workers_of(pid: int) -> list[psutil.Process]:
    """Return the workers that the process started itself; a server under test that it started has its own."""
    return [worker for template in _templates_of(psutil.Process(pid)) for worker in _templates_of(template)]


def _templates_of(parent: psutil.Process) -> list[psutil.Process]:
    """Return the children that run a worker's program: the templates of a process, or the workers of a template."""
    found = []
    for child in parent.children():
        # It may end between two looks.
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and "server.workers.worker_main" in child.cmdline():
                found.append(child)
    return found


def with_pool(
    test: Body, num_workers: int = 2, limits: Limits = LIMITS, loop: Any = asyncio.new_event_loop
) -> None:
    """Run `test` with a pool of its own, and check that no worker is left."""

    async def body() -> None:
        pool = WorkerPool(num_workers, limits)
        try:
            async with asyncio.timeout(WAIT_S):
                await test(pool)
        finally:
            await pool.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(body())
    # One that was still to be forked when the pool closed comes and ends a moment later.
    deadline = time.monotonic() + WAIT_S
    while workers_of(os.getpid()) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not workers_of(os.getpid())
    # A process that was not waited for warns here, and not in a later test.
    gc.collect()
