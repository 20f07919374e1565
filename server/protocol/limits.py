"""Messages about tenants' limits: calls of an HTTP process, and the answers of the process that counts."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from server.tenants.limits.tenant_limits import TenantLimits

SeatKind = Literal["request", "upload"]


class Tokens(Struct, frozen=True, array_like=True):
    """The tokens of a call."""

    num_prompt: int = 0
    num_new: int = 0  # the most that all sequences together may generate
    may_overdraw: bool = False  # its length is a default, so that it may start before all of it fits


class TakeSeat(Struct, frozen=True, tag=True):
    """Count work of a tenant as under way until a GiveBack. Answered by SeatTaken, SeatRefused or LimitsUnknown.

    The same id again says what the call of a seat needs, now that it is known. SeatRefused then gives the seat back.
    """

    call_id: int  # names the seat, too
    tenant: str
    kind: SeatKind
    num_requests: int = 0
    # The fewest that the work can need; compared with the limit and not counted.
    tokens: Tokens = Tokens()
    num_bytes: int = 0  # of an upload


class AddTokens(Struct, frozen=True, tag=True):
    """Count a seat's prompt tokens and reserve its new ones. Answered by TokensAdded, SeatRefused or LimitsUnknown.

    SeatRefused also gives the seat back.
    """

    call_id: int  # of the seat
    tokens: Tokens


class TokensGenerated(Struct, frozen=True, tag=True):
    """Count tokens that the requests of a seat have generated since the last count. Answered by TokensCounted."""

    call_id: int  # of the seat
    num_tokens: int


class GrowUpload(Struct, frozen=True, tag=True):
    """Count bytes of an upload whose length was not known, or none. Answered by UploadGrown or LimitsUnknown."""

    call_id: int  # of the seat
    num_bytes: int  # since the last count


class GiveBack(Struct, frozen=True, tag=True):
    """The work of a seat has ended, or its answer is not waited for. Has no answer; unknown ids are ignored."""

    call_id: int
    num_tokens: int  # generated since the last count


class UsageWanted(Struct, frozen=True, tag=True):
    """Ask for a tenant's limits and its usage. Answered by UsageOfTenant or LimitsUnknown."""

    call_id: int
    tenant: str


# Calls that are answered.
LimitQuestion = TakeSeat | AddTokens | TokensGenerated | GrowUpload | UsageWanted
LimitCall = LimitQuestion | GiveBack


class Rate(Struct, frozen=True, array_like=True):
    """One limit per minute, as `x-ratelimit-*` headers show it."""

    limit: int
    remaining: int  # without what running requests have reserved
    reset_s: float  # until all of it is free again, if nothing else comes


class Rates(Struct, frozen=True, array_like=True):
    """A tenant's limits per minute; None is unlimited."""

    requests: Rate | None = None
    tokens: Rate | None = None


class SeatTaken(Struct, frozen=True, tag=True):
    """The work may begin."""

    call_id: int
    rates: Rates
    limits: TenantLimits


class TokensAdded(Struct, frozen=True, tag=True):
    """The seat's requests may run."""

    call_id: int
    rates: Rates


class TokensCounted(Struct, frozen=True, tag=True):
    """The answer to TokensGenerated."""

    call_id: int
    is_overdrawn: bool  # the requests of this seat must end, because their length is a default


class UploadGrown(Struct, frozen=True, tag=True):
    """The answer to GrowUpload."""

    call_id: int
    reserved_bytes: int  # of the tenant's other uploads under way


class SeatRefused(Struct, frozen=True, tag=True):
    """The tenant is over a limit."""

    call_id: int
    rates: Rates
    limit: str  # a field of TenantLimits
    message: str
    retry_after_s: int | None  # None: the work exceeds the limit by itself and never fits


class UsageOfTenant(Struct, frozen=True, tag=True):
    """A tenant's limits and its usage now."""

    call_id: int
    limits: TenantLimits
    num_requests: int  # of the last minute
    num_tokens: int  # of the last minute
    num_running: int
    num_uploads: int


class LimitsUnknown(Struct, frozen=True, tag=True):
    """The tenant's limits cannot be read, so nothing of it is admitted."""

    call_id: int
    message: str


LimitAnswer = (
    SeatTaken | TokensAdded | TokensCounted | UploadGrown | SeatRefused | UsageOfTenant | LimitsUnknown
)
