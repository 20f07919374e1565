"""Choose the next sequence to admit: the earliest one of the least-served queue of the least-served tenant.

The sequences of one tenant for one variant wait in a `VariantQueue`; the variant queues of a tenant are its
`TenantQueue`. Both count the tokens that they were served (the virtual token counters of Sheng et al., "Fairness in
Serving Large Language Models", 2024). A queue that becomes ready is raised to the smallest counter of the ready queues,
so idle time is not saved up (the start tag of start-time fair queueing).

A sequence is known by its number of arrival alone. This file must not know slots, pages or steps.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

# Slack over twice the members kept by the last sweep, before idle members are looked through again.
SWEEP_SLACK = 64
# The same for entries of a heap whose sequences no longer wait.
HEAP_SLACK = 16


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


@dataclass(slots=True, eq=False)
class TenantQueue:
    """The variant queues of one tenant."""

    name: str
    counter: float = 0.0  # tokens served
    num_waiting: int = 0
    num_running: int = 0
    variants: LeastServed[str | None, VariantQueue] = field(init=False)

    def __post_init__(self) -> None:
        self.variants = LeastServed(lambda digest: VariantQueue(self, digest, is_open=digest is None))

    @property
    def is_ready(self) -> bool:
        return self.variants.first() is not None

    @property
    def is_idle(self) -> bool:
        return not self.num_waiting and not self.num_running


@dataclass(slots=True, eq=False)
class VariantQueue:
    """The waiting sequences of one tenant for one variant, by number of arrival; admitted only while it is open."""

    tenant: TenantQueue
    digest: str | None  # None is the base
    is_open: bool
    counter: float = 0.0  # tokens served
    num_running: int = 0
    waiting: set[int] = field(default_factory=set)
    heap: list[int] = field(default_factory=list)  # all of `waiting`, and some that no longer wait

    @property
    def is_ready(self) -> bool:
        return self.is_open and bool(self.waiting)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.num_running

    def first(self) -> int:
        """Return the number of the earliest waiting sequence; at least one must wait."""
        while self.heap[0] not in self.waiting:
            heapq.heappop(self.heap)
        return self.heap[0]

    def charge(self, num_tokens: float) -> None:
        """Count tokens served to this queue and its tenant."""
        self.counter += num_tokens
        self.tenant.counter += num_tokens

    def count_running(self, change: int) -> None:
        """Count a sequence of this queue that starts (1) or stops (-1) running."""
        self.num_running += change
        self.tenant.num_running += change


class FairQueue:
    """All waiting sequences, in variant queues."""

    def __init__(self) -> None:
        self._tenants: LeastServed[str, TenantQueue] = LeastServed(TenantQueue)

    def variant_queue(self, tenant: str, digest: str | None) -> VariantQueue:
        """Return the queue of a tenant's sequences for one variant, made on first use."""
        return self._tenants.get(tenant).variants.get(digest)

    def push(self, queue: VariantQueue, arrival: int) -> None:
        """Let a sequence wait, ahead of those of its queue that arrived later."""
        heapq.heappush(queue.heap, arrival)
        queue.waiting.add(arrival)
        queue.tenant.num_waiting += 1
        if queue.is_open and len(queue.waiting) == 1:
            self._activate(queue)

    def remove(self, queue: VariantQueue, arrival: int) -> None:
        """Remove a waiting sequence that is admitted or has ended."""
        queue.waiting.remove(arrival)
        queue.tenant.num_waiting -= 1
        if len(queue.heap) > 2 * len(queue.waiting) + HEAP_SLACK:
            queue.heap = sorted(queue.waiting)

    def open(self, queue: VariantQueue) -> None:
        """Let the sequences of a closed queue be admitted."""
        queue.is_open = True
        if queue.waiting:
            self._activate(queue)

    def first(self) -> int | None:
        """Return the number of the sequence to admit next; it keeps waiting until `remove`."""
        tenant = self._tenants.first()
        queue = None if tenant is None else tenant.variants.first()
        return None if queue is None else queue.first()

    def _activate(self, queue: VariantQueue) -> None:
        queue.tenant.variants.activate(queue)
        self._tenants.activate(queue.tenant)
