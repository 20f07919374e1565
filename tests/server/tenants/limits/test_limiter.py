"""An HTTP process asks for seats: what it does with each answer, and without one."""

from __future__ import annotations

import asyncio
from unittest import mock

import pytest

from server.errors import InvalidRequest, QueueFull, RateLimited
from server.protocol.limits import (
    AddTokens,
    GiveBack,
    LimitAnswer,
    LimitQuestion,
    LimitsUnknown,
    Rate,
    Rates,
    SeatRefused,
    SeatTaken,
    Tokens,
)
from server.tenants.limits import limiter as limiter_module
from server.tenants.limits.ledger import Ledger
from server.tenants.limits.limiter import Limiter, Seat
from server.tenants.limits.local_link import LocalLink
from server.tenants.limits.tenant_limits import TenantLimits


class SilentLink:
    """A link whose other end never answers, as a supervisor that hangs."""

    def __init__(self) -> None:
        self.asked: list[LimitQuestion] = []
        self.told: list[AddTokens | GiveBack] = []

    async def ask(self, call: LimitQuestion) -> LimitAnswer:
        self.asked.append(call)
        await asyncio.Event().wait()
        raise AssertionError

    def tell(self, call: AddTokens | GiveBack) -> None:
        self.told.append(call)


class AnsweringLink:
    """A link whose other end has one answer."""

    def __init__(self, answer: LimitAnswer) -> None:
        self._answer = answer

    async def ask(self, call: LimitQuestion) -> LimitAnswer:
        return self._answer

    def tell(self, call: AddTokens | GiveBack) -> None:
        """An answer without a seat needs none of it back."""


def test_without_an_answer_the_request_is_refused_and_its_seat_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limiter_module, "ANSWER_S", 0.01)

    async def main() -> None:
        link = SilentLink()
        with pytest.raises(QueueFull, match="cannot count"):
            await Limiter(link).admit("a")
        assert link.told == [GiveBack(link.asked[0].call_id, 0)]

    asyncio.run(main())


def test_a_client_that_leaves_while_its_request_waits_for_a_seat_gives_it_back() -> None:
    async def main() -> None:
        link = SilentLink()
        asking = asyncio.create_task(Limiter(link).admit("a"))
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
            await Limiter(AnsweringLink(refused)).admit("a")
        error = caught.value
        assert (error.param, error.retry_after_s, error.rates) == ("requests_per_minute", 17, rates)

    asyncio.run(main())


def test_a_request_that_never_fits_is_invalid() -> None:
    async def main() -> None:
        refused = SeatRefused(0, Rates(), "tokens_per_minute", "too large", None)
        with pytest.raises(InvalidRequest, match="too large"):
            await Limiter(AnsweringLink(refused)).admit("a")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("tokens", "param"),
    [(Tokens(99, 2), "max_tokens"), (Tokens(100, 2), "prompt"), (Tokens(100, 2, True), "prompt")],
)
def test_a_call_that_may_generate_more_than_the_limit_names_what_to_lower(tokens: Tokens, param: str) -> None:
    """Before its prompts are tokenized and afterwards. One without a length names no length."""

    async def main() -> None:
        limiter = Limiter(LocalLink(Ledger(lambda tenant: TenantLimits(tokens_per_minute=100))))
        seat = await limiter.admit("a")
        with pytest.raises(InvalidRequest, match="100 tokens per minute") as caught:
            await seat.need(1, tokens, "max_tokens")
        assert caught.value.param == param
        seat = await limiter.admit("a")
        with pytest.raises(InvalidRequest, match="100 tokens per minute") as caught:
            await seat.add_tokens(tokens, "max_tokens")
        assert caught.value.param == param
        seat = await limiter.admit("a")
        await seat.add_tokens(Tokens(98, 2), "max_tokens")
        assert seat.rates.tokens == Rate(100, 0, mock.ANY)

    asyncio.run(main())


def test_a_call_counts_as_one_request_until_its_prompts_are_known() -> None:
    async def main() -> None:
        limiter = Limiter(
            LocalLink(Ledger(lambda tenant: TenantLimits(requests_per_minute=5, max_running=4)))
        )
        first, second, third = [await limiter.admit("a") for _ in range(3)]
        await first.need(2, Tokens(), "max_tokens")
        with pytest.raises(RateLimited) as caught:
            await second.need(2, Tokens(), "max_tokens")
        assert caught.value.param == "max_running"
        with pytest.raises(InvalidRequest, match="this call alone is more"):
            await third.need(6, Tokens(), "max_tokens")
        usage = await limiter.usage("a")
        assert usage is not None
        assert (usage.num_requests, usage.num_running) == (4, 2)
        fourth = await limiter.admit("a")
        with pytest.raises(RateLimited) as caught:
            await fourth.need(2, Tokens(), "max_tokens")
        assert caught.value.param == "requests_per_minute"
        first.release()
        await asyncio.sleep(0)
        usage = await limiter.usage("a")
        assert usage is not None
        assert (usage.num_requests, usage.num_running) == (5, 0)

    asyncio.run(main())


