"""Seconds of an event loop by tenant: their window, the turns of requests by them, and what is charged."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from server.metrics.metrics import EngineMetrics, FrontendMetrics
from server.tenants.loop_ledger import (
    NOBODY,
    PART_WITHOUT_KEY,
    PAUSE_S,
    WINDOW_S,
    Account,
    LoopLedger,
    Turns,
    start_charged,
    timed_on_thread,
    timed_task,
)
from tests.server.helpers.web import make_turns

WEEK_S = 7 * 86400.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_ledger(clock: Callable[[], float]) -> LoopLedger:
    return LoopLedger(FrontendMetrics().tenant_seconds_total, clock)


def counted(ledger: LoopLedger) -> dict[tuple[str, ...], float]:
    return {series.labels: series.value for series in ledger.total.family().series}


def test_seconds_fade_within_two_windows_and_are_counted_for_good() -> None:
    clock = Clock()
    ledger = make_ledger(clock)
    ledger.charge("a", 0.5)
    used = []
    for _ in range(5):
        used.append(ledger.used("a"))
        clock.now += WINDOW_S / 2
    assert used == [0.5, 0.5, 0.5, 0.25, 0.0]
    assert counted(ledger) == {("a", "loop"): 0.5}


def test_a_debt_of_a_week_is_forgotten_like_any_other() -> None:
    clock = Clock()
    ledger = make_ledger(clock)
    ledger.charge(NOBODY, WEEK_S)
    assert not ledger.has_time(NOBODY)
    clock.now += 2 * WINDOW_S
    assert ledger.has_time(NOBODY)


@pytest.mark.parametrize("jump_s", [-WEEK_S, WEEK_S], ids=["back", "ahead"])
def test_a_clock_that_jumps_leaves_no_debt_and_stops_no_later_window(jump_s: float) -> None:
    clock = Clock()
    ledger = make_ledger(clock)
    ledger.charge("a", 0.5)
    clock.now += jump_s
    assert ledger.used("a") == 0.0
    ledger.charge("a", -3.0)
    ledger.charge("a", 0.25)
    assert ledger.used("a") == 0.25
    clock.now += 2 * WINDOW_S
    assert ledger.used("a") == 0.0
    assert counted(ledger) == {("a", "loop"): 0.75}


def test_tenants_without_seconds_are_forgotten() -> None:
    clock = Clock()
    ledger = make_ledger(clock)
    for number in range(10_000):
        ledger.charge(f"tenant-{number}", 0.001)
    assert ledger.has_others("tenant-0")
    clock.now += WINDOW_S
    ledger.charge("tenant-0", 0.001)
    clock.now += WINDOW_S
    ledger.slide()
    assert not ledger.has_others("tenant-0")
    assert [ledger.used(f"tenant-{number}") for number in (0, 1)] == [0.001, 0.0]


def on_loop(what: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(timed_task)
        async with asyncio.timeout(60.0):
            await what()

    asyncio.run(main())


def turns_of(clock: Callable[[], float]) -> Turns:
    return Turns(make_ledger(clock), lambda _: NOBODY)


def test_requests_of_one_tenant_alone_begin_at_once_whatever_nobody_does() -> None:
    async def what() -> None:
        turns = turns_of(Clock())
        turns.ledger.charge("a", 100.0)
        turns.ledger.charge(NOBODY, 100.0)
        begun: list[int] = []
        for number in range(100):
            assert turns.begin(("nobody", number), NOBODY, lambda: begun.append(-1)) is False
            assert turns.begin(number, "a", partial(begun.append, number)) is True
        assert begun == list(range(100))

    on_loop(what)


def test_one_request_begins_in_a_turn_of_the_loop_and_the_tenant_with_fewer_seconds_goes_first() -> None:
    async def what() -> None:
        turns = turns_of(Clock())
        turns.ledger.charge("flood", 0.2)
        turns.ledger.charge("honest", 0.1)
        order: list[str] = []

        def start(tenant: str) -> None:
            order.append(tenant)
            turns.ledger.charge(tenant, 0.07)

        for number in range(5):
            turns.begin(number, "flood", lambda: start("flood"))
        for number in range(5, 8):
            turns.begin(number, "honest", lambda: start("honest"))
        assert order == ["flood"]
        num_turns = 0
        while len(order) < 8:
            await asyncio.sleep(0)
            num_turns += 1
        assert order == ["flood", "honest", "honest", "honest", *4 * ["flood"]]
        assert num_turns >= 7

    on_loop(what)


def test_callers_without_a_key_begin_no_more_than_their_part_of_the_time_pays_for() -> None:
    cost_s, num_windows = 0.01, 5

    async def what() -> None:
        clock = Clock()
        turns = turns_of(clock)
        num_begun = 0

        def start() -> None:
            nonlocal num_begun
            num_begun += 1
            turns.ledger.charge(NOBODY, cost_s)

        for number in range(10_000):
            turns.begin(number, NOBODY, start)
        # The loop has as many turns as it likes between two moments of the clock.
        for _ in range(10 * num_windows):
            clock.now += WINDOW_S / 10
            await asyncio.sleep(2 * PAUSE_S)
            while turns.ledger.has_time(NOBODY):
                await asyncio.sleep(0)
        most = PART_WITHOUT_KEY * WINDOW_S * (num_windows + 1) / cost_s
        assert most / 2 <= num_begun <= most + num_windows

    on_loop(what)


def test_a_request_that_leaves_does_not_begin() -> None:
    async def what() -> None:
        turns = make_turns(lambda _: NOBODY)
        begun: list[str] = []
        for key in ("first", "left", "last"):
            turns.begin(key, NOBODY, partial(begun.append, key))
        turns.leave("left", NOBODY)
        turns.leave("first", NOBODY)
        while len(begun) < 2:
            await asyncio.sleep(0)
        turns.leave("last", NOBODY)
        await asyncio.sleep(0)
        assert begun == ["first", "last"]

    on_loop(what)


def spin(seconds: float) -> None:
    begun = time.thread_time()
    while time.thread_time() - begun < seconds:
        pass


def test_tasks_that_a_request_starts_are_charged_to_it_and_to_the_tenant_that_is_known_by_then() -> None:
    async def what() -> None:
        clock = Clock()
        account = Account(make_ledger(clock), NOBODY)

        async def part() -> None:
            await asyncio.sleep(0)
            spin(0.02)

        async def request() -> str:
            spin(0.01)
            account.tenant = "a"
            await asyncio.gather(part(), asyncio.create_task(part()))
            return "reply"

        async def failing() -> None:
            raise ValueError("of the request")

        assert await start_charged(account, asyncio.create_task, request()) == "reply"
        with pytest.raises(ValueError, match="of the request"):
            await start_charged(account, asyncio.create_task, failing())
        cancelled = start_charged(account, asyncio.create_task, asyncio.sleep(60.0))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        spin(0.02)
        # The step in which the tenant became known is the tenant's.
        assert account.ledger.used("a") >= 0.05
        assert account.ledger.used(NOBODY) == 0.0

    on_loop(what)


def test_the_time_of_a_thread_is_charged_to_the_request_that_uses_it() -> None:
    async def what() -> None:
        account = Account(make_ledger(Clock()), "a")

        async def request() -> bool:
            return await asyncio.to_thread(timed_on_thread(is_on_thread))

        def is_on_thread() -> bool:
            spin(0.01)
            return threading.current_thread() is not threading.main_thread()

        assert await start_charged(account, asyncio.create_task, request())
        assert counted(account.ledger)["a", "thread"] >= 0.01
        # Work of the server's own has no account.
        assert timed_on_thread(spin) is spin

    on_loop(what)


def test_the_engine_and_http_processes_have_the_metric_under_one_definition() -> None:
    families = [
        next(each for each in metrics.snapshot().families if each.name == "peraxis_tenant_seconds")
        for metrics in (EngineMetrics(), FrontendMetrics())
    ]
    assert families[0] == families[1]
    assert families[0].label_names == ("tenant", "kind")
