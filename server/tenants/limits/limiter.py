"""Asks for seats on behalf of one HTTP process. Knows neither HTTP nor how calls reach the process that counts."""

from __future__ import annotations

import asyncio
import itertools
from typing import Protocol

from server.errors import InvalidRequest, QueueFull, RateLimited
from server.protocol.limits import (
    GiveBack,
    LimitAnswer,
    LimitsUnknown,
    Rates,
    SeatRefused,
    SeatTaken,
    TakeSeat,
    UsageOfTenant,
    UsageWanted,
)
from server.tenants.limits.tenant_limits import TenantLimits

# Without an answer by then, the work is refused: a tenant must not get past its limits while nothing counts.
ANSWER_S = 2.0


class LedgerLink(Protocol):
    """The way to the ledger: over a control link, or to the one in this process."""

    async def ask(self, call: TakeSeat | UsageWanted) -> LimitAnswer:
        """Return the answer to a call."""

    def tell(self, call: GiveBack) -> None:
        """Send a call that has no answer, behind all that were asked before."""


class Seat:
    """Work of a tenant that counts as under way until `release`.

    Args:
        taken: the ledger's answer; None without limits.
        link: the way to the ledger; None without limits.
    """

    def __init__(self, taken: SeatTaken | None = None, link: LedgerLink | None = None) -> None:
        self.rates = Rates() if taken is None else taken.rates
        self.limits = TenantLimits() if taken is None else taken.limits
        self.reserved_bytes = 0 if taken is None else taken.reserved_bytes
        self._taken = taken
        self._link = link

    def release(self, num_tokens: int = 0) -> None:
        """End the work, whose sequences have generated `num_tokens`; no effect the second time."""
        if self._link is not None and self._taken is not None:
            self._link.tell(GiveBack(self._taken.call_id, num_tokens))
        self._link = None


class Limiter:
    """The limits of all tenants, as one HTTP process sees them. Event loop only.

    Args:
        link: the way to the ledger; None admits everything and counts nothing.
    """

    def __init__(self, link: LedgerLink | None = None) -> None:
        self._link = link
        self._call_ids = itertools.count()

    async def admit(
        self, tenant: str, num_requests: int, num_prompt_tokens: int, num_new_tokens: int, length_field: str
    ) -> Seat:
        """Count requests of a tenant and the tokens of their prompts, and reserve those they may generate.

        Release the seat when they have ended.

        Args:
            num_requests: prompts; the sequences of one prompt are one request.
            num_prompt_tokens: of all prompts together.
            num_new_tokens: the most that all sequences together may generate.
            length_field: the name in the call of what bounds `num_new_tokens`, for errors.

        Raises:
            RateLimited: the tenant is over a limit.
            InvalidRequest: the requests exceed a limit by themselves.
            QueueFull: the ledger does not answer, or the tenant's limits cannot be read.
        """
        call = TakeSeat(
            next(self._call_ids),
            tenant,
            "request",
            num_requests=num_requests,
            num_tokens=num_prompt_tokens,
            num_new_tokens=num_new_tokens,
        )
        return await self._take(call, length_field)

    async def admit_text(self, tenant: str) -> Seat:
        """Count a request that uses a tokenizer and not the engine. Release the seat when it has ended.

        Raises:
            RateLimited: the tenant is over a limit.
            QueueFull: the ledger does not answer, or the tenant's limits cannot be read.
        """
        return await self._take(TakeSeat(next(self._call_ids), tenant, "request", num_requests=1))

    async def admit_upload(self, tenant: str, size_bytes: int) -> Seat:
        """Count an upload of a tenant. Release the seat when it is published or has failed.

        Raises:
            RateLimited: the tenant has `max_uploads` under way.
            QueueFull: the ledger does not answer, or the tenant's limits cannot be read.
        """
        return await self._take(TakeSeat(next(self._call_ids), tenant, "upload", num_bytes=size_bytes))

    async def usage(self, tenant: str) -> UsageOfTenant | None:
        """Return a tenant's limits and usage; None without limits.

        Raises:
            QueueFull: the ledger does not answer, or the tenant's limits cannot be read.
        """
        if self._link is None:
            return None
        answer = await self._ask(self._link, UsageWanted(next(self._call_ids), tenant))
        assert isinstance(answer, UsageOfTenant)
        return answer

    async def _take(self, call: TakeSeat, length_field: str = "") -> Seat:
        if self._link is None:
            return Seat()
        try:
            answer = await self._ask(self._link, call)
        except BaseException:
            # The ledger may take the seat later.
            self._link.tell(GiveBack(call.call_id, 0))
            raise
        if isinstance(answer, SeatRefused):
            if answer.retry_after_s is None:
                raise _too_large(answer, call, length_field)
            raise RateLimited(
                answer.message, answer.limit, retry_after_s=answer.retry_after_s, rates=answer.rates
            )
        assert isinstance(answer, SeatTaken)
        return Seat(answer, self._link)

    async def _ask(self, link: LedgerLink, call: TakeSeat | UsageWanted) -> LimitAnswer:
        try:
            answer = await asyncio.wait_for(link.ask(call), ANSWER_S)
        except TimeoutError:
            raise QueueFull(
                "the server cannot count the tenant's limits now: try again in a moment"
            ) from None
        if isinstance(answer, LimitsUnknown):
            raise QueueFull(answer.message)
        return answer


def _too_large(refused: SeatRefused, call: TakeSeat, length_field: str) -> InvalidRequest:
    """Return the error of a call that exceeds a limit by itself."""
    limit = refused.rates.tokens
    if refused.limit != "tokens_per_minute" or limit is None or call.num_tokens >= limit.limit:
        return InvalidRequest(refused.message, "prompt")
    message = (
        f"{refused.message}, or lower {length_field} ({call.num_tokens} prompt tokens and up to "
        f"{call.num_new_tokens} new ones)"
    )
    return InvalidRequest(message, length_field)
