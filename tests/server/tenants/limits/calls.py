"""Calls that a ledger is asked for, as clients make them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from server.protocol.limits import (
    AddTokens,
    SeatRefused,
    SeatTaken,
    TakeSeat,
    Tokens,
    TokensAdded,
    UsageOfTenant,
    UsageWanted,
)
from server.tenants.limits.ledger import Ledger
from server.tenants.limits.tenant_limits import TenantLimits


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def ledger_of(limits: TenantLimits) -> Ledger:
    return Ledger(lambda tenant: limits)


@dataclass(frozen=True, slots=True)
class Call:
    """A call as a client makes it: it takes its seat, and adds its tokens when they are known."""

    seat: TakeSeat
    tokens: Tokens


async def take(ledger: Ledger, call: Call, holder: str = "http-1") -> SeatTaken | TokensAdded | SeatRefused:
    answer = await ledger.answer(holder, call.seat)
    if isinstance(answer, SeatTaken):
        answer = await ledger.answer(holder, AddTokens(call.seat.call_id, call.tokens))
    assert isinstance(answer, TokensAdded | SeatRefused)
    return answer


def is_admitted(answer: SeatTaken | TokensAdded | SeatRefused) -> bool:
    return not isinstance(answer, SeatRefused)


async def usage(ledger: Ledger, tenant: str = "a") -> UsageOfTenant:
    answer = await ledger.answer("http-1", UsageWanted(0, tenant))
    assert isinstance(answer, UsageOfTenant)
    return answer


def request(
    call_id: int, num_tokens: int = 1, tenant: str = "a", num_requests: int = 1, num_new: int = 0
) -> Call:
    return Call(TakeSeat(call_id, tenant, "request", num_requests=num_requests), Tokens(num_tokens, num_new))


def chat(call_id: int, num_tokens: int, num_new: int) -> Call:
    """A call without a length, which may generate `num_new` tokens."""
    return Call(TakeSeat(call_id, "a", "request", num_requests=1), Tokens(num_tokens, num_new, True))
