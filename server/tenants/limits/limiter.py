"""Asks for seats on behalf of one HTTP process. Knows neither HTTP nor how calls reach the process that counts."""

from __future__ import annotations

import asyncio
import itertools
from typing import Protocol

from server.errors import InvalidRequest, QueueFull, RateLimited
from server.protocol.limits import (
    AddTokens,
    GiveBack,
    GrowUpload,
    LimitAnswer,
    LimitQuestion,
    LimitsUnknown,
    Rates,
    SeatRefused,
    SeatTaken,
    TakeSeat,
    Tokens,
    TokensAdded,
    TokensCounted,
    TokensGenerated,
    UploadGrown,
    UsageOfTenant,
    UsageWanted,
)
from server.tenants.limits.tenant_limits import TenantLimits

# Without an answer by then, the work is refused: a tenant must not get past its limits while nothing counts.
ANSWER_S = 2.0
# Generated tokens after which they are counted, or a part of the limit per minute if that is fewer.
COUNT_TOKENS = 64
COUNT_PART = 16
NO_TOKENS = Tokens()


class LedgerLink(Protocol):
    """The way to the ledger: over a control link, or to the one in this process."""

    async def ask(self, call: LimitQuestion) -> LimitAnswer:
        """Return the answer to a call."""

    def tell(self, call: AddTokens | GiveBack) -> None:
        """Send a call without waiting for an answer, behind all that were asked before."""


