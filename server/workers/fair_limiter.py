"""Divides the seats of a pool among shares in turn. Event loop only; knows no process and no task."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from server.errors import QueueFull


class FairLimiter:
    """Gives each task a seat; shares with waiting tasks get free seats in turn.

    Args:
        num_seats: tasks that run at a time.
        seats_per_share: seats that one share may have.
        max_waiting: waiting tasks of one share; further ones are refused.
    """

    def __init__(self, num_seats: int, seats_per_share: int, max_waiting: int) -> None:
        self._num_free = num_seats
        self._seats_per_share = seats_per_share
        self._max_waiting = max_waiting
        self._taken: Counter[Hashable] = Counter()
        # The share whose turn is next comes first.
        self._waiting: OrderedDict[Hashable, deque[asyncio.Event]] = OrderedDict()

    @asynccontextmanager
    async def seat(self, share: Hashable) -> AsyncIterator[None]:
        """Wait for a seat and hold it inside the `async with` block.

        Raises:
            QueueFull: `max_waiting` tasks of the share wait already.
        """
        await self._acquire(share)
        try:
            yield
        finally:
            self._release(share)

    async def _acquire(self, share: Hashable) -> None:
        # A share with waiting tasks has all its seats, or none is free: a new task cannot pass them.
        if self._has_seat_for(share):
            self._take(share)
            return
        queue = self._waiting.setdefault(share, deque())
        if len(queue) >= self._max_waiting:
            raise QueueFull(f"{len(queue)} tasks of the same tenant and variant wait: try again in a moment")
        turn = asyncio.Event()
        queue.append(turn)
        try:
            await turn.wait()
        except asyncio.CancelledError:
            if turn.is_set():
                self._release(share)
            else:
                self._leave(share, turn)
            raise

    def _has_seat_for(self, share: Hashable) -> bool:
        return self._num_free > 0 and self._taken[share] < self._seats_per_share

    def _take(self, share: Hashable) -> None:
        self._num_free -= 1
        self._taken[share] += 1

    def _release(self, share: Hashable) -> None:
        self._num_free += 1
        self._taken[share] -= 1
        if not self._taken[share]:
            del self._taken[share]
        self._serve_next()

    def _serve_next(self) -> None:
        """Give a free seat to the first waiting share that may have one more; it is last in the next turn."""
        share = next(filter(self._has_seat_for, self._waiting), None)
        if share is None:
            return
        turn = self._waiting[share].popleft()
        self._waiting.move_to_end(share)
        if not self._waiting[share]:
            del self._waiting[share]
        self._take(share)
        turn.set()

    def _leave(self, share: Hashable, turn: asyncio.Event) -> None:
        self._waiting[share].remove(turn)
        if not self._waiting[share]:
            del self._waiting[share]
