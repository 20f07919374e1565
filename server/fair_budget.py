"""A bounded amount, such as bytes of memory, that tenants share. Event loop only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
