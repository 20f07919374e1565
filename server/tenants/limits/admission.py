"""Decide from a tenant's limits, its windows and its work under way whether more work fits. Keeps no state.

`tokens_per_minute` bounds what the last minute has used and what running calls have reserved, together:

1. A call is admitted if its prompt and its reservation fit into the limit. The reservation of a call whose length the
   client has set is all of its new tokens; that of a call without a length is a few, `START_TOKENS`.
2. A running call without a length keeps its reservation ahead of the tokens that it has generated. It may go beyond the
   limit, until the sum is more than twice the limit: then it ends.

Use beyond the limit stands in the window like all other use, so that the tenant's next calls wait longer for it to
leave.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from server.protocol.limits import Rate, Rates, SeatRefused, TakeSeat, Tokens
from server.tenants.limits.tenant_limits import TenantLimits
from server.tenants.limits.windows import SlidingCount

# When one of the tenant's requests or uploads ends is not known; this is when to ask again.
RETRY_S = 1.0
# New tokens that a call without a length reserves; less if that is more than this part of the limit.
START_TOKENS = 256
START_PART = 4
# For messages: what a tenant with this limit may do.
ALLOWED = {
    "requests_per_minute": "send {} request{} per minute",
    "tokens_per_minute": "use {} token{} per minute",
    "max_running": "run {} request{} at a time",
    "max_uploads": "have {} upload{} under way",
}


@dataclass(slots=True)
class UnderWay:
    """The work of one tenant that has begun and not ended."""

    num_running: int = 0
    num_reserved_tokens: int = 0
    num_uploads: int = 0
    upload_bytes: int = 0


class LastMinute(NamedTuple):
    """The windows of one tenant."""

    requests: SlidingCount
    tokens: SlidingCount


class Refusal(NamedTuple):
    """The limit that keeps work out; `wait_s` is None if the work exceeds it by itself."""

    limit: str
    wait_s: float | None


def refusal_of_seat(
    call: TakeSeat, limits: TenantLimits, under_way: UnderWay, last_minute: LastMinute, num_counted: int = 0
) -> Refusal | None:
    """Return the limit with the longest wait that keeps work out; None if it fits with the fewest tokens of it.

    Args:
        num_counted: requests of the call that count already. All of them count again when it is sent again.
    """
    if call.kind == "upload":
        is_full = limits.max_uploads is not None and under_way.num_uploads >= limits.max_uploads
        return Refusal("max_uploads", RETRY_S) if is_full else None
    waits: dict[str, float | None] = {}
    num_further = call.num_requests - num_counted
    if (limit := limits.requests_per_minute) is not None:
        fits = call.num_requests <= limit and last_minute.requests.used + num_further <= limit
        waits["requests_per_minute"] = (
            0.0 if fits else _wait_s(last_minute.requests, 0, limit, call.num_requests)
        )
    if (limit := limits.tokens_per_minute) is not None and (amount := _amount(call.tokens, limits)):
        reserved = under_way.num_reserved_tokens
        waits["tokens_per_minute"] = _wait_s(last_minute.tokens, reserved, limit, amount)
    if (limit := limits.max_running) is not None:
        has_place = under_way.num_running + num_further <= limit
        waits["max_running"] = None if call.num_requests > limit else 0.0 if has_place else RETRY_S
    longest = max(waits, key=lambda name: _order(waits[name]), default=None)
    return None if longest is None or waits[longest] == 0 else Refusal(longest, waits[longest])


def refusal_of_tokens(
    tokens: Tokens, num_requests: int, limits: TenantLimits, under_way: UnderWay, last_minute: LastMinute
) -> Refusal | None:
    """Return how long `tokens_per_minute` keeps out the tokens of a call that has a seat; None if they fit.

    The call has counted as `num_requests` requests, and will once more when it is sent again.
    """
    limit = limits.tokens_per_minute
    if limit is None:
        return None
    reserved = under_way.num_reserved_tokens
    longest = _wait_s(last_minute.tokens, reserved, limit, _amount(tokens, limits))
    if longest == 0:
        return None
    if longest is not None and (most := limits.requests_per_minute) is not None:
        again = _wait_s(last_minute.requests, 0, most, min(num_requests, most))
        longest = max(longest, again or 0.0)
    return Refusal("tokens_per_minute", longest)


def reservation(tokens: Tokens, limits: TenantLimits) -> int:
    """Return how many new tokens of a call are reserved while it runs, at most."""
    limit = limits.tokens_per_minute
    if limit is None or not tokens.may_overdraw:
        return tokens.num_new
    return min(tokens.num_new, START_TOKENS, max(1, limit // START_PART), max(1, limit - tokens.num_prompt))


def is_overdrawn(limits: TenantLimits, under_way: UnderWay, last_minute: LastMinute) -> bool:
    """Return whether running calls without a length must end."""
    limit = limits.tokens_per_minute
    return limit is not None and last_minute.tokens.used + under_way.num_reserved_tokens > 2 * limit


def refused(call_id: int, tenant: str, refusal: Refusal, limits: TenantLimits, rates: Rates) -> SeatRefused:
    """Return the answer to work that a limit keeps out."""
    limit = getattr(limits, refusal.limit)
    allowed = ALLOWED[refusal.limit].format(limit, "" if limit == 1 else "s")
    if refusal.wait_s is None:
        message = f"tenant {tenant!r} may {allowed}, and this call alone is more: send a smaller one"
        return SeatRefused(call_id, rates, refusal.limit, message, None)
    retry_after_s = max(1, math.ceil(refusal.wait_s))
    message = f"tenant {tenant!r} may {allowed}: send this one again in {retry_after_s} s"
    return SeatRefused(call_id, rates, refusal.limit, message, retry_after_s)


def rates_of(limits: TenantLimits, under_way: UnderWay, last_minute: LastMinute) -> Rates:
    """Return a tenant's limits per minute and what is left of them."""
    return Rates(
        _rate(limits.requests_per_minute, 0, last_minute.requests),
        _rate(limits.tokens_per_minute, under_way.num_reserved_tokens, last_minute.tokens),
    )


def _amount(tokens: Tokens, limits: TenantLimits) -> int:
    """Return the tokens of a call that must fit into the limit for it to start."""
    return tokens.num_prompt + reservation(tokens, limits)


def _wait_s(window: SlidingCount, reserved: int, limit: int, amount: int) -> float | None:
    """Return the seconds until `amount` more may fit, at least `RETRY_S` while a reservation keeps them out.

    None if they never fit.
    """
    if amount > limit:
        return None
    is_full = window.used + reserved + amount > limit
    return max(window.wait_s(limit, amount), RETRY_S if is_full and reserved else 0.0)


def _order(wait_s: float | None) -> float:
    return math.inf if wait_s is None else wait_s


def _rate(limit: int | None, reserved: int, window: SlidingCount) -> Rate | None:
    if limit is None:
        return None
    reset_s = _wait_s(window, reserved, limit, limit)
    assert reset_s is not None
    return Rate(limit, max(0, limit - window.used - reserved), reset_s)
