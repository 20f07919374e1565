"""Sliding windows admit what the strategy of `limits` admits, and a request fits after the wait they name."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter

from server.tenants.limits.windows import WINDOW_S, Windows
from tests.server.tenants.limits.clock import fake_clock

# Seconds that pass, and the amount that comes then.
HISTORY = st.lists(st.tuples(st.floats(0, 90), st.integers(1, 40)), max_size=12)
STARTS = st.floats(1_800_000_000, 1_800_000_060)


@given(history=HISTORY, limit=st.integers(1, 60), start=STARTS)
def test_an_amount_fits_exactly_when_the_library_admits_it(
    history: Sequence[tuple[float, int]], limit: int, start: float
) -> None:
    async def main() -> None:
        windows, item = Windows(), RateLimitItemPerMinute(limit)
        strategy = SlidingWindowCounterRateLimiter(MemoryStorage())
        for seconds, amount in history:
            clock.advance(seconds)
            fits = amount <= limit and (await windows.read("a")).wait_s(limit, amount) == 0
            assert await strategy.hit(item, "a", cost=amount) == fits
            if fits:
                await windows.add("a", amount)

    with fake_clock(start) as clock:
        asyncio.run(main())


@given(history=HISTORY, limit=st.integers(1, 60), amount=st.integers(1, 60), start=STARTS)
def test_an_amount_fits_after_its_wait_and_not_before(
    history: Sequence[tuple[float, int]], limit: int, amount: int, start: float
) -> None:
    amount = min(amount, limit)

    async def main() -> None:
        windows = Windows()
        for seconds, came in history:
            clock.advance(seconds)
            await windows.add("a", came)
        wait_s = (await windows.read("a")).wait_s(limit, amount)
        assert 0 <= wait_s <= 2 * WINDOW_S + 0.01
        if wait_s > 0.01:
            clock.advance(wait_s - 0.01)
            assert (await windows.read("a")).wait_s(limit, amount) > 0
            wait_s = 0.01
        clock.advance(wait_s)
        assert (await windows.read("a")).wait_s(limit, amount) == 0

    with fake_clock(start) as clock:
        asyncio.run(main())


def test_a_window_counts_what_exceeds_every_limit_and_forgets_it_in_two_minutes() -> None:
    async def main() -> None:
        windows = Windows()
        await windows.add("a", 1000)
        assert (await windows.read("a")).used == 1000
        clock.advance(WINDOW_S + WINDOW_S / 2)
        assert (await windows.read("a")).used == 500
        clock.advance(WINDOW_S / 2)
        assert (await windows.read("a")).used == 0

    with fake_clock() as clock:
        asyncio.run(main())


def test_keys_have_windows_of_their_own() -> None:
    async def main() -> None:
        windows = Windows()
        await windows.add("a", 3)
        assert (await windows.read("a")).used == 3
        assert (await windows.read("b")).used == 0

    with fake_clock():
        asyncio.run(main())


def test_the_wait_of_a_full_window_is_that_of_the_formula() -> None:
    """Ten at the beginning of a minute: one more fits when less than ten of them are left, just after the minute."""

    async def main() -> None:
        windows = Windows()
        await windows.add("a", 10)
        clock.advance(20)
        assert math.isclose((await windows.read("a")).wait_s(10, 1), 40, abs_tol=2e-3)
        assert math.isclose((await windows.read("a")).wait_s(10, 6), 40 + 30, abs_tol=2e-3)

    with fake_clock() as clock:
        asyncio.run(main())
