"""Counts each tenant's requests and tokens over the last minute with the library `limits`. Must not know any limit.

It uses the strategy "sliding window counter": the current minute's count plus the previous minute's, weighted by the
part of that minute that lies within the last 60 seconds. Each tenant takes two integers whatever its limit, costs may
have any size, and a step of the clock does no harm. The strategy "moving window" would keep an entry per token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import floor

from limits.aio.storage import MemoryStorage

WINDOW_S = 60
# Added to waits: they end when the count is below the limit, and not when it has just reached it.
MARGIN_S = 0.001


@dataclass(frozen=True, slots=True)
class SlidingCount:
    """The counts of one key at one moment."""

    previous: int  # of the minute before
    current: int  # of the minute that goes on
    left_s: float  # until the current one ends

    @property
    def used(self) -> int:
        """The count of the last 60 seconds, as the strategy estimates it."""
        return floor(self.previous * self.left_s / WINDOW_S + self.current)

    def wait_s(self, limit: int, amount: int) -> float:
        """Return the seconds until `amount` more fit below `limit`, if nothing else comes; 0 if they fit now.

        The caller has checked that `amount` is at most `limit`.
        """
        if self.used + amount <= limit:
            return 0.0
        # `used` is rounded down, so the exact count may be anything below this.
        room = limit - amount + 1
        if self.current < room:
            return self.left_s - (room - self.current) * WINDOW_S / self.previous + MARGIN_S
        # Nothing fits before this minute has become the previous one and has partly passed.
        return self.left_s + WINDOW_S - room * WINDOW_S / self.current + MARGIN_S


class Windows:
    """The counts of all tenants. They are forgotten two minutes after they began."""

    def __init__(self) -> None:
        # The asynchronous storage expires its keys in a task; the other one does so on a thread, without a lock.
        self._storage = MemoryStorage()

    async def read(self, key: str) -> SlidingCount:
        """Return the counts of a key now."""
        previous, previous_ttl, current, current_ttl = await self._storage.get_sliding_window(key, WINDOW_S)
        # Both end with the current minute; the first is 0 without a count.
        return SlidingCount(previous, current, previous_ttl if previous else current_ttl - WINDOW_S)

    async def add(self, key: str, amount: int) -> None:
        """Count an amount now, also one that exceeds a limit, as generated tokens may."""
        if amount:
            _, current_key = self._storage.sliding_window_keys(key, WINDOW_S, time.time())
            await self._storage.incr(current_key, 2 * WINDOW_S, amount)
