"""Fair shares among tenants: an amount, permits in turn, the places of a cache.

Each object is used by one thread: that of an event loop, or the engine's.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Generic, TypeVar

from server.errors import QueueFull


class FairBudget:
    """Grants parts of an amount to tenants. A tenant may hold at most as much as is left free behind it.

    So one tenant alone gets half, two that want all of it get a third each, and the next one always finds some free.
    These are the dynamic thresholds of shared-memory switches (Choudhury and Hahne, 1998) with a factor of 1.

    Args:
        amount: of all tenants together.
        of: the amount in words, for messages, as in "bytes of unfinished bodies".
    """

    def __init__(self, amount: int, of: str) -> None:
        self.free = amount
        self._of = of
        self._held: Counter[str] = Counter()

    def held(self, tenant: str) -> int:
        """Return what a tenant holds now."""
        return self._held[tenant]

    def has(self, tenant: str, amount: int) -> bool:
        """True if `take` would succeed; nothing can always be taken."""
        return amount == 0 or self._held[tenant] + amount <= self.free - amount

    def take(self, tenant: str, amount: int) -> None:
        """Hold an amount more; to be given back by `give_back`.

        Raises:
            QueueFull: the tenant would hold more than is left free. Nothing was taken.
        """
        if not self.has(tenant, amount):
            raise QueueFull(f"the server holds too many {self._of}: try again in a moment")
        self.retake(tenant, amount)

    def retake(self, tenant: str, amount: int) -> None:
        """Hold an amount that was granted before, whatever is free now; to be given back as after `take`."""
        self.free -= amount
        self._held[tenant] += amount

    def give_back(self, tenant: str, amount: int) -> None:
        """Return a part of what a tenant holds."""
        self.free += amount
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]

    @contextmanager
    def growing(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """Yield a function that holds an amount more, as `take` does; all is given back at the end of the block."""
        held = 0

        def grow(amount: int) -> None:
            nonlocal held
            self.take(tenant, amount)
            held += amount

        try:
            yield grow
        finally:
            self.give_back(tenant, held)

    @contextmanager
    def holding(self, tenant: str, amount: int) -> Iterator[None]:
        """Hold an amount inside the block; raises as `take` does."""
        self.take(tenant, amount)
        try:
            yield
        finally:
            self.give_back(tenant, amount)


# A tenant, or a tenant and a part of its work, such as one of its variants.
Share = str | tuple[str, Hashable]
Queue = deque[asyncio.Event]
# A task counts as at most so long: no tenant pays for a machine that was paused.
MAX_COUNTED_S = 60.0


def tenant_of(share: Share) -> str:
    """Return the tenant that a share belongs to."""
    return share if isinstance(share, str) else share[0]


class FairLimiter:
    """Gives each task a permit; of tenants with waiting tasks, that which held permits for the fewest seconds is next.

    So slow tasks of a tenant make others wait for one of them, and not for as many as they have tasks of their own.
    Tenants with as many seconds take turns, and so do the shares of a tenant. A tenant begins with the seconds of the
    one that got the last permit (start-time fair queueing, Goyal and others, 1996). While no permit is held, all
    seconds are forgotten.

    Args:
        num_permits: tasks that run at a time.
        permits_per_share: permits that one share may have.
        max_waiting: waiting tasks of one share; further ones are refused.
        permits_per_tenant: permits that all shares of one tenant may have; None is all.
        clock: counts the seconds.
    """

    def __init__(
        self,
        num_permits: int,
        permits_per_share: int,
        max_waiting: int,
        permits_per_tenant: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_free = num_permits
        self._permits_per_share = permits_per_share
        self._permits_per_tenant = num_permits if permits_per_tenant is None else permits_per_tenant
        self._max_waiting = max_waiting
        self._taken: Counter[Share] = Counter()
        self._taken_by_tenant: Counter[str] = Counter()
        self._clock = clock
        self._seconds: dict[str, float] = {}
        # Those of the tenant that got the last permit, when it got it.
        self._last_seconds = 0.0
        # Of each tenant the share whose turn is next comes first.
        self._waiting: dict[str, OrderedDict[Share, Queue]] = {}
        # Tenants with waiting tasks: seconds, and when they began to wait for this turn. One entry of each is true.
        self._turns: list[tuple[float, int, str]] = []
        self._entries: dict[str, int] = {}
        self._ticks = itertools.count()

    @asynccontextmanager
    async def permit(self, share: Share) -> AsyncIterator[None]:
        """Wait for a permit and hold it inside the `async with` block.

        Raises:
            QueueFull: `max_waiting` tasks of the share wait already.
        """
        await self._acquire(share)
        begun = self._clock()
        try:
            yield
        finally:
            self._seconds[tenant_of(share)] += min(max(0.0, self._clock() - begun), MAX_COUNTED_S)
            self._release(share)

    async def _acquire(self, share: Share) -> None:
        # A waiting share or its tenant has all its permits, or none is free: a new task cannot pass it.
        if self._has_permit_for(share):
            self._take(share)
            return
        turn = self._join(share)
        try:
            await turn.wait()
        except asyncio.CancelledError:
            if turn.is_set():
                self._release(share)
            else:
                self._leave(share, turn)
            raise

    def _has_permit_for(self, share: Share) -> bool:
        return (
            self._num_free > 0
            and self._taken[share] < self._permits_per_share
            and self._taken_by_tenant[tenant_of(share)] < self._permits_per_tenant
        )

    def _take(self, share: Share) -> None:
        tenant = tenant_of(share)
        self._begin(tenant)
        self._last_seconds = max(self._last_seconds, self._seconds[tenant])
        self._num_free -= 1
        self._taken[share] += 1
        self._taken_by_tenant[tenant] += 1

    def _release(self, share: Share) -> None:
        tenant = tenant_of(share)
        self._num_free += 1
        self._taken[share] -= 1
        self._taken_by_tenant[tenant] -= 1
        if not self._taken[share]:
            del self._taken[share]
        if not self._taken_by_tenant[tenant]:
            del self._taken_by_tenant[tenant]
        if tenant in self._waiting:
            self._enter(tenant)
        self._serve_next()
        if not self._taken and not self._waiting:
            self._seconds.clear()
            self._last_seconds = 0.0

    def _begin(self, tenant: str) -> None:
        """Give a tenant without permits and waiting tasks the seconds that it begins with."""
        if tenant not in self._waiting and tenant not in self._taken_by_tenant:
            self._seconds[tenant] = max(self._seconds.get(tenant, 0.0), self._last_seconds)

    def _enter(self, tenant: str) -> None:
        """Let a tenant wait for its turn, behind those that have as many seconds."""
        tick = self._entries[tenant] = next(self._ticks)
        heapq.heappush(self._turns, (self._seconds[tenant], tick, tenant))

    def _serve_next(self) -> None:
        """Give a free permit to the first tenant that may have one more, and to its first share that may."""
        passed = []
        while self._turns and self._num_free > 0:
            turn = heapq.heappop(self._turns)
            _, tick, tenant = turn
            if self._entries.get(tenant) != tick:
                continue
            # Of a tenant with all its permits no share is looked at: thousands may wait.
            if self._taken_by_tenant[tenant] < self._permits_per_tenant:
                share = next(filter(self._has_permit_for, self._waiting[tenant]), None)
                if share is not None:
                    self._serve(share)
                    break
            passed.append(turn)
        for turn in passed:
            heapq.heappush(self._turns, turn)

    def _serve(self, share: Share) -> None:
        tenant = tenant_of(share)
        shares = self._waiting[tenant]
        turn = shares[share].popleft()
        shares.move_to_end(share)
        self._take(share)
        self._enter(tenant)
        self._drop_if_empty(share)
        turn.set()

    def _join(self, share: Share) -> asyncio.Event:
        tenant = tenant_of(share)
        self._begin(tenant)
        is_first = tenant not in self._waiting
        queue = self._waiting.setdefault(tenant, OrderedDict()).setdefault(share, deque())
        if len(queue) >= self._max_waiting:
            raise QueueFull(f"{len(queue)} tasks of the same tenant and variant wait: try again in a moment")
        turn = asyncio.Event()
        queue.append(turn)
        if is_first:
            self._enter(tenant)
        return turn

    def _leave(self, share: Share, turn: asyncio.Event) -> None:
        self._waiting[tenant_of(share)][share].remove(turn)
        self._drop_if_empty(share)

    def _drop_if_empty(self, share: Share) -> None:
        tenant = tenant_of(share)
        shares = self._waiting[tenant]
        if not shares[share]:
            del shares[share]
        if not shares:
            del self._waiting[tenant], self._entries[tenant]


# Entries of a heap that are out of date: past twice the owners and this number it is made anew.
HEAP_SLACK = 64


class Holdings:
    """Amounts that owners hold, and the owner that holds most. All operations take amortized O(log owners).

    The heap is corrected lazily: an owner that grew is entered again, one that shrank is noticed at the top.
    """

    def __init__(self) -> None:
        # The negative amount and the time of the last use, so that the smallest is first.
        self._held: dict[str, tuple[int, int]] = {}
        # The same as each owner is in the heap, never behind what it holds. Its other entries are out of date.
        self._entered: dict[str, tuple[int, int]] = {}
        self._heap: list[tuple[tuple[int, int], str]] = []
        self._ticks = itertools.count()

    def hold(self, owner: str, amount: int) -> None:
        """Note the amount that an owner holds now, which it has just used; 0 forgets the owner."""
        if amount:
            key = self._held[owner] = -amount, next(self._ticks)
            if owner not in self._entered or key < self._entered[owner]:
                self._entered[owner] = key
                heapq.heappush(self._heap, (key, owner))
        else:
            self._held.pop(owner, None)
        if len(self._heap) > 2 * len(self._held) + HEAP_SLACK:
            self._entered = dict(self._held)
            self._heap = [(key, owner) for owner, key in self._held.items()]
            heapq.heapify(self._heap)

    def largest(self) -> tuple[str, int]:
        """Return the owner that holds most, and how much more it holds than the next one, at least 1.

        Among equals, it is the one whose last use is the longest ago.

        Raises:
            IndexError: no owner holds anything.
        """
        while True:
            key, owner = self._heap[0]
            held = self._held.get(owner)
            if held == key:
                # The second is one of the next two.
                second = min((key for key, _ in self._heap[1:3]), default=(0, 0))
                return owner, max(1, second[0] - key[0])
            if held is None or key != self._entered[owner]:
                heapq.heappop(self._heap)
                if key == self._entered.get(owner):
                    del self._entered[owner]
            else:
                self._entered[owner] = held
                heapq.heapreplace(self._heap, (held, owner))


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class FairCache(Generic[K, V]):
    """The most recently used values of one kind. The owner that holds most loses one when there are too many.

    So an owner alone may use all of it, and one that fills it takes nothing from others that hold less.

    Args:
        max_size: of all values together: their number, or whatever `put` is given.
    """

    def __init__(self, max_size: int) -> None:
        self.size = 0
        self._max_size = max_size
        self._owner_of: dict[K, str] = {}
        # By owner, the least recently used first, each with its size.
        self._values: dict[str, OrderedDict[K, tuple[V, int]]] = {}
        self._sizes: Counter[str] = Counter()
        self._holdings = Holdings()

    def __len__(self) -> int:
        return len(self._owner_of)

    def get(self, key: K) -> V | None:
        """Return a value, which is then the most recently used; None if there is none."""
        owner = self._owner_of.get(key)
        if owner is None:
            return None
        self._values[owner].move_to_end(key)
        self._holdings.hold(owner, self._sizes[owner])
        return self._values[owner][key][0]

    def put(self, key: K, value: V, owner: str, size: int = 1) -> None:
        """Keep a value of a size of at least 1, and drop what the largest owners have used least recently.

        The new one stays, also if it is larger than all that others have.
        """
        self.drop(key)
        self._owner_of[key] = owner
        self._values.setdefault(owner, OrderedDict())[key] = value, size
        self._resize(owner, size)
        while self.size > self._max_size and len(self) > 1:
            largest, _ = self._holdings.largest()
            oldest = next(iter(self._values[largest]))
            if oldest == key:
                # The owner has no other, and does not count for the moment.
                self._holdings.hold(owner, 0)
            else:
                self.drop(oldest)
        self._holdings.hold(owner, self._sizes[owner])

    def drop(self, key: K) -> None:
        """Forget a value; no effect if there is none."""
        owner = self._owner_of.pop(key, None)
        if owner is not None:
            _, size = self._values[owner].pop(key)
            self._resize(owner, -size)

    def _resize(self, owner: str, more: int) -> None:
        self.size += more
        self._sizes[owner] += more
        self._holdings.hold(owner, self._sizes[owner])
        if not self._values[owner]:
            del self._values[owner], self._sizes[owner]
