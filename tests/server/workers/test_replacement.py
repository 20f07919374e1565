"""Replacements of workers: the pause before their start, and the task that does not wait for it."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from server.errors import WorkerKilled
from server.workers.replacement import CALM_S, MAX_PAUSE_S, Backoff, Replacement
from server.workers.worker_process import WorkerProcess


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
