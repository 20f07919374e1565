"""Names that clients have loaded with vLLM's calls, as plain values, and the record of them that a server keeps.

vLLM lists an adapter from its load call to its unload call, also while it is in no memory. The supervisor keeps the
record, so that every HTTP process lists the same, and an engine that restarts changes nothing.
"""

from __future__ import annotations

from msgspec import Struct

from server.fair_budget import FairBudget

# With their paths, a tenant's are far smaller than a message to the supervisor may be.
MAX_ADAPTERS = 4096


class LoadedAdapter(Struct, frozen=True, array_like=True):
    """A variant's name that was loaded and not unloaded since."""

    tenant: str
    name: str
    path: str  # as the client gave it
    loaded_at: float  # seconds since 1970


class AdapterChange(Struct, frozen=True):
    """A change of what a tenant has loaded; without a field that is set, a question about it."""

    tenant: str
    loaded: LoadedAdapter | None = None
    unloaded: str | None = None  # the name


class LoadedAdapters:
    """The record of one server. Not thread-safe.

    Tenants share its length: one alone may have half of `MAX_ADAPTERS`, and its oldest is forgotten for the next one.
    """

    def __init__(self) -> None:
        self._by_tenant: dict[str, dict[str, LoadedAdapter]] = {}
        self._budget = FairBudget(MAX_ADAPTERS, "loaded adapters")

    def apply(self, change: AdapterChange) -> tuple[LoadedAdapter, ...]:
        """Make a change and return the tenant's adapters, in the order in which they were first loaded."""
        own = self._by_tenant.get(change.tenant, {})
        if change.loaded is not None and self._has_place(change.tenant, change.loaded.name):
            own = self._by_tenant.setdefault(change.tenant, {})
            own[change.loaded.name] = change.loaded
        if change.unloaded in own:
            self._forget(change.tenant, change.unloaded)
        return tuple(own.values())

    def _has_place(self, tenant: str, name: str) -> bool:
        """Take a place for a name that has none; the tenant's oldest gives its own if there is no other."""
        own = self._by_tenant.get(tenant, {})
        if name in own:
            return True
        if own and not self._budget.has(tenant, 1):
            self._forget(tenant, next(iter(own)))
        if not self._budget.has(tenant, 1):
            return False
        self._budget.take(tenant, 1)
        return True

    def _forget(self, tenant: str, name: str) -> None:
        own = self._by_tenant[tenant]
        del own[name]
        self._budget.give_back(tenant, 1)
        if not own:
            del self._by_tenant[tenant]
