"""An HTTP process asks for seats: what it does with each answer, and without one."""

from __future__ import annotations

import asyncio
from unittest import mock

import pytest

from server.errors import InvalidRequest, QueueFull, RateLimited
from server.protocol.limits import (
    GiveBack,
    LimitAnswer,
    LimitsUnknown,
    Rate,
    Rates,
    SeatRefused,
    TakeSeat,
    UsageWanted,
)
from server.tenants.limits import limiter as limiter_module
from server.tenants.limits.ledger import Ledger
from server.tenants.limits.limiter import Limiter
from server.tenants.limits.local_link import LocalLink
from server.tenants.limits.tenant_limits import TenantLimits


class SilentLink:
    """A link whose other end never answers, as a supervisor that hangs."""

    def __init__(self) -> None:
        self.asked: list[TakeSeat | UsageWanted] = []
        self.told: list[GiveBack] = []

    async def ask(self, call: TakeSeat | UsageWanted) -> LimitAnswer:
        self.asked.append(call)
        await asyncio.Event().wait()
        raise AssertionError

    def tell(self, call: GiveBack) -> None:
        self.told.append(call)


class AnsweringLink:
    """A link whose other end has one answer."""

    def __init__(self, answer: LimitAnswer) -> None:
        self._answer = answer

    async def ask(self, call: TakeSeat | UsageWanted) -> LimitAnswer:
        return self._answer

    def tell(self, call: GiveBack) -> None:
        """An answer without a seat needs none of it back."""


def test_without_an_answer_the_request_is_refused_and_its_seat_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limiter_module, "ANSWER_S", 0.01)

    async def main() -> None:
        link = SilentLink()
        with pytest.raises(QueueFull, match="cannot count"):
            await Limiter(link).admit("a", 1, 5, 0, "max_tokens")
        assert link.told == [GiveBack(link.asked[0].call_id, 0)]

    asyncio.run(main())


def test_a_client_that_leaves_while_its_request_waits_for_a_seat_gives_it_back() -> None:
    async def main() -> None:
        link = SilentLink()
        asking = asyncio.create_task(Limiter(link).admit("a", 1, 5, 0, "max_tokens"))
        while not link.asked:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert link.told == [GiveBack(link.asked[0].call_id, 0)]

    asyncio.run(main())


def test_a_refusal_is_the_error_that_names_its_limit_and_its_wait() -> None:
    async def main() -> None:
        rates = Rates(requests=Rate(1, 0, 60.0))
        refused = SeatRefused(0, rates, "requests_per_minute", "too many", 17)
        with pytest.raises(RateLimited, match="too many") as caught:
            await Limiter(AnsweringLink(refused)).admit("a", 1, 5, 0, "max_tokens")
        error = caught.value
        assert (error.param, error.retry_after_s, error.rates) == ("requests_per_minute", 17, rates)

    asyncio.run(main())


def test_a_request_that_never_fits_is_invalid() -> None:
    async def main() -> None:
        refused = SeatRefused(0, Rates(), "tokens_per_minute", "too large", None)
        with pytest.raises(InvalidRequest, match="too large"):
            await Limiter(AnsweringLink(refused)).admit("a", 1, 5, 0, "max_tokens")

    asyncio.run(main())


@pytest.mark.parametrize(("num_prompt", "param"), [(99, "max_tokens"), (100, "prompt")])
def test_a_call_that_may_generate_more_than_the_limit_names_what_to_lower(
    num_prompt: int, param: str
) -> None:
    async def main() -> None:
        limiter = Limiter(LocalLink(Ledger(lambda tenant: TenantLimits(tokens_per_minute=100))))
        with pytest.raises(InvalidRequest, match="100 tokens per minute") as caught:
            await limiter.admit("a", 1, num_prompt, 2, "max_tokens")
        assert caught.value.param == param
        assert (await limiter.admit("a", 1, 98, 2, "max_tokens")).rates.tokens == Rate(100, 0, mock.ANY)

    asyncio.run(main())


def test_limits_that_cannot_be_read_refuse_the_request() -> None:
    async def main() -> None:
        with pytest.raises(QueueFull, match="damaged"):
            await Limiter(AnsweringLink(LimitsUnknown(0, "damaged"))).admit("a", 1, 5, 0, "max_tokens")

    asyncio.run(main())


def test_without_a_ledger_everything_is_admitted_and_nothing_is_known() -> None:
    async def main() -> None:
        limiter = Limiter()
        seat = await limiter.admit("a", 10**6, 10**9, 10**9, "max_tokens")
        seat.release(10**9)
        assert (seat.rates, seat.limits) == (Rates(), TenantLimits())
        assert await limiter.usage("a") is None

    asyncio.run(main())


def test_a_seat_of_the_ledger_in_this_process_is_released_once() -> None:
    async def main() -> None:
        limiter = Limiter(LocalLink(Ledger(lambda tenant: TenantLimits(max_running=1))))
        seat = await limiter.admit("a", 1, 5, 0, "max_tokens")
        with pytest.raises(RateLimited):
            await limiter.admit("a", 1, 5, 0, "max_tokens")
        seat.release(3)
        seat.release(3)
        await asyncio.sleep(0)
        usage = await limiter.usage("a")
        assert usage is not None
        assert (usage.num_running, usage.num_tokens) == (0, 8)

    asyncio.run(main())
