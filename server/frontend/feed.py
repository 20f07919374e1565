"""A stream of events, each made once for all its listeners. Knows no HTTP and no event's contents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable


class Feed:
    """Makes an event every `interval_s` seconds while it has listeners.

    A slow listener misses events: only the newest one is kept, whatever the number of listeners.

    Args:
        make: returns the next event.
        is_ended: once it returns True, the listeners' generators end.
        interval_s: between two events.
    """

    def __init__(
        self, make: Callable[[], Awaitable[bytes]], is_ended: Callable[[], bool], interval_s: float
    ) -> None:
        self.num_listeners = 0
        self._make = make
        self._is_ended = is_ended
        self._interval_s = interval_s
        self._event = b""
        self._number = 0  # of the newest event
        self._next: asyncio.Future[None] | None = None  # done when there is a newer event
        self._making: asyncio.Task[None] | None = None

    async def listen(self) -> AsyncGenerator[bytes, None]:
        """Yield the newest event whenever there is one that was not yielded, the first as soon as it is made."""
        self.num_listeners += 1
        # An event of an earlier listener's time is old.
        seen = self._number if self.num_listeners == 1 else 0
        making = self._making = self._making or asyncio.create_task(self._make_events())
        try:
            while True:
                if self._number == seen:
                    arriving = self._next = self._next or asyncio.get_running_loop().create_future()
                    await asyncio.wait({arriving, making}, return_when=asyncio.FIRST_COMPLETED)
                if self._number == seen:
                    making.result()
                    return
                seen = self._number
                yield self._event
        finally:
            self.num_listeners -= 1
            if not self.num_listeners:
                self._making = None
                making.cancel()

    async def _make_events(self) -> None:
        while not self._is_ended():
            self._event = await self._make()
            self._number += 1
            arriving, self._next = self._next, None
            if arriving is not None:
                arriving.set_result(None)
            await asyncio.sleep(self._interval_s)