def test_tokens_without_a_limit_are_counted_without_waiting_for_the_ledger() -> None:
    async def main() -> None:
        link = SilentLink()
        seat = Seat(SeatTaken(7, Rates(), TenantLimits(max_running=1)), link)
        await seat.add_tokens(Tokens(5, 3), "max_tokens")
        seat.release(2)
        assert (link.asked, link.told) == ([], [AddTokens(7, Tokens(5, 3)), GiveBack(7, 2)])

    asyncio.run(main())


def test_a_seat_whose_tokens_are_refused_is_given_back_by_the_ledger() -> None:
    async def main() -> None:
        limiter = Limiter(LocalLink(Ledger(lambda tenant: TenantLimits(tokens_per_minute=9, max_running=1))))
        await (await limiter.admit("b")).add_tokens(Tokens(9), "max_tokens")
        first = await limiter.admit("a")
        await first.add_tokens(Tokens(5), "max_tokens")
        first.release(3)
        await asyncio.sleep(0)
        seat = await limiter.admit("a")
        with pytest.raises(RateLimited, match="9 tokens per minute") as caught:
            await seat.add_tokens(Tokens(2), "max_tokens")
        assert caught.value.param == "tokens_per_minute"
        # Before it is released.
        usage = await limiter.usage("a")
        assert usage is not None
        assert (usage.num_running, usage.num_requests, usage.num_tokens) == (0, 2, 8)
        seat.release()

    asyncio.run(main())


def test_generated_tokens_are_counted_once() -> None:
    async def main() -> None:
        limiter = Limiter(LocalLink(Ledger(lambda tenant: TenantLimits(tokens_per_minute=64))))
        seat = await limiter.admit("a")
        await seat.add_tokens(Tokens(10, 1000, True), "max_tokens")
        assert [seat.must_count(number) for number in (3, 4, 5)] == [False, True, True]
        assert await seat.count_generated(5)
        assert [seat.must_count(number) for number in (5, 8, 9)] == [False, False, True]
        # With 16 reserved, more than twice the limit.
        assert not await seat.count_generated(103)
        seat.release(110)
        assert not seat.must_count(200)
        await asyncio.sleep(0)
        usage = await limiter.usage("a")
        assert usage is not None
        assert (usage.num_tokens, usage.num_running) == (120, 0)

    asyncio.run(main())


def test_without_a_limit_of_tokens_they_are_counted_at_the_end() -> None:
    seat = Seat(SeatTaken(7, Rates(), TenantLimits(max_running=1)), SilentLink())
    assert not seat.must_count(10**6)


def test_a_count_is_sent_before_a_release_that_follows_it() -> None:
    async def main() -> None:
        ledger = Ledger(lambda tenant: TenantLimits(tokens_per_minute=64))
        seat = await Limiter(LocalLink(ledger)).admit("a")
        counting = asyncio.create_task(seat.count_generated(5))
        await asyncio.sleep(0)
        seat.release(6)
        await counting
        await asyncio.sleep(0)
        usage = await Limiter(LocalLink(ledger)).usage("a")
        assert usage is not None
        assert usage.num_tokens == 6

    asyncio.run(main())


def test_tokens_that_the_ledger_does_not_count_in_time_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limiter_module, "ANSWER_S", 0.01)

    async def main() -> None:
        link = SilentLink()
        seat = Seat(SeatTaken(7, Rates(), TenantLimits(tokens_per_minute=1)), link)
        with pytest.raises(QueueFull, match="cannot count"):
            await seat.add_tokens(Tokens(1), "max_tokens")
        seat.release()
        assert link.told == [GiveBack(7, 0)]

    asyncio.run(main())


def test_limits_that_cannot_be_read_refuse_the_request() -> None:
    async def main() -> None:
        with pytest.raises(QueueFull, match="damaged"):
            await Limiter(AnsweringLink(LimitsUnknown(0, "damaged"))).admit("a")

    asyncio.run(main())


def test_without_a_ledger_everything_is_admitted_and_nothing_is_known() -> None:
    async def main() -> None:
        limiter = Limiter()
        seat = await limiter.admit("a")
        await seat.need(10**6, Tokens(), "max_tokens")
        await seat.add_tokens(Tokens(10**9, 10**9), "max_tokens")
        seat.release(10**9)
        assert (seat.rates, seat.limits) == (Rates(), TenantLimits())
        assert await limiter.usage("a") is None

    asyncio.run(main())


def test_a_seat_of_the_ledger_in_this_process_is_released_once() -> None:
    async def main() -> None:
        limiter = Limiter(LocalLink(Ledger(lambda tenant: TenantLimits(max_running=1))))
        seat = await limiter.admit("a")
        await seat.add_tokens(Tokens(5), "max_tokens")
        with pytest.raises(RateLimited):
            await limiter.admit("a")
        seat.release(3)
        seat.release(3)
        await asyncio.sleep(0)
        usage = await limiter.usage("a")
        assert usage is not None
        assert (usage.num_running, usage.num_tokens) == (0, 8)

    asyncio.run(main())
