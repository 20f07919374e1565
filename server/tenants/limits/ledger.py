"""Counts the work of all tenants of one server and decides what their limits admit. One process of the server has it.

A call takes its seat before its body is read, says what it needs when it is parsed, adds the tokens of its prompts when
they are tokenized, and its generated tokens as they come. Work under way is kept by its holder, which is an HTTP
process, so that a process that dies frees what it held. The windows of the last minute belong to no holder and outlive
every process but this one. Tokens that a running request may still generate are reserved beside the window. Knows no
connection and no HTTP.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from deltastore.errors import PeraxisError
from server.protocol.limits import (
    AddTokens,
    GiveBack,
    GrowUpload,
    LimitAnswer,
    LimitCall,
    LimitsUnknown,
    SeatRefused,
    SeatTaken,
    TakeSeat,
    TokensAdded,
    TokensCounted,
    TokensGenerated,
    UploadGrown,
    UsageOfTenant,
    UsageWanted,
)
from server.tenants.limits.admission import (
    LastMinute,
    UnderWay,
    is_overdrawn,
    rates_of,
    refusal_of_seat,
    refusal_of_tokens,
    refused,
    reservation,
)
from server.tenants.limits.tenant_limits import TenantLimits
from server.tenants.limits.windows import Windows


@dataclass(slots=True)
class TakenSeat:
    """One seat, and the tokens of its call when they are known."""

    call: TakeSeat
    num_reserved: int = 0
    num_left: int = 0  # new tokens that the call may still generate
    may_overdraw: bool = False

    def count(self, under_way: UnderWay, sign: int) -> None:
        """Add the seat to its tenant's work under way (1), or take it away (-1)."""
        if self.call.kind == "request":
            under_way.num_running += sign * self.call.num_requests
            under_way.num_reserved_tokens += sign * self.num_reserved
        else:
            under_way.num_uploads += sign
            under_way.upload_bytes += sign * self.call.num_bytes


class Ledger:
    """The seats and windows of all tenants. Use it on one event loop.

    Args:
        limits_of: returns a tenant's limits now; raises PeraxisError if they are unknown.
    """

    def __init__(self, limits_of: Callable[[str], TenantLimits]) -> None:
        self._limits_of = limits_of
        self._windows = Windows()
        self._seats: defaultdict[str, dict[int, TakenSeat]] = defaultdict(dict)  # by holder
        self._under_way: defaultdict[str, UnderWay] = defaultdict(UnderWay)  # by tenant
        # Nothing may come between a look at a window and the count that it allows.
        self._lock = asyncio.Lock()

    async def answer(self, holder: str, call: LimitCall) -> LimitAnswer | None:
        """Do what a holder asks and return the answer; None for a GiveBack."""
        async with self._lock:
            if isinstance(call, GiveBack):
                await self._give_back(holder, call)
                return None
            try:
                if isinstance(call, UsageWanted):
                    return await self._usage(call, self._limits_of(call.tenant))
                if isinstance(call, TakeSeat):
                    return await self._take(holder, call, self._limits_of(call.tenant))
                if isinstance(call, AddTokens):
                    return await self._add_tokens(holder, call)
                if isinstance(call, GrowUpload):
                    return self._grow(holder, call)
                return await self._generated(holder, call)
            except PeraxisError as error:
                return LimitsUnknown(call.call_id, error.public)

    def free(self, holder: str) -> None:
        """Free the seats of a holder that has died."""
        for seat in self._seats.pop(holder, {}).values():
            seat.count(self._under_way[seat.call.tenant], -1)

    async def _take(self, holder: str, call: TakeSeat, limits: TenantLimits) -> SeatTaken | SeatRefused:
        under_way, last_minute = self._under_way[call.tenant], await self._last_minute(call.tenant)
        known = self._seats[holder].get(call.call_id)
        num_counted = 0 if known is None else known.call.num_requests
        refusal = refusal_of_seat(call, limits, under_way, last_minute, num_counted)
        if known is not None:
            known.count(under_way, -1)
            del self._seats[holder][call.call_id]
        if refusal is not None:
            rates = rates_of(limits, under_way, last_minute)
            return refused(call.call_id, call.tenant, refusal, limits, rates)
        seat = self._seats[holder][call.call_id] = TakenSeat(call)
        seat.count(under_way, 1)
        if call.kind == "request":
            await self._windows.add(_requests(call.tenant), call.num_requests - num_counted)
            last_minute = await self._last_minute(call.tenant)
        return SeatTaken(call.call_id, rates_of(limits, under_way, last_minute), limits)

    async def _add_tokens(self, holder: str, call: AddTokens) -> LimitAnswer:
        seat = self._seats[holder].get(call.call_id)
        if seat is None:
            return _without_seat(call.call_id)
        tenant, tokens = seat.call.tenant, call.tokens
        limits, under_way = self._limits_of(tenant), self._under_way[tenant]
        last_minute = await self._last_minute(tenant)
        refusal = refusal_of_tokens(tokens, seat.call.num_requests, limits, under_way, last_minute)
        seat.count(under_way, -1)
        if refusal is not None:
            del self._seats[holder][call.call_id]
            rates = rates_of(limits, under_way, last_minute)
            return refused(call.call_id, tenant, refusal, limits, rates)
        seat.num_reserved, seat.num_left = reservation(tokens, limits), tokens.num_new
        seat.may_overdraw = tokens.may_overdraw
        seat.count(under_way, 1)
        await self._windows.add(_tokens(tenant), tokens.num_prompt)
        return TokensAdded(call.call_id, rates_of(limits, under_way, await self._last_minute(tenant)))

    def _grow(self, holder: str, call: GrowUpload) -> LimitAnswer:
        seat = self._seats[holder].get(call.call_id)
        if seat is None:
            return _without_seat(call.call_id)
        under_way = self._under_way[seat.call.tenant]
        seat.count(under_way, -1)
        reserved_bytes = under_way.upload_bytes
        seat.call = msgspec.structs.replace(seat.call, num_bytes=seat.call.num_bytes + call.num_bytes)
        seat.count(under_way, 1)
        return UploadGrown(call.call_id, reserved_bytes)

    async def _generated(self, holder: str, call: TokensGenerated) -> LimitAnswer:
        seat = self._seats[holder].get(call.call_id)
        if seat is None:
            return _without_seat(call.call_id)
        tenant = seat.call.tenant
        under_way = self._under_way[tenant]
        seat.count(under_way, -1)
        seat.num_left = max(0, seat.num_left - call.num_tokens)
        seat.num_reserved = min(seat.num_reserved, seat.num_left)
        seat.count(under_way, 1)
        await self._windows.add(_tokens(tenant), call.num_tokens)
        must_end = is_overdrawn(self._limits_of(tenant), under_way, await self._last_minute(tenant))
        return TokensCounted(call.call_id, must_end and seat.may_overdraw)

    async def _give_back(self, holder: str, call: GiveBack) -> None:
        seat = self._seats.get(holder, {}).pop(call.call_id, None)
        if seat is not None:
            seat.count(self._under_way[seat.call.tenant], -1)
            await self._windows.add(_tokens(seat.call.tenant), call.num_tokens)

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

    async def _last_minute(self, tenant: str) -> LastMinute:
        return LastMinute(
            await self._windows.read(_requests(tenant)), await self._windows.read(_tokens(tenant))
        )


def _without_seat(call_id: int) -> LimitsUnknown:
    return LimitsUnknown(call_id, "the request has no seat any more: send it again")


def _requests(tenant: str) -> str:
    return f"requests/{tenant}"


def _tokens(tenant: str) -> str:
    return f"tokens/{tenant}"
