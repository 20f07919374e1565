"""A tenant as a value: its name, the roles of its keys, its limits and its usage. Touches no file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, Struct
from pydantic import PlainSerializer, PlainValidator

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


# Every integer up to this is exact in JSON readers that use doubles.
LARGEST = (1 << 53) - 1

Positive = Annotated[int, Meta(ge=1, le=LARGEST)]
Natural = Annotated[int, Meta(ge=0, le=LARGEST)]


class TenantLimits(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The most that a tenant may use of one server; None is unlimited."""

    requests_per_minute: Positive | None = None
    # Prompt tokens count when a request is admitted, generated tokens as they come. What it may still generate is
    # reserved, or a part of it if the client has not set a length.
    tokens_per_minute: Positive | None = None
    # Requests between their admission and their end, those whose prompts are being tokenized included.
    max_running: Positive | None = None
    max_uploads: Positive | None = None  # under way
    # Counts each artifact with a live version once, and uploads under way. None is as many as the tenant leaves free on
    # the registry's volume, and unlimited in a bucket.
    max_stored_bytes: Natural | None = None
    max_stored_versions: Natural | None = None  # live ones of all variants together
    max_variants: Natural | None = None  # with a live version
    max_versions: Positive | None = None  # live ones of one variant
    max_pinned: Natural | None = None  # versions


FIELDS = tuple(field.name for field in msgspec.structs.fields(TenantLimits))


def parse_limits(value: object) -> TenantLimits:
    """Return limits from a mapping, as TOML gives it, or from JSON text, as an environment variable gives it.

    Raises:
        ValueError: names the field at fault.
    """
    try:
        if isinstance(value, str | bytes):
            return msgspec.json.decode(value, type=TenantLimits)
        return msgspec.convert(value, TenantLimits)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error


def plain(limits: TenantLimits) -> dict[str, Any]:
    """Return the limits by name; None is unlimited."""
    return msgspec.structs.asdict(limits)


def as_toml(limits: TenantLimits) -> str:
    """Return the limits as a TOML inline table, without those that are unlimited."""
    given: Mapping[str, int] = {name: value for name, value in plain(limits).items() if value is not None}
    return "{" + ", ".join(f"{name} = {value}" for name, value in given.items()) + "}"


# A field of a pydantic model.
LimitsSetting = Annotated[TenantLimits, PlainValidator(parse_limits), PlainSerializer(plain)]


class Rate(Struct, frozen=True, array_like=True):
    """One limit per minute, as `x-ratelimit-*` headers show it."""

    limit: int
    remaining: int
    reset_s: float  # until all of it is free again, if nothing else comes


class Rates(Struct, frozen=True, array_like=True):
    """A tenant's limits per minute; None is unlimited."""

    requests: Rate | None = None
    tokens: Rate | None = None

    def headers(self) -> dict[str, str]:
        """Return `x-ratelimit-*` for the limits that there are; durations are seconds with their unit, as OpenAI's."""
        headers: dict[str, str] = {}
        for name, rate in (("requests", self.requests), ("tokens", self.tokens)):
            if rate is not None:
                headers |= {
                    f"x-ratelimit-limit-{name}": str(rate.limit),
                    f"x-ratelimit-remaining-{name}": str(rate.remaining),
                    f"x-ratelimit-reset-{name}": f"{math.ceil(rate.reset_s)}s",
                }
        return headers


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
