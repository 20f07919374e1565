"""Variants that wait for a slot, in the order in which they get one: the oldest of the tenant with the fewest loads."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.engine.scheduling.least_served import LeastServed
from server.engine.scheduling.scheduled_variant import ScheduledVariant


@dataclass(slots=True, eq=False)
class TenantLoads:
    """The variants without a slot that one tenant waits for, the longest waiting first."""

    counter: float = 0.0  # loads so far
    variants: dict[str, ScheduledVariant] = field(default_factory=dict)  # by digest

    @property
    def is_ready(self) -> bool:
        return bool(self.variants)

    @property
    def is_idle(self) -> bool:
        return not self.variants

    @property
    def oldest(self) -> ScheduledVariant:
        return next(iter(self.variants.values()))


class SlotQueue:
    """Variants that wait for a slot, grouped by the tenants that wait for them."""

    def __init__(self) -> None:
        self._tenants: LeastServed[str, TenantLoads] = LeastServed(lambda name: TenantLoads())

    def add(self, tenant: str, variant: ScheduledVariant) -> None:
        loads = self._tenants.get(tenant)
        loads.variants[variant.digest] = variant
        if len(loads.variants) == 1:
            self._tenants.activate(loads)

    def remove(self, tenant: str, digest: str) -> None:
        self._tenants.get(tenant).variants.pop(digest, None)

    def first(self) -> TenantLoads | None:
        """Return the tenant that had the fewest loads; at least one variant of it waits."""
        return self._tenants.first()
