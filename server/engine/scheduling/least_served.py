"""Members with counters, and the one to serve next: the ready member with the smallest counter."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

# A sweep for idle members runs when there are more members than twice those that the last sweep kept, plus this number.
SWEEP_SLACK = 64


class Member(Protocol):
    """A member of `LeastServed`."""

    counter: float  # served so far; never decreases

    @property
    def is_ready(self) -> bool: ...  # can be served now
    @property
    def is_idle(self) -> bool: ...  # has nothing waiting or running


K = TypeVar("K", bound=Hashable)
M = TypeVar("M", bound=Member)


class LeastServed(Generic[K, M]):
    """Members by key, and the ready member with the smallest counter. All operations take amortized O(log members).

    The heap is corrected lazily: a member whose counter grew or that is no longer ready is noticed at the top.
    """

    def __init__(self, make: Callable[[K], M]) -> None:
        self._make = make
        self._members: dict[K, M] = {}
        self._heap: list[tuple[float, int, M]] = []
        # Ids of the members in the heap, each of which is there once.
        self._in_heap: set[int] = set()
        self._ticks = itertools.count()
        # The smallest counter of the ready members when the heap was last looked at.
        self._floor = 0.0
        self._sweep_at = SWEEP_SLACK

    def get(self, key: K) -> M:
        """Return the member with that key, made on first use."""
        found = self._members.get(key)
        if found is None:
            if len(self._members) >= self._sweep_at:
                self._sweep()
            found = self._members[key] = self._make(key)
        return found

    def activate(self, member: M) -> None:
        """Enter a member that has become ready, raised to the floor; no effect on one that was ready before."""
        self.first()
        member.counter = max(member.counter, self._floor)
        if id(member) not in self._in_heap:
            self._in_heap.add(id(member))
            heapq.heappush(self._heap, (member.counter, next(self._ticks), member))

    def first(self) -> M | None:
        """Return the ready member with the smallest counter; among equals, the one in the heap for longest."""
        while self._heap:
            counter, _, member = self._heap[0]
            self._floor = max(self._floor, counter)
            if not member.is_ready:
                heapq.heappop(self._heap)
                self._in_heap.remove(id(member))
            elif member.counter != counter:
                heapq.heapreplace(self._heap, (member.counter, next(self._ticks), member))
            else:
                return member
        return None

    def _sweep(self) -> None:
        """Drop idle members at or below the floor; returning members are raised to it."""
        kept = {k: m for k, m in self._members.items() if not m.is_idle or m.counter > self._floor}
        self._members = kept
        self._sweep_at = 2 * len(kept) + SWEEP_SLACK
