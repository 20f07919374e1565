"""The ledger admits what limits allow, and every seat that is given back or freed is free again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import QueueFull
from server.protocol.limits import (
    GiveBack,
    LimitsUnknown,
    SeatRefused,
    SeatTaken,
    TakeSeat,
    UsageOfTenant,
    UsageWanted,
)
from server.tenants.limits.ledger import Ledger
from server.tenants.limits.tenant_limits import TenantLimits
from tests.server.tenants.limits.clock import Clock, fake_clock

NONE = TenantLimits()


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def ledger_of(limits: TenantLimits) -> Ledger:
    return Ledger(lambda tenant: limits)


async def take(ledger: Ledger, call: TakeSeat, holder: str = "http-1") -> SeatTaken | SeatRefused:
    answer = await ledger.answer(holder, call)
    assert isinstance(answer, SeatTaken | SeatRefused)
    return answer


async def usage(ledger: Ledger, tenant: str = "a") -> UsageOfTenant:
    answer = await ledger.answer("http-1", UsageWanted(0, tenant))
    assert isinstance(answer, UsageOfTenant)
    return answer


def request(
    call_id: int, num_tokens: int = 1, tenant: str = "a", num_requests: int = 1, num_new: int = 0
) -> TakeSeat:
    return TakeSeat(
        call_id,
        tenant,
        "request",
        num_requests=num_requests,
        num_tokens=num_tokens,
        num_new_tokens=num_new,
    )


def upload(call_id: int, num_bytes: int = 0) -> TakeSeat:
    return TakeSeat(call_id, "a", "upload", num_bytes=num_bytes)


HOLDERS = st.sampled_from(["p", "q"])
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("take"), HOLDERS, st.sampled_from(["a", "b"]), st.integers(1, 3), st.integers(0, 20)
        ),
        st.tuples(st.just("give_back"), HOLDERS, st.just(""), st.integers(0, 30), st.integers(0, 20)),
        st.tuples(st.just("free"), HOLDERS, st.just(""), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@given(steps=STEPS, max_running=st.integers(1, 4))
def test_seats_and_tokens_are_those_of_a_plain_model(
    steps: Sequence[tuple[str, str, str, int, int]], max_running: int
) -> None:
    """Within one moment nothing expires, so the ledger's figures are sums over what was done."""

    async def main() -> None:
        ledger = ledger_of(TenantLimits(max_running=max_running))
        held: dict[tuple[str, int], tuple[str, int]] = {}
        tokens: Counter[str] = Counter()
        for number, (kind, holder, tenant, first, second) in enumerate(steps):
            if kind == "take":
                running = sum(size for owner, size in held.values() if owner == tenant)
                answer = await take(ledger, request(number, second, tenant, first), holder)
                assert isinstance(answer, SeatTaken) == (running + first <= max_running)
                if isinstance(answer, SeatTaken):
                    held[holder, number] = (tenant, first)
                    tokens[tenant] += second
            elif kind == "give_back":
                assert await ledger.answer(holder, GiveBack(first, second)) is None
                if (gone := held.pop((holder, first), None)) is not None:
                    tokens[gone[0]] += second
            else:
                ledger.free(holder)
                held = {key: value for key, value in held.items() if key[0] != holder}
            for name in ("a", "b"):
                now = await usage(ledger, name)
                assert now.num_running == sum(size for owner, size in held.values() if owner == name)
                assert now.num_tokens == tokens[name]

    with fake_clock():
        run(main())


RUNS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), HOLDERS, st.integers(0, 30), st.integers(0, 60)),
        st.tuples(st.just("give_back"), HOLDERS, st.integers(0, 30), st.integers(0, 60)),
        st.tuples(st.just("advance"), HOLDERS, st.integers(0, 70), st.just(0)),
        st.tuples(st.just("free"), HOLDERS, st.just(0), st.just(0)),
    ),
    max_size=40,
)


@given(steps=RUNS, limit=st.integers(1, 100))
def test_what_was_used_and_what_is_reserved_never_exceed_the_limit(
    steps: Sequence[tuple[str, str, int, int]], limit: int
) -> None:
    """A take has prompt tokens and new ones; a give-back has a seat's number and the tokens that it generated."""

    async def main(clock: Clock) -> None:
        ledger = ledger_of(TenantLimits(tokens_per_minute=limit))
        reserved: dict[tuple[str, int], int] = {}
        for number, (kind, holder, first, second) in enumerate(steps):
            before = (await usage(ledger)).num_tokens
            if kind == "take":
                answer = await take(ledger, request(number, first, num_new=second), holder)
                fits = before + sum(reserved.values()) + first + second <= limit
                assert isinstance(answer, SeatTaken) == fits
                if isinstance(answer, SeatTaken):
                    reserved[holder, number] = second
                assert answer.rates.tokens is not None
                left = limit - (await usage(ledger)).num_tokens - sum(reserved.values())
                assert answer.rates.tokens.remaining == left
            elif kind == "give_back":
                most = reserved.pop((holder, first), 0)
                await ledger.answer(holder, GiveBack(first, min(second, most)))
                assert (await usage(ledger)).num_tokens == before + min(second, most)
            elif kind == "advance":
                clock.advance(first)
            else:
                ledger.free(holder)
                reserved = {key: value for key, value in reserved.items() if key[0] != holder}
            assert (await usage(ledger)).num_tokens + sum(reserved.values()) <= limit

    with fake_clock() as clock:
        run(main(clock))


