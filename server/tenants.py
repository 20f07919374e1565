"""Who calls: from a request's credentials to a tenant. Knows nothing of variants, limits or HTTP routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whoever a request belongs to."""

    name: str
    may_administer: bool  # upload, promote and delete the tenant's own variants


class Tenants(Protocol):
    """Tells tenants apart by what a request carries."""

    def identify(self, authorization: str | None) -> Tenant:
        """The tenant behind an `Authorization` header's value; None where the request has none."""


class Open:
    """`--auth none`: whoever reaches the port is the one tenant there is, and may do everything."""

    def identify(self, authorization: str | None) -> Tenant:
        return Tenant(DEFAULT_TENANT, may_administer=True)
