"""Permits of a pool: turns of shares, bounded queues, cancelled waiters."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from server.errors import QueueFull
from server.fairness import FairLimiter, Share


def limiter_of(**sizes: int) -> FairLimiter:
    """Make a limiter whose clock stands still."""
    return FairLimiter(**sizes, clock=lambda: 0.0)


class Tasks:
    """Tasks that hold a permit until they are told to end."""

    def __init__(self, limiter: FairLimiter) -> None:
        self.order: list[str] = []
        self._limiter = limiter
        self.ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, name: str) -> None:
        """Start a task of a tenant, its first letter; in "a.x1" the share is the tenant's variant "x"."""
        self._tasks[name] = asyncio.create_task(self._hold(name))
        await settle()

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await settle()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await settle()

    async def _hold(self, name: str) -> None:
        async with self._limiter.permit((name[0], name[2]) if "." in name else name[0]):
            self.order.append(name)
            self.ends[name] = asyncio.Event()
            await self.ends[name].wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_a_share_that_fills_its_permits_leaves_a_permit_to_another() -> None:
    async def test() -> None:
        tasks = Tasks(limiter_of(num_permits=2, permits_per_share=1, max_waiting=8))
        for name in ("a1", "a2", "a3", "b1"):
            await tasks.start(name)
        assert tasks.order == ["a1", "b1"]
        for name in ("a1", "b1", "a2"):
            await tasks.end(name)
        assert tasks.order == ["a1", "b1", "a2", "a3"]
        await tasks.end("a3")

    run(test())


def test_waiting_shares_are_served_in_turn() -> None:
    async def test() -> None:
        tasks = Tasks(limiter_of(num_permits=1, permits_per_share=1, max_waiting=8))
        for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
            await tasks.start(name)
        for name in ("a1", "b1", "c1", "a2", "b2", "a3"):
            await tasks.end(name)
        assert tasks.order == ["a1", "b1", "c1", "a2", "b2", "a3"]

    run(test())


def test_a_tenant_with_many_waiting_shares_has_one_turn_like_another() -> None:
    async def test() -> None:
        tasks = Tasks(limiter_of(num_permits=1, permits_per_share=1, max_waiting=8))
        for name in ("a.u1", "a.v1", "a.v2", "a.w1", "b.x1", "b.x2"):
            await tasks.start(name)
        for name in ("a.u1", "b.x1", "a.v1", "b.x2", "a.w1", "a.v2"):
            await tasks.end(name)
        assert tasks.order == ["a.u1", "b.x1", "a.v1", "b.x2", "a.w1", "a.v2"]

    run(test())


def test_a_tenant_with_many_shares_leaves_a_permit_to_another() -> None:
    async def test() -> None:
        tasks = Tasks(limiter_of(num_permits=3, permits_per_share=1, max_waiting=8, permits_per_tenant=2))
        for name in ("a.u1", "a.v1", "a.w1", "b.x1"):
            await tasks.start(name)
        assert tasks.order == ["a.u1", "a.v1", "b.x1"]
        await tasks.end("b.x1")
        assert tasks.order == ["a.u1", "a.v1", "b.x1"]
        await tasks.end("a.u1")
        assert tasks.order == ["a.u1", "a.v1", "b.x1", "a.w1"]
        for name in ("a.v1", "a.w1"):
            await tasks.end(name)

    run(test())


def test_shares_of_the_only_tenant_may_have_all_permits() -> None:
    async def test() -> None:
        tasks = Tasks(limiter_of(num_permits=2, permits_per_share=1, max_waiting=8))
        for name in ("a.u1", "a.u2", "a.v1"):
            await tasks.start(name)
        assert tasks.order == ["a.u1", "a.v1"]
        for name in ("a.u1", "a.u2", "a.v1"):
            await tasks.end(name)

    run(test())


def test_a_share_with_too_many_waiting_tasks_is_refused_and_others_are_not() -> None:
    async def test() -> None:
        limiter = limiter_of(num_permits=1, permits_per_share=1, max_waiting=1)
        tasks = Tasks(limiter)
        for name in ("a1", "a2"):
            await tasks.start(name)
        with pytest.raises(QueueFull, match="1 tasks of the same"):
            async with limiter.permit("a"):
                pass
        await tasks.start("b1")
        for name in ("a1", "b1", "a2"):
            await tasks.end(name)
        assert tasks.order == ["a1", "b1", "a2"]

    run(test())


def test_a_cancelled_waiter_gives_its_turn_to_the_next() -> None:
    async def test() -> None:
        tasks = Tasks(limiter_of(num_permits=1, permits_per_share=1, max_waiting=8))
        for name in ("a1", "a2", "a3"):
            await tasks.start(name)
        await tasks.cancel("a2")
        await tasks.end("a1")
        assert tasks.order == ["a1", "a3"]
        await tasks.end("a3")

    run(test())