class Seat:
    """Work of a tenant that counts as under way until `release`.

    Args:
        taken: the ledger's answer; None without limits.
        link: the way to the ledger; None without limits.
        tenant: the owner of the work.
    """

    def __init__(
        self, taken: SeatTaken | None = None, link: LedgerLink | None = None, tenant: str = ""
    ) -> None:
        self.rates = Rates() if taken is None else taken.rates
        self.limits = TenantLimits() if taken is None else taken.limits
        self._taken = taken
        self._link = link
        self._tenant = tenant
        self._num_counted = 0  # generated tokens
        limit = self.limits.tokens_per_minute
        # Below what a call without a length reserves, so that it is ended before it has used more.
        self._count_tokens = None if limit is None else max(1, min(COUNT_TOKENS, limit // COUNT_PART))

    async def need(self, num_requests: int, least: Tokens, length_field: str) -> None:
        """Count the further requests of a call, now that it is known; the seat counts as one until then.

        Args:
            num_requests: prompts; the sequences of one prompt are one request.
            least: the fewest tokens that the requests can need, as far as that is known without a tokenizer.
            length_field: the name in the call of what bounds its new tokens, for errors.

        Raises:
            RateLimited: they do not fit now; the seat is given back.
            InvalidRequest: they exceed a limit by themselves; the seat is given back.
            QueueFull: the ledger does not answer, or the tenant's limits cannot be read.
        """
        if self._link is None or self._taken is None:
            return
        if num_requests == 1 and self.limits.tokens_per_minute is None:
            # All that a limit can refuse has been counted.
            return
        call = TakeSeat(self._taken.call_id, self._tenant, "request", num_requests, least)
        answer = await _ask(self._link, call)
        if isinstance(answer, SeatRefused):
            self._link = None
            raise _refusal(answer, least, length_field)
        assert isinstance(answer, SeatTaken)
        self.rates = answer.rates

    async def add_tokens(self, tokens: Tokens, length_field: str) -> None:
        """Count the tokens of the prompts, and reserve those that the requests may generate until `release`.

        Args:
            length_field: the name in the call of what bounds its new tokens, for errors.

        Raises:
            RateLimited: they do not fit now; the seat is given back.
            InvalidRequest: they exceed a limit by themselves; the seat is given back.
            QueueFull: the ledger does not answer, or the tenant's limits cannot be read.
        """
        if self._link is None or self._taken is None:
            return
        call = AddTokens(self._taken.call_id, tokens)
        if self.limits.tokens_per_minute is None:
            # No limit can refuse them, so nothing waits for the answer.
            self._link.tell(call)
            return
        answer = await _ask(self._link, call)
        if isinstance(answer, SeatRefused):
            self._link = None
            raise _refusal(answer, tokens, length_field)
        assert isinstance(answer, TokensAdded)
        self.rates = answer.rates

    def must_count(self, num_tokens: int) -> bool:
        """Return whether `count_generated` is due, when the sequences have generated `num_tokens`."""
        return (
            self._link is not None
            and self._count_tokens is not None
            and num_tokens - self._num_counted >= self._count_tokens
        )

    async def count_generated(self, num_tokens: int) -> bool:
        """Count the `num_tokens` that the sequences have generated so far. Return whether they may go on.

        Call it again only when it has returned.

        Raises:
            QueueFull: the ledger does not answer, or the tenant's limits cannot be read.
        """
        if self._link is None or self._taken is None:
            return True
        call = TokensGenerated(self._taken.call_id, num_tokens - self._num_counted)
        self._num_counted = num_tokens
        answer = await _ask(self._link, call)
        assert isinstance(answer, TokensCounted)
        return not answer.is_overdrawn

    async def grow(self, num_bytes: int = 0) -> int:
        """Count bytes of an upload that it was not admitted with; return those of the tenant's other uploads.

        Raises:
            QueueFull: the ledger does not answer, or the tenant's limits cannot be read.
        """
        if self._link is None or self._taken is None:
            return 0
        answer = await _ask(self._link, GrowUpload(self._taken.call_id, num_bytes))
        assert isinstance(answer, UploadGrown)
        return answer.reserved_bytes

    def release(self, num_tokens: int = 0) -> None:
        """End the work, whose sequences have generated `num_tokens`; no effect the second time."""
        if self._link is not None and self._taken is not None:
            self._link.tell(GiveBack(self._taken.call_id, num_tokens - self._num_counted))
        self._link = None


class Limiter:
    """The limits of all tenants, as one HTTP process sees them. Event loop only.

    Args:
        link: the way to the ledger; None admits everything and counts nothing.
    """

    def __init__(self, link: LedgerLink | None = None) -> None:
        self._link = link
        self._call_ids = itertools.count()

    async def admit(self, tenant: str, least: Tokens = NO_TOKENS) -> Seat:
        """Count a request of a tenant, before its body is read. Release the seat when it has ended.

        A call for tokens then calls `Seat.need` and `Seat.add_tokens`; one that only uses a tokenizer does not.

        Args:
            least: the fewest tokens that any such call needs.

        Raises:
            RateLimited: the tenant is over a limit.
            InvalidRequest: no such call fits into a limit.
            QueueFull: the ledger does not answer, or the tenant's limits cannot be read.
        """
        return await self._take(
            TakeSeat(next(self._call_ids), tenant, "request", num_requests=1, tokens=least)
        )

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
        answer = await _ask(self._link, UsageWanted(next(self._call_ids), tenant))
        assert isinstance(answer, UsageOfTenant)
        return answer

    async def _take(self, call: TakeSeat) -> Seat:
        if self._link is None:
            return Seat()
        try:
            answer = await _ask(self._link, call)
        except BaseException:
            # The ledger may take the seat later.
            self._link.tell(GiveBack(call.call_id, 0))
            raise
        if isinstance(answer, SeatRefused):
            raise _refusal(answer, call.tokens, "prompt")
        assert isinstance(answer, SeatTaken)
        return Seat(answer, self._link, call.tenant)


async def _ask(link: LedgerLink, call: LimitQuestion) -> LimitAnswer:
    try:
        # Not `wait_for`, whose task would let a later `tell` go first.
        async with asyncio.timeout(ANSWER_S):
            answer = await link.ask(call)
    except TimeoutError:
        raise QueueFull("the server cannot count the tenant's limits now: try again in a moment") from None
    if isinstance(answer, LimitsUnknown):
        raise QueueFull(answer.message)
    return answer


def _refusal(refused: SeatRefused, tokens: Tokens, length_field: str) -> RateLimited | InvalidRequest:
    """Return the error of a call that a limit keeps out, or that exceeds it by itself."""
    if refused.retry_after_s is not None:
        return RateLimited(
            refused.message, refused.limit, retry_after_s=refused.retry_after_s, rates=refused.rates
        )
    limit = refused.rates.tokens
    is_bounded = refused.limit == "tokens_per_minute" and not tokens.may_overdraw
    if not is_bounded or limit is None or tokens.num_prompt >= limit.limit:
        return InvalidRequest(refused.message, "prompt")
    return InvalidRequest(
        f"{refused.message}, or lower {length_field}: the call may generate {tokens.num_new} tokens",
        length_field,
    )
