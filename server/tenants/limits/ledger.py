"""Counts the work of all tenants of one server and decides what their limits admit. One process of the server has it.

Work under way is kept by its holder, which is an HTTP process, so that a process that dies frees what it held. The
windows of the last minute belong to no holder and outlive every process but this one. The tokens that a running request
may still generate are reserved beside the window. Knows no connection and no HTTP.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from deltastore.errors import PeraxisError
from server.protocol.limits import (
    GiveBack,
    LimitAnswer,
    LimitCall,
    LimitsUnknown,
    Rate,
    Rates,
    SeatRefused,
    SeatTaken,
    TakeSeat,
    UsageOfTenant,
    UsageWanted,
)
from server.tenants.limits.tenant_limits import TenantLimits
from server.tenants.limits.windows import SlidingCount, Windows

# When one of the tenant's requests or uploads ends is not known; this is when to ask again.
RETRY_S = 1.0
# For messages: what a tenant with this limit may do.
ALLOWED = {
    "requests_per_minute": "send {} request{} per minute",
    "tokens_per_minute": "use {} token{} per minute",
    "max_running": "run {} request{} at a time",
    "max_uploads": "have {} upload{} under way",
}


@dataclass(slots=True)
class _UnderWay:
    """The work of one tenant that has begun and not ended."""

    num_running: int = 0
    num_reserved_tokens: int = 0
    num_uploads: int = 0
    upload_bytes: int = 0

    def add(self, seat: TakeSeat, sign: int) -> None:
        if seat.kind == "request":
            self.num_running += sign * seat.num_requests
            self.num_reserved_tokens += sign * seat.num_new_tokens
        else:
            self.num_uploads += sign
            self.upload_bytes += sign * seat.num_bytes


class _LastMinute(NamedTuple):
    """The windows of one tenant."""

    requests: SlidingCount
    tokens: SlidingCount


class _Refusal(NamedTuple):
    """The limit that keeps work out; `wait_s` is None if the work exceeds it by itself."""

    limit: str
    wait_s: float | None


class Ledger:
    """The seats and windows of all tenants. Use it on one event loop.

    Args:
        limits_of: returns a tenant's limits now; raises PeraxisError if they are unknown.
    """

    def __init__(self, limits_of: Callable[[str], TenantLimits]) -> None:
        self._limits_of = limits_of
        self._windows = Windows()
        self._seats: defaultdict[str, dict[int, TakeSeat]] = defaultdict(dict)  # by holder
        self._under_way: defaultdict[str, _UnderWay] = defaultdict(_UnderWay)  # by tenant
        # Nothing may come between a look at a window and the count that it allows.
        self._lock = asyncio.Lock()

    async def answer(self, holder: str, call: LimitCall) -> LimitAnswer | None:
        """Do what a holder asks and return the answer; None for a GiveBack."""
        async with self._lock:
            if isinstance(call, GiveBack):
                await self._give_back(holder, call)
                return None
            try:
                limits = self._limits_of(call.tenant)
            except PeraxisError as error:
                return LimitsUnknown(call.call_id, error.public)
            if isinstance(call, UsageWanted):
                return await self._usage(call, limits)
            return await self._take(holder, call, limits)

    def free(self, holder: str) -> None:
        """Free the seats of a holder that has died."""
        for seat in self._seats.pop(holder, {}).values():
            self._under_way[seat.tenant].add(seat, -1)

    async def _take(self, holder: str, call: TakeSeat, limits: TenantLimits) -> SeatTaken | SeatRefused:
        under_way, last_minute = self._under_way[call.tenant], await self._last_minute(call.tenant)
        if call.kind == "request":
            refusal = _refusal_of_request(call, limits, under_way, last_minute)
        else:
            is_full = limits.max_uploads is not None and under_way.num_uploads >= limits.max_uploads
            refusal = _Refusal("max_uploads", RETRY_S) if is_full else None
        if refusal is not None:
            return _refused(call, refusal, limits, _rates(limits, under_way, last_minute))
        reserved_bytes = under_way.upload_bytes
        self._seats[holder][call.call_id] = call
        under_way.add(call, 1)
        if call.kind == "request":
            await self._count(call.tenant, call.num_requests, call.num_tokens)
            last_minute = await self._last_minute(call.tenant)
        rates = _rates(limits, under_way, last_minute)
        return SeatTaken(call.call_id, rates, limits, reserved_bytes)

    async def _give_back(self, holder: str, call: GiveBack) -> None:
        seat = self._seats.get(holder, {}).pop(call.call_id, None)
        if seat is not None:
            self._under_way[seat.tenant].add(seat, -1)
            await self._count(seat.tenant, 0, call.num_tokens)

    async def _usage(self, call: UsageWanted, limits: TenantLimits) -> UsageOfTenant:
        under_way, last_minute = self._under_way[call.tenant], await self._last_minute(call.tenant)
        return UsageOfTenant(
            call.call_id,
            limits,
            last_minute.requests.used,
            last_minute.tokens.used,
            under_way.num_running,
            under_way.num_uploads,
        )

    async def _last_minute(self, tenant: str) -> _LastMinute:
        return _LastMinute(
            await self._windows.read(f"requests/{tenant}"), await self._windows.read(f"tokens/{tenant}")
        )

    async def _count(self, tenant: str, num_requests: int, num_tokens: int) -> None:
        await self._windows.add(f"requests/{tenant}", num_requests)
        await self._windows.add(f"tokens/{tenant}", num_tokens)


def _refusal_of_request(
    call: TakeSeat, limits: TenantLimits, under_way: _UnderWay, last_minute: _LastMinute
) -> _Refusal | None:
    """Return the limit with the longest wait; None if the request fits all of them."""
    waits: dict[str, float] = {}
    num_tokens, num_reserved = call.num_tokens + call.num_new_tokens, under_way.num_reserved_tokens
    for name, limit, amount, reserved, window in (
        ("requests_per_minute", limits.requests_per_minute, call.num_requests, 0, last_minute.requests),
        ("tokens_per_minute", limits.tokens_per_minute, num_tokens, num_reserved, last_minute.tokens),
    ):
        if limit is not None:
            if amount > limit:
                return _Refusal(name, None)
            waits[name] = _wait_s(window, reserved, limit, amount)
    if limits.max_running is not None:
        if call.num_requests > limits.max_running:
            return _Refusal("max_running", None)
        has_place = under_way.num_running + call.num_requests <= limits.max_running
        waits["max_running"] = 0.0 if has_place else RETRY_S
    longest = max(waits, key=waits.__getitem__, default=None)
    if longest is None or not waits[longest]:
        return None
    return _Refusal(longest, waits[longest])


def _refused(call: TakeSeat, refusal: _Refusal, limits: TenantLimits, rates: Rates) -> SeatRefused:
    limit = getattr(limits, refusal.limit)
    allowed = ALLOWED[refusal.limit].format(limit, "" if limit == 1 else "s")
    if refusal.wait_s is None:
        message = f"tenant {call.tenant!r} may {allowed}, and this call alone is more: send a smaller one"
        return SeatRefused(call.call_id, rates, refusal.limit, message, None)
    retry_after_s = max(1, math.ceil(refusal.wait_s))
    message = f"tenant {call.tenant!r} may {allowed}: send this one again in {retry_after_s} s"
    return SeatRefused(call.call_id, rates, refusal.limit, message, retry_after_s)


def _wait_s(window: SlidingCount, reserved: int, limit: int, amount: int) -> float:
    """Return the seconds until `amount` more may fit; at least `RETRY_S` while a reservation keeps them out."""
    is_full = window.used + reserved + amount > limit
    return max(window.wait_s(limit, amount), RETRY_S if is_full and reserved else 0.0)


def _rates(limits: TenantLimits, under_way: _UnderWay, last_minute: _LastMinute) -> Rates:
    return Rates(
        _rate(limits.requests_per_minute, 0, last_minute.requests),
        _rate(limits.tokens_per_minute, under_way.num_reserved_tokens, last_minute.tokens),
    )


def _rate(limit: int | None, reserved: int, window: SlidingCount) -> Rate | None:
    if limit is None:
        return None
    return Rate(limit, max(0, limit - window.used - reserved), _wait_s(window, reserved, limit, limit))