def test_a_waiter_that_is_cancelled_as_it_gets_a_permit_passes_it_on() -> None:
    async def test() -> None:
        limiter = limiter_of(num_permits=1, permits_per_share=1, max_waiting=8)
        tasks = Tasks(limiter)
        for name in ("a1", "a2", "a3"):
            await tasks.start(name)
        tasks.ends["a1"].set()
        # The permit passes to the second task in the first turn of the loop, which it runs in the next one.
        await asyncio.sleep(0)
        await tasks.cancel("a2")
        assert tasks.order[-1] == "a3"
        await tasks.end("a3")

    run(test())


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_tenant_with_slow_tasks_has_as_many_seconds_as_one_with_short_ones() -> None:
    async def test() -> None:
        clock = Clock()
        tasks = Tasks(FairLimiter(num_permits=1, permits_per_share=1, max_waiting=99, clock=clock))
        for name in ("a1", "a2", *(f"b{number}" for number in range(12))):
            await tasks.start(name)
        for _ in range(14):
            last = tasks.order[-1]
            clock.now += 10.0 if last.startswith("a") else 1.0
            await tasks.end(last)
        order = "".join(name[0] for name in tasks.order)
        # Ten short ones for a slow one, and one more where both had as many seconds.
        assert order in ("abbbbbbbbbbabb", "abbbbbbbbbbbab")

    run(test())


def test_a_tenant_that_comes_late_begins_with_the_seconds_of_those_that_are_served() -> None:
    async def test() -> None:
        clock = Clock()
        tasks = Tasks(FairLimiter(num_permits=1, permits_per_share=1, max_waiting=99, clock=clock))
        for name in ("a1", "a2", "a3", "b1", "b2"):
            await tasks.start(name)
        for name in ("a1", "b1", "a2"):
            clock.now += 100.0
            await tasks.end(name)
        # It does not catch up with the 100 s that each of the others has had, nor wait for theirs.
        for name in ("c1", "c2", "c3"):
            await tasks.start(name)
        for _ in range(5):
            clock.now += 1.0
            await tasks.end(tasks.order[-1])
        assert tasks.order[:4] == ["a1", "b1", "a2", "b2"]
        assert tasks.order[4:] == ["c1", "c2", "c3", "a3"]

    run(test())


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_clock_that_jumps_makes_a_tenant_wait_for_a_minute_of_others_at_most(jump_s: float) -> None:
    async def test() -> None:
        clock = Clock()
        tasks = Tasks(FairLimiter(num_permits=1, permits_per_share=1, max_waiting=99, clock=clock))
        for name in ("a1", "a2", *(f"b{number}" for number in range(90))):
            await tasks.start(name)
        clock.now += jump_s
        await tasks.end("a1")
        while tasks.order[-1] != "a2":
            clock.now += 1.0
            await tasks.end(tasks.order[-1])
        assert len(tasks.order) == pytest.approx(63 if jump_s > 0 else 3, abs=1)

    run(test())


def test_nobody_has_a_debt_when_all_were_idle() -> None:
    async def test() -> None:
        clock = Clock()
        limiter = FairLimiter(num_permits=1, permits_per_share=1, max_waiting=99, clock=clock)
        tasks = Tasks(limiter)
        await tasks.start("a1")
        clock.now += 1000.0
        await tasks.end("a1")
        for name in ("b1", "a2", "c1"):
            await tasks.start(name)
        for name in ("b1", "a2", "c1"):
            await tasks.end(name)
        assert tasks.order == ["a1", "b1", "a2", "c1"]

    run(test())


def test_the_waiting_shares_of_a_tenant_with_all_its_permits_cost_others_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_looked_at = 0
    has_permit_for = FairLimiter._has_permit_for

    def counted(limiter: FairLimiter, share: Share) -> bool:
        nonlocal num_looked_at
        num_looked_at += 1
        return has_permit_for(limiter, share)

    async def test() -> None:
        nonlocal num_looked_at
        tasks = Tasks(limiter_of(num_permits=2, permits_per_share=1, max_waiting=8, permits_per_tenant=1))
        for number in range(100):
            await tasks.start(f"a.{chr(1000 + number)}")
        await tasks.start("b.x")
        monkeypatch.setattr(FairLimiter, "_has_permit_for", counted)
        await tasks.end("b.x")
        assert num_looked_at == 0
        await tasks.start("b.y")
        assert tasks.order[-1] == "b.y"

    run(test())
