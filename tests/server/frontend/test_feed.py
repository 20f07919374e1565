"""A feed's events: made once for all listeners, the newest for a slow one, none without listeners."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from server.frontend.feed import Feed


class Source:
    """Numbers the events of a feed, which ends when `is_ended` is set."""

    def __init__(self) -> None:
        self.number = 0
        self.is_ended = False
        self.feed = Feed(self.make, lambda: self.is_ended, 0.001)

    async def make(self) -> bytes:
        self.number += 1
        return b"%d" % self.number

    def listen(self) -> aclosing[AsyncGenerator[bytes, None]]:
        return aclosing(self.feed.listen())


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def test_all_listeners_get_the_same_events() -> None:
    async def main() -> None:
        source = Source()
        async with source.listen() as first, source.listen() as second:
            for _ in range(3):
                events = await asyncio.gather(anext(first), anext(second))
                assert events[0] == events[1] == b"%d" % source.number

    run(main())


def test_a_slow_listener_gets_the_newest_event_only() -> None:
    async def main() -> None:
        source = Source()
        async with source.listen() as fast, source.listen() as slow:
            await asyncio.gather(anext(fast), anext(slow))
            for _ in range(5):
                newest = await anext(fast)
            assert int(await anext(slow)) >= int(newest) >= 6

    run(main())


def test_without_listeners_no_event_is_made() -> None:
    async def main() -> None:
        source = Source()
        async with source.listen() as events:
            await anext(events)
        made = source.number
        await asyncio.sleep(0.05)
        assert (source.number, source.feed.num_listeners) == (made, 0)
        async with source.listen() as events:
            assert await anext(events) == b"%d" % (made + 1)

    run(main())


def test_the_end_of_a_feed_ends_its_listeners() -> None:
    async def main() -> None:
        source = Source()
        async with source.listen() as events:
            await anext(events)
            source.is_ended = True
            assert [int(event) async for event in events] == list(range(2, source.number + 1))

    run(main())


def test_an_event_that_cannot_be_made_ends_its_listeners_with_the_error() -> None:
    async def fail() -> bytes:
        raise ValueError("no event")

    async def main() -> None:
        async with aclosing(Feed(fail, lambda: False, 1.0).listen()) as events:
            with pytest.raises(ValueError, match="no event"):
                await anext(events)

    run(main())
