"""A tenant, and the caller of a request: a tenant with the roles of its key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

# `inference` sends requests for tokens, `publish` changes the tenant's variants, `metrics` reads /metrics and nothing
# else, `admin` does all of it, for any tenant, and changes keys.
Role = Literal["inference", "publish", "metrics", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
# Those that act for a tenant. Metrics belong to the operator, and the key that reads them lies on another system.
TENANT_ROLES: frozenset[Role] = frozenset(ROLES) - {"metrics"}


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of a request and of the variants that it may use and change."""

    name: str


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request."""

    tenant: Tenant
    roles: frozenset[Role]
    key_id: str | None  # None with `--auth none`

    def has(self, role: Role) -> bool:
        """True if the caller has a role; `admin` includes the others."""
        return role in self.roles or "admin" in self.roles

    def acts_for_tenant(self) -> bool:
        """True if the caller may call the routes that every key of a tenant may; a key for metrics alone may not."""
        return not self.roles.isdisjoint(TENANT_ROLES)


# With `--auth none`, every request belongs to this tenant and has every role.
DEFAULT_TENANT = Tenant("default")
UNAUTHENTICATED = Caller(DEFAULT_TENANT, frozenset(ROLES), None)
