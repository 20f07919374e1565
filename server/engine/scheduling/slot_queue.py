"""Variants that wait for a slot, in the order in which they get one: the oldest of the tenant with the fewest loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from server.engine.scheduling.least_served import LeastServed
from server.engine.scheduling.scheduled_variant import ScheduledVariant


@dataclass(slots=True, eq=False)
class TenantLoads:
    """The variants without a slot that one tenant waits for, the longest waiting first."""

    tenant: str
    counter: float = 0.0  # loads so far
    may_load: bool = True  # False while as many of its loads are under way as it may have
    variants: dict[str, ScheduledVariant] = field(default_factory=dict)  # by digest

    @property
    def is_ready(self) -> bool:
        return self.may_load and bool(self.variants)

    @property
    def is_idle(self) -> bool:
        return not self.variants

    @property
    def oldest(self) -> ScheduledVariant:
        return next(iter(self.variants.values()))


class SlotQueue:
    """Variants that wait for a slot, grouped by the tenants that wait for them.

    Args:
        may_load: whether one more load of a tenant may begin; asked again after `load_ended`.
    """

    def __init__(self, may_load: Callable[[str], bool]) -> None:
        self._tenants: LeastServed[str, TenantLoads] = LeastServed(TenantLoads)
        self._may_load = may_load
        self._full: list[TenantLoads] = []

    def add(self, tenant: str, variant: ScheduledVariant) -> None:
        loads = self._tenants.get(tenant)
        loads.variants[variant.digest] = variant
        if len(loads.variants) == 1:
            self._tenants.activate(loads)

    def remove(self, tenant: str, digest: str) -> None:
        self._tenants.get(tenant).variants.pop(digest, None)

    def first(self) -> TenantLoads | None:
        """Return the tenant that had the fewest loads and may begin one; at least one variant of it waits."""
        while (loads := self._tenants.first()) is not None and not self._may_load(loads.tenant):
            loads.may_load = False
            self._full.append(loads)
        return loads

    def load_ended(self) -> None:
        """Look again at the tenants that could begin no load."""
        full, self._full = self._full, []
        for loads in full:
            loads.may_load = True
            self._tenants.activate(loads)