def test_tokens_that_a_running_request_has_reserved_keep_others_out_until_it_ends() -> None:
    async def main() -> None:
        ledger = ledger_of(TenantLimits(tokens_per_minute=100))
        await take(ledger, request(1, 10, num_new=60))
        refused = await take(ledger, request(2, 10, num_new=60))
        assert isinstance(refused, SeatRefused)
        # The end of the first request is not known; without its reservation the second one fits.
        assert (refused.limit, refused.retry_after_s) == ("tokens_per_minute", 1)
        assert refused.rates.tokens is not None
        assert refused.rates.tokens.remaining == 30
        await ledger.answer("http-1", GiveBack(1, 5))
        assert isinstance(await take(ledger, request(2, 10, num_new=60)), SeatTaken)

    with fake_clock():
        run(main())


AMOUNTS = st.lists(st.tuples(st.floats(0, 70), st.integers(1, 3), st.integers(0, 30)), max_size=15)


@given(
    history=AMOUNTS, requests=st.integers(1, 6), tokens=st.integers(1, 40), start=st.floats(1.8e9, 1.8e9 + 60)
)
def test_a_refused_request_is_admitted_after_its_retry_after(
    history: Sequence[tuple[float, int, int]], requests: int, tokens: int, start: float
) -> None:
    async def main(clock: Clock) -> None:
        ledger = ledger_of(TenantLimits(requests_per_minute=requests, tokens_per_minute=tokens))
        for number, (seconds, num_requests, num_tokens) in enumerate(history):
            clock.advance(seconds)
            call = request(number, num_tokens, num_requests=num_requests)
            answer = await take(ledger, call)
            if isinstance(answer, SeatRefused):
                if answer.retry_after_s is None:
                    assert num_requests > requests or num_tokens > tokens
                    continue
                clock.advance(answer.retry_after_s)
                assert isinstance(await take(ledger, call), SeatTaken)
            # The tokens that it generates may exceed the limit.
            await ledger.answer("http-1", GiveBack(number, 2 * num_tokens))

    with fake_clock(start) as clock:
        run(main(clock))


def test_generated_tokens_count_when_the_request_ends_and_may_exceed_the_limit() -> None:
    async def main(clock: Clock) -> None:
        ledger = ledger_of(TenantLimits(tokens_per_minute=100))
        await take(ledger, request(1, 40))
        assert (await usage(ledger)).num_tokens == 40
        await ledger.answer("http-1", GiveBack(1, 300))
        assert (await usage(ledger)).num_tokens == 340
        refused = await take(ledger, request(2, 1))
        assert isinstance(refused, SeatRefused)
        assert refused.limit == "tokens_per_minute"
        assert refused.rates.tokens is not None
        assert refused.rates.tokens.remaining == 0
        assert refused.retry_after_s is not None
        clock.advance(refused.retry_after_s)
        assert isinstance(await take(ledger, request(3, 1)), SeatTaken)

    with fake_clock() as clock:
        run(main(clock))


def test_a_refused_request_counts_for_nothing() -> None:
    async def main() -> None:
        ledger = ledger_of(TenantLimits(requests_per_minute=1))
        await take(ledger, request(1, 5))
        before = await usage(ledger)
        assert isinstance(await take(ledger, request(2, 5)), SeatRefused)
        assert await usage(ledger) == before

    with fake_clock():
        run(main())


