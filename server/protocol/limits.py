"""Answers about tenants' limits, as the rate limiter gives them and HTTP processes show them."""

from __future__ import annotations

from msgspec import Struct

from server.tenants.limits.tenant_limits import TenantLimits


class Rate(Struct, frozen=True, array_like=True):
    """One limit per minute, as `x-ratelimit-*` headers show it."""

    limit: int
    remaining: int
    reset_s: float  # until all of it is free again, if nothing else comes


class Rates(Struct, frozen=True, array_like=True):
    """A tenant's limits per minute; None is unlimited."""

    requests: Rate | None = None
    tokens: Rate | None = None


class Admitted(Struct, frozen=True, tag=True):
    """The work of a tenant may begin, and counts as under way until its Release."""

    rates: Rates
    limits: TenantLimits


class Refused(Struct, frozen=True, tag=True):
    """The tenant is over a limit."""

    rates: Rates
    limit: str  # a field of TenantLimits
    message: str
    retry_after_s: int | None  # None: the work exceeds the limit by itself and never fits


class Usage(Struct, frozen=True):
    """A tenant's limits and its usage now."""

    limits: TenantLimits
    num_requests: int  # of the last minute
    num_tokens: int  # of the last minute
    num_running: int
    num_uploads: int
