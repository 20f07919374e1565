"""Asks for the admission of tenants' work on behalf of one HTTP process, and counts what the work uses."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable
from typing import TypeVar

from server.errors import InvalidRequest, QueueFull, RateLimited
from server.shared_state import SharedState
from server.tenants.tenant import Admitted, Rates, Refused, TenantLimits, Usage

# Without an answer by then, the work is refused: a tenant must not get past its limits while nothing counts.
ANSWER_S = 2.0
# Tokens that are counted together, or a part of the limit per minute if that is fewer.
COUNT_TOKENS = 64
COUNT_PART = 16

T = TypeVar("T")


class Admission:
    """Work of a tenant that counts as under way until `release`. Without a shared state, nothing counts."""

    def __init__(
        self,
        shared: SharedState | None = None,
        process: str = "",
        work_id: int = 0,
        tenant: str = "",
        admitted: Admitted | None = None,
    ) -> None:
        self.rates = Rates() if admitted is None else admitted.rates
        self.limits = TenantLimits() if admitted is None else admitted.limits
        self._shared = shared
        self._process = process
        self._id = work_id
        self._tenant = tenant
        self._num_tokens = 0  # that are not counted yet
        limit = self.limits.tokens_per_minute
        self._slice = COUNT_TOKENS if limit is None else max(1, min(COUNT_TOKENS, limit // COUNT_PART))

    async def need(self, num_requests: int) -> None:
        """Count the further requests of a call, which counted as one until its body was read.

        Raises:
            RateLimited: they do not fit now; the work is released.
            InvalidRequest: they exceed a limit by themselves; the work is released.
            QueueFull: they cannot be counted.
        """
        if self._shared is None or num_requests == 1:
            return
        answer = await _in_time(
            self._shared.admit_requests(self._process, self._id, self._tenant, num_requests)
        )
        if isinstance(answer, Refused):
            self._shared = None
            raise _refusal(answer)
        self.rates = answer.rates

    async def grow(self, num_bytes: int = 0) -> int:
        """Count bytes of an upload that it was not admitted with; return those of the tenant's other uploads.

        Raises:
            QueueFull: they cannot be counted.
        """
        if self._shared is None:
            return 0
        return await _in_time(self._shared.grow_upload(self._process, self._id, num_bytes))

    def count(self, num_tokens: int) -> None:
        """Count tokens of the prompts or outputs, a slice of them at a time."""
        self._num_tokens += num_tokens
        if self._num_tokens >= self._slice:
            self._send_count()

    def release(self) -> None:
        """End the work, and count what is left; no effect the second time."""
        if self._shared is not None:
            self._send_count()
            self._shared.release(self._process, self._id)
        self._shared = None

    def _send_count(self) -> None:
        if self._shared is not None and self._num_tokens:
            self._shared.count_tokens(self._tenant, self._num_tokens)
        self._num_tokens = 0


class Admissions:
    """The admission of all tenants' work to one HTTP process. Event loop only.

    Args:
        shared: the shared state, which counts; None admits everything and counts nothing.
        process: the identity of this HTTP process.
    """

    def __init__(self, shared: SharedState | None = None, process: str = "") -> None:
        self._shared = shared
        self._process = process
        self._ids = itertools.count()

    async def admit(self, tenant: str) -> Admission:
        """Count a request of a tenant, before its body is read. Release it when it has ended.

        Raises:
            RateLimited: the tenant is over a limit.
            QueueFull: it cannot be counted, or the tenant's limits cannot be read.
        """
        if self._shared is None:
            return Admission()
        work_id = next(self._ids)
        return await self._admit(
            tenant, work_id, self._shared.admit_requests(self._process, work_id, tenant, 1)
        )

    async def admit_upload(self, tenant: str, num_bytes: int) -> Admission:
        """Count an upload of a tenant. Release it when it is published or has failed.

        Raises:
            RateLimited: the tenant has `max_uploads` under way.
            QueueFull: it cannot be counted, or the tenant's limits cannot be read.
        """
        if self._shared is None:
            return Admission()
        work_id = next(self._ids)
        admitting = self._shared.admit_upload(self._process, work_id, tenant, num_bytes)
        return await self._admit(tenant, work_id, admitting)

    async def usage(self, tenant: str) -> Usage | None:
        """Return a tenant's limits and usage; None without limits.

        Raises:
            QueueFull: nothing answers, or the tenant's limits cannot be read.
        """
        return None if self._shared is None else await _in_time(self._shared.usage(tenant))

    async def _admit(self, tenant: str, work_id: int, answer: Awaitable[Admitted | Refused]) -> Admission:
        assert self._shared is not None
        try:
            admitted = await _in_time(answer)
        except BaseException:
            # It may be admitted later.
            self._shared.release(self._process, work_id)
            raise
        if isinstance(admitted, Refused):
            raise _refusal(admitted)
        return Admission(self._shared, self._process, work_id, tenant, admitted)


async def _in_time(answer: Awaitable[T]) -> T:
    try:
        # Not `wait_for`, whose task would let a later call go first.
        async with asyncio.timeout(ANSWER_S):
            return await answer
    except TimeoutError:
        raise QueueFull("the server cannot count the tenant's limits now: try again in a moment") from None


def _refusal(refused: Refused) -> RateLimited | InvalidRequest:
    """Return the error of work that a limit keeps out, or that exceeds it by itself."""
    if refused.retry_after_s is None:
        return InvalidRequest(refused.message, "prompt")
    return RateLimited(
        refused.message, refused.limit, retry_after_s=refused.retry_after_s, rates=refused.rates
    )