def test_a_request_that_exceeds_a_limit_by_itself_has_no_time_to_come_again() -> None:
    async def main() -> None:
        for limits, call, name in (
            (TenantLimits(requests_per_minute=2), request(1, num_requests=3), "requests_per_minute"),
            (TenantLimits(tokens_per_minute=9), request(1, 10), "tokens_per_minute"),
            (TenantLimits(tokens_per_minute=9), request(1, 5, num_new=5), "tokens_per_minute"),
            (TenantLimits(max_running=2), request(1, num_requests=3), "max_running"),
        ):
            answer = await take(ledger_of(limits), call)
            assert isinstance(answer, SeatRefused)
            assert (answer.limit, answer.retry_after_s) == (name, None)

    run(main())


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            TenantLimits(requests_per_minute=1),
            "tenant 'a' may send 1 request per minute: send this one again in",
        ),
        (
            TenantLimits(tokens_per_minute=5),
            "tenant 'a' may use 5 tokens per minute: send this one again in",
        ),
        (
            TenantLimits(max_running=1),
            "tenant 'a' may run 1 request at a time: send this one again in 1 s",
        ),
        (
            TenantLimits(tokens_per_minute=4),
            "tenant 'a' may use 4 tokens per minute, and this call alone is more: send a smaller one",
        ),
    ],
    ids=["requests", "tokens", "running", "alone"],
)
def test_a_refusal_is_a_sentence_about_what_the_tenant_may_do(limits: TenantLimits, message: str) -> None:
    async def main() -> None:
        ledger = ledger_of(limits)
        await take(ledger, request(1, 5))
        refused = await take(ledger, request(2, 5))
        assert isinstance(refused, SeatRefused)
        assert refused.message.startswith(message)

    with fake_clock():
        run(main())


def test_the_rates_after_admission_are_what_is_left() -> None:
    async def main() -> None:
        ledger = ledger_of(TenantLimits(requests_per_minute=10, tokens_per_minute=100))
        taken = await take(ledger, request(1, 30))
        assert taken.rates.requests is not None
        assert taken.rates.tokens is not None
        assert (taken.rates.requests.limit, taken.rates.requests.remaining) == (10, 9)
        assert (taken.rates.tokens.limit, taken.rates.tokens.remaining) == (100, 70)
        # All tokens are free when less than one of the thirty is left: 58 s into the next minute.
        assert 118 <= taken.rates.tokens.reset_s <= 118.1

    with fake_clock():
        run(main())


def test_changed_limits_keep_the_window() -> None:
    async def main() -> None:
        limits = {"a": TenantLimits(requests_per_minute=1)}
        ledger = Ledger(limits.__getitem__)
        await take(ledger, request(1))
        assert isinstance(await take(ledger, request(2)), SeatRefused)
        limits["a"] = TenantLimits(requests_per_minute=2)
        assert isinstance(await take(ledger, request(3)), SeatTaken)
        assert isinstance(await take(ledger, request(4)), SeatRefused)

    with fake_clock():
        run(main())


def test_a_holder_that_dies_frees_its_seats_and_keeps_the_window() -> None:
    async def main() -> None:
        ledger = ledger_of(TenantLimits(max_running=1))
        await take(ledger, request(1, 7), "http-1")
        assert isinstance(await take(ledger, request(1), "http-2"), SeatRefused)
        ledger.free("http-1")
        now = await usage(ledger)
        assert (now.num_running, now.num_requests, now.num_tokens) == (0, 1, 7)
        assert isinstance(await take(ledger, request(2), "http-2"), SeatTaken)

    with fake_clock():
        run(main())


def test_uploads_have_seats_of_their_own_and_reserve_their_bytes() -> None:
    async def main() -> None:
        ledger = ledger_of(TenantLimits(max_uploads=2, max_running=1, requests_per_minute=1))
        first, second = await take(ledger, upload(1, 10)), await take(ledger, upload(2, 5))
        assert isinstance(first, SeatTaken)
        assert isinstance(second, SeatTaken)
        assert (first.reserved_bytes, second.reserved_bytes) == (0, 10)
        third = await take(ledger, upload(3))
        assert isinstance(third, SeatRefused)
        assert (third.limit, third.retry_after_s) == ("max_uploads", 1)
        await ledger.answer("http-1", GiveBack(1, 0))
        third = await take(ledger, upload(4))
        assert isinstance(third, SeatTaken)
        assert third.reserved_bytes == 5
        assert isinstance(await take(ledger, request(5)), SeatTaken)

    with fake_clock():
        run(main())


def test_unknown_limits_admit_nothing() -> None:
    def damaged(tenant: str) -> TenantLimits:
        raise QueueFull(f"the limits of {tenant} cannot be read")

    async def main() -> None:
        answer = await Ledger(damaged).answer("http-1", request(1))
        assert isinstance(answer, LimitsUnknown)

    run(main())


def test_a_seat_that_is_given_back_twice_or_was_never_taken_changes_nothing() -> None:
    async def main() -> None:
        ledger = ledger_of(NONE)
        await take(ledger, request(1, 3))
        for call_id in (1, 1, 99):
            await ledger.answer("http-1", GiveBack(call_id, 2))
        now = await usage(ledger)
        assert (now.num_running, now.num_tokens) == (0, 5)

    with fake_clock():
        run(main())
