"""Replacements of workers: the pause before their start, the task that does not wait for it, and a pool with them."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop

from server.errors import Draining, WorkerKilled, WorkerTimeout
from server.workers.pool import CALM_S, MAX_PAUSE_S, Backoff, Replacement, WorkerPool
from server.workers.worker_process import WorkerProcess
from tests.server.helpers import worker_tasks as tasks
from tests.server.helpers.worker_processes import WAIT_S, with_pool, workers_of


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_the_first_loss_is_replaced_at_once() -> None:
    backoff = Backoff(Clock())
    backoff.lost()
    assert backoff.pause_s == 0


def test_each_further_loss_doubles_the_pause_up_to_a_limit() -> None:
    clock = Clock()
    backoff, pauses = Backoff(clock), []
    for _ in range(9):
        backoff.lost()
        pauses.append(backoff.pause_s)
        clock.now_s += CALM_S - 1
    assert pauses == [0, 1, 2, 4, 8, 16, 32, MAX_PAUSE_S, MAX_PAUSE_S]


def test_a_loss_after_a_calm_time_is_replaced_at_once() -> None:
    clock = Clock()
    backoff = Backoff(clock)
    for pause_s in (1, CALM_S, CALM_S):
        backoff.lost()
        clock.now_s += pause_s
    assert backoff.pause_s == 0


def test_a_claim_ends_the_pause_and_gets_the_worker(tmp_path: Path) -> None:
    async def main() -> None:
        replacement = Replacement(partial(WorkerProcess.spawn, (), tmp_path, 0), 3600)
        for _ in range(5):
            await asyncio.sleep(0)
        assert replacement.is_asleep
        claim = replacement.claim()
        await asyncio.wait({replacement.task})
        assert replacement.hand_over() is None
        worker = await claim
        worker.kill()
        await worker.wait()

    asyncio.run(main())


def test_a_claim_gets_the_error_of_the_start() -> None:
    async def fail() -> WorkerProcess:
        raise WorkerKilled("it did not start")

    async def main() -> None:
        replacement = Replacement(fail, 3600)
        claim = replacement.claim()
        await asyncio.wait({replacement.task})
        assert replacement.hand_over() is None
        with pytest.raises(WorkerKilled, match="did not start"):
            await claim

    asyncio.run(main())


def test_a_start_that_fails_and_was_not_claimed_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> WorkerProcess:
        raise WorkerKilled("it did not start")

    async def main() -> None:
        replacement = Replacement(fail, 0)
        await asyncio.wait({replacement.task})
        assert replacement.hand_over() is None

    asyncio.run(main())
    assert "it did not start" in caplog.text


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[WorkerProcess]:
    """Return the workers that are started from now on."""
    started: list[WorkerProcess] = []
    spawn = WorkerProcess.spawn

    async def counted(*args: Any) -> WorkerProcess:
        started.append(await spawn(*args))
        return started[-1]

    monkeypatch.setattr(WorkerProcess, "spawn", counted)
    return started


async def kill_worker(pool: WorkerPool, share: str = "hostile") -> None:
    with pytest.raises(WorkerTimeout):
        await pool.run(share, 0.1, tasks.spin)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_killed_worker_is_replaced_without_a_task_that_asks_for_it(
    loop: Any, starts: list[WorkerProcess]
) -> None:
    async def test(pool: WorkerPool) -> None:
        await kill_worker(pool)
        while not pool.is_running:
            await asyncio.sleep(0.002)
        assert await pool.run("a", WAIT_S, tasks.add, 2, 3) == 5
        assert len(starts) == 2

    with_pool(test, loop=loop)


def test_workers_that_end_together_are_all_replaced(starts: list[WorkerProcess]) -> None:
    async def test(pool: WorkerPool) -> None:
        await pool.warm()
        await asyncio.gather(*(kill_worker(pool, share) for share in "ab"))
        while len(starts) < 4:
            await asyncio.sleep(0.002)
        assert await pool.run("c", WAIT_S, tasks.add, 2, 3) == 5
        assert len(starts) == 4

    with_pool(test)


def test_work_that_kills_workers_in_a_row_starts_one_for_each(starts: list[WorkerProcess]) -> None:
    async def test(pool: WorkerPool) -> None:
        for _ in range(4):
            await kill_worker(pool)
        assert await pool.run("a", WAIT_S, tasks.add, 2, 3) == 5
        assert len(starts) == 5

    with_pool(test)


def test_a_cancelled_task_leaves_the_worker_that_it_waited_for_to_the_next(
    starts: list[WorkerProcess],
) -> None:
    async def test(pool: WorkerPool) -> None:
        await kill_worker(pool)
        waiting = asyncio.create_task(pool.run("a", WAIT_S, tasks.add, 2, 3))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert await pool.run("b", WAIT_S, tasks.add, 2, 3) == 5
        assert len(starts) == 2

    with_pool(test, num_workers=1)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("num_kills", [1, 2])
@pytest.mark.parametrize("is_awaited", [False, True])
def test_closing_ends_the_start_of_a_replacement(loop: Any, num_kills: int, is_awaited: bool) -> None:
    """The first replacement starts at once, and the second after a pause or when a task waits for it."""

    async def test(pool: WorkerPool) -> None:
        for _ in range(num_kills):
            await kill_worker(pool)
        waiting = [asyncio.create_task(pool.run("a", WAIT_S, tasks.add, 2, 3)) for _ in range(is_awaited)]
        await asyncio.sleep(0)
        await pool.close()
        assert not workers_of(os.getpid())
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [Draining] * is_awaited

    with_pool(test, num_workers=1, loop=loop)
