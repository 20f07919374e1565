"""Fair shares among tenants: an amount, permits in turn, the places of a cache. Event loop only."""

from __future__ import annotations

import asyncio
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


def tenant_of(share: Share) -> str:
    """Return the tenant that a share belongs to."""
    return share if isinstance(share, str) else share[0]


class FairLimiter:
    """Gives each task a permit. Tenants with waiting tasks get free permits in turn, and so do the shares of a tenant.

    Args:
        num_permits: tasks that run at a time.
        permits_per_share: permits that one share may have.
        max_waiting: waiting tasks of one share; further ones are refused.
        permits_per_tenant: permits that all shares of one tenant may have; None is all.
    """

    def __init__(
        self,
        num_permits: int,
        permits_per_share: int,
        max_waiting: int,
        permits_per_tenant: int | None = None,
    ) -> None:
        self._num_free = num_permits
        self._permits_per_share = permits_per_share
        self._permits_per_tenant = num_permits if permits_per_tenant is None else permits_per_tenant
        self._max_waiting = max_waiting
        self._taken: Counter[Share] = Counter()
        self._taken_by_tenant: Counter[str] = Counter()
        # The tenant whose turn is next comes first, and so does its next share.
        self._waiting: OrderedDict[str, OrderedDict[Share, Queue]] = OrderedDict()

    @asynccontextmanager
    async def permit(self, share: Share) -> AsyncIterator[None]:
        """Wait for a permit and hold it inside the `async with` block.

        Raises:
            QueueFull: `max_waiting` tasks of the share wait already.
        """
        await self._acquire(share)
        try:
            yield
        finally:
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
        self._num_free -= 1
        self._taken[share] += 1
        self._taken_by_tenant[tenant_of(share)] += 1

    def _release(self, share: Share) -> None:
        tenant = tenant_of(share)
        self._num_free += 1
        self._taken[share] -= 1
        self._taken_by_tenant[tenant] -= 1
        if not self._taken[share]:
            del self._taken[share]
        if not self._taken_by_tenant[tenant]:
            del self._taken_by_tenant[tenant]
        self._serve_next()

    def _serve_next(self) -> None:
        """Give a permit to the first tenant with a share that may have one more; both are last in the next turn."""
        waiting = (share for shares in self._waiting.values() for share in shares)
        share = next(filter(self._has_permit_for, waiting), None)
        if share is None:
            return
        shares = self._waiting[tenant_of(share)]
        turn = shares[share].popleft()
        shares.move_to_end(share)
        self._waiting.move_to_end(tenant_of(share))
        self._drop_if_empty(share)
        self._take(share)
        turn.set()

    def _join(self, share: Share) -> asyncio.Event:
        shares = self._waiting.setdefault(tenant_of(share), OrderedDict())
        queue = shares.setdefault(share, deque())
        if len(queue) >= self._max_waiting:
            raise QueueFull(f"{len(queue)} tasks of the same tenant and variant wait: try again in a moment")
        turn = asyncio.Event()
        queue.append(turn)
        return turn

    def _leave(self, share: Share, turn: asyncio.Event) -> None:
        self._waiting[tenant_of(share)][share].remove(turn)
        self._drop_if_empty(share)

    def _drop_if_empty(self, share: Share) -> None:
        shares = self._waiting[tenant_of(share)]
        if not shares[share]:
            del shares[share]
        if not shares:
            del self._waiting[tenant_of(share)]


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Bounded(Generic[K, V]):
    """The most recently used values of one kind. The owner of the most values loses one when there are too many.

    Args:
        max_values: values of all owners together.
    """

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._values: OrderedDict[K, tuple[V, str]] = OrderedDict()

    def get(self, key: K) -> V | None:
        """Return a value, which is then the most recently used; None if there is none."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: K, value: V, owner: str) -> None:
        """Keep a value; drop the one that its owner, or an owner with more values, has used least recently."""
        self._values[key] = value, owner
        self._values.move_to_end(key)
        if len(self._values) > self._max_values:
            ((largest, _),) = Counter(other for _, other in self._values.values()).most_common(1)
            del self._values[next(key for key, (_, other) in self._values.items() if other == largest)]

    def drop(self, key: K) -> None:
        """Forget a value; no effect if there is none."""
        self._values.pop(key, None)
