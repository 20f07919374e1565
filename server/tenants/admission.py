"""Asks for the admission of tenants' work on behalf of one HTTP process, and counts what the work uses.

While the engine refuses a tenant's requests, few further ones are read.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from server.errors import InvalidRequest, QueueFull, RateLimited
from server.fairness import FairBudget
from server.shared_state import SharedState
from server.tenants.tenant import Admitted, Rates, Refused, TenantLimits, Usage

# Without an answer by then, the work is refused: a tenant must not get past its limits while nothing counts.
ANSWER_S = 2.0
# Tokens that are counted together, or a part of the limit per minute if that is fewer.
COUNT_TOKENS = 64
COUNT_PART = 16
# So long after the engine refused a request, further ones of the tenant begin as others end. Meanwhile one more begins
# each `TRY_S`, and one that has waited for `WAIT_S` is refused.
CLOSED_S, TRY_S, WAIT_S = 10.0, 0.1, 10.0
# Requests of a tenant in a second that may end before the engine has answered; more count as refused.
MAX_VAIN = 10
# Requests of all tenants that wait so. Each may keep some 300 KB of its body, also when its client has left.
MAX_WAITING = 512

# How a request ended: answered by the engine, refused by it, or before either.
Ending = Literal["answered", "refused", "vain"]
T = TypeVar("T")


@dataclass(slots=True)
class _Window:
    """The requests of one tenant that have begun, and those that wait until they may."""

    num_open: int = 0
    max_open: int = 0  # while it is closed
    # By the event loop's clock. Each vain request adds a part of a second to the second.
    closed_until: float = -math.inf
    vain_until: float = -math.inf
    is_ticking: bool = False
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class RequestWindows:
    """Lets a tenant's requests to the engine begin: after one was refused, as many at a time as it has taken.

    A request is parsed, tokenized and sent to the engine before that refuses it, which takes some milliseconds of
    several processes. Clients on hundreds of connections that ask again at once would take a core from everybody's
    tokens, so they wait before their bodies are read. So do those that leave before they have an answer, again and
    again. The number grows by one each `TRY_S` and falls with each refusal, as the congestion windows of TCP do.
    """

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}
        self._places = FairBudget(MAX_WAITING, "requests of refused tenants that wait")

    async def enter(self, tenant: str) -> None:
        """Wait until a request may begin; `leave` must follow when it has ended.

        Raises:
            QueueFull: it has waited for `WAIT_S`, or too many of the tenant wait.
        """
        window = self._windows.setdefault(tenant, _Window())
        if not window.waiting and _has_room(window):
            window.num_open += 1
            return
        with self._places.holding(tenant, 1):
            await self._wait(tenant, window)

    async def _wait(self, tenant: str, window: _Window) -> None:
        turn = asyncio.get_running_loop().create_future()
        window.waiting.append(turn)
        try:
            async with asyncio.timeout(WAIT_S):
                await turn
        except BaseException as error:
            if turn in window.waiting:
                window.waiting.remove(turn)
            else:
                self.leave(tenant, "answered")
            if isinstance(error, TimeoutError):
                raise QueueFull(
                    "the tenant has as many requests that run or wait as the server takes: try again in a moment"
                ) from None
            raise

    def leave(self, tenant: str, ending: Ending) -> None:
        """Note that a request has ended."""
        window, now = self._windows[tenant], _now()
        window.num_open -= 1
        if ending == "vain":
            # At most one more than a second's: no tenant pays for long for what was vain before.
            window.vain_until = min(max(window.vain_until, now), now + 1) + 1 / MAX_VAIN
        if ending == "refused" or (ending == "vain" and window.vain_until > now + 1):
            window.max_open, window.closed_until = window.num_open, now + CLOSED_S
        if ending != "answered" and not window.is_ticking:
            self._tick_later(tenant, window)
        self._serve(tenant, window)

    def _serve(self, tenant: str, window: _Window) -> None:
        """Let the next request begin, if there is room; the one after it in the next turn of the event loop."""
        if window.waiting and _has_room(window):
            turn = window.waiting.popleft()
            # One that is done was cancelled in this turn of the loop; its task leaves.
            window.num_open += 1
            if not turn.done():
                turn.set_result(None)
            asyncio.get_running_loop().call_soon(self._serve, tenant, window)
        elif not window.num_open and not window.is_ticking and self._windows.get(tenant) is window:
            del self._windows[tenant]

    def _tick_later(self, tenant: str, window: _Window) -> None:
        window.is_ticking = True
        asyncio.get_running_loop().call_later(TRY_S, self._tick, tenant, window)

    def _tick(self, tenant: str, window: _Window) -> None:
        """Let one more of the requests that wait begin, or all when none was refused for long."""
        window.is_ticking = False
        if window.waiting:
            window.max_open += 1
        if _now() < max(window.closed_until, window.vain_until):
            self._tick_later(tenant, window)
        self._serve(tenant, window)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _has_room(window: _Window) -> bool:
    return _now() >= window.closed_until or window.num_open < window.max_open


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
        self.windows: RequestWindows | None = None  # of which the work has a place
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

    def release(self, ending: Ending = "answered") -> None:
        """End the work, and count what is left; no effect the second time."""
        if self._shared is not None:
            self._send_count()
            self._shared.release(self._process, self._id)
        self._shared = None
        if self.windows is not None:
            self.windows.leave(self._tenant, ending)
        self.windows = None

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
        self._windows = RequestWindows()
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

    async def admit_to_engine(self, tenant: str) -> Admission:
        """Count a request that the engine may refuse, as `admit` does; it may wait first for others of the tenant.

        Raises:
            RateLimited, QueueFull: as `admit`, or it has waited for `WAIT_S`.
        """
        if self._shared is None:
            return Admission()
        await self._windows.enter(tenant)
        try:
            admission = await self.admit(tenant)
        except BaseException:
            self._windows.leave(tenant, "answered")
            raise
        admission.windows = self._windows
        return admission

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
