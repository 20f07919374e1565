"""Work on a variant's text is refused for a pause after it had to be killed."""

from __future__ import annotations

import asyncio

import pytest

from server.errors import InvalidRequest
from server.workers.pool import MAX_PAUSE_S, WORK_LIMITS, VariantWork, WorkerPool
from tests.server.helpers.worker_tasks import add, kill_itself, refuse


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def pause_of(work: VariantWork, clock: Clock) -> float:
    """Kill a worker, wait for the end of the pause, and return its seconds."""
    with pytest.raises(
        InvalidRequest, match="t/v@1: its tokenizer or chat template failed: the work was killed"
    ):
        await work.run(kill_itself)
    pause_s = 0.0
    while True:
        try:
            await work.run(refuse)
        except InvalidRequest as error:
            if error.param == "messages":
                return pause_s
        clock.now_s += 0.5
        pause_s += 0.5


def test_pauses_double_and_end_with_the_first_success() -> None:
    async def test() -> None:
        clock, pool = Clock(), WorkerPool(1, WORK_LIMITS)
        work = VariantWork(pool, "t", "t/v@1", clock)
        assert [await pause_of(work, clock) for _ in range(8)] == [
            1,
            2,
            4,
            8,
            16,
            32,
            MAX_PAUSE_S,
            MAX_PAUSE_S,
        ]
        assert await work.run(add, 2, 3) == 5
        assert await pause_of(work, clock) == 1
        await pool.close()

    asyncio.run(test())


def test_work_that_waited_when_a_worker_was_killed_is_refused_as_well() -> None:
    async def test() -> None:
        pool = WorkerPool(1, WORK_LIMITS)
        work = VariantWork(pool, "t", "t/v@1", Clock())
        outcomes = await asyncio.gather(*(work.run(kill_itself) for _ in range(5)), return_exceptions=True)
        assert [str(outcome).rpartition(": ")[2] for outcome in outcomes] == [
            "send less text, or upload it repaired",
            *["try again in 1 s"] * 4,
        ]
        await pool.close()

    asyncio.run(test())
