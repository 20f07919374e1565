"""Limits admit what fits: by windows and reservations, and calls without a length go on within twice the limit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.protocol.limits import (
    GiveBack,
    SeatRefused,
    TakeSeat,
    Tokens,
    TokensCounted,
    TokensGenerated,
)
from server.tenants.limits.admission import reservation
from server.tenants.limits.tenant_limits import TenantLimits
from tests.server.tenants.limits.calls import Call, chat, is_admitted, ledger_of, request, run, take, usage
from tests.server.tenants.limits.clock import Clock, fake_clock

HOLDERS = st.sampled_from(["p", "q"])
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
                assert is_admitted(answer) == fits
                if is_admitted(answer):
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


CHATS = st.lists(
    st.one_of(
        st.tuples(st.just("chat"), st.integers(1, 30), st.integers(1, 500)),
        st.tuples(st.just("request"), st.integers(1, 30), st.integers(0, 60)),
        st.tuples(st.just("generate"), st.integers(0, 30), st.integers(1, 100)),
        st.tuples(st.just("give_back"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("advance"), st.integers(0, 70), st.just(0)),
    ),
    max_size=60,
)


@given(steps=CHATS, limit=st.integers(1, 100))
def test_calls_that_end_when_they_are_told_use_at_most_twice_the_limit(
    steps: Sequence[tuple[str, int, int]], limit: int
) -> None:
    """Each generates no more than its reservation before it counts."""

    async def main(clock: Clock) -> None:
        limits = TenantLimits(tokens_per_minute=limit)
        ledger, running = ledger_of(limits), dict[int, Tokens]()
        for number, (kind, first, second) in enumerate(steps):
            if kind == "advance":
                clock.advance(first)
            elif kind == "give_back":
                running.pop(first, None)
                await ledger.answer("http-1", GiveBack(first, 0))
            elif kind == "generate" and first in running:
                left = running[first]
                generated = min(second, reservation(left, limits))
                running[first] = Tokens(left.num_prompt, left.num_new - generated, left.may_overdraw)
                answer = await ledger.answer("http-1", TokensGenerated(first, generated))
                assert isinstance(answer, TokensCounted)
                assert left.may_overdraw or not answer.is_overdrawn
                if answer.is_overdrawn:
                    del running[first]
                    await ledger.answer("http-1", GiveBack(first, 0))
            elif kind in ("chat", "request"):
                tokens = Tokens(first, second, kind == "chat")
                if is_admitted(await take(ledger, Call(request(number).seat, tokens))):
                    running[number] = tokens
            assert (await usage(ledger)).num_tokens <= 2 * limit

    with fake_clock() as clock:
        run(main(clock))


def test_a_call_without_a_length_reserves_a_part_of_it_and_counts_what_it_generates() -> None:
    async def main() -> None:
        ledger = ledger_of(TenantLimits(tokens_per_minute=100))
        first = await take(ledger, chat(1, 10, 4000))
        assert first.rates.tokens is not None
        assert first.rates.tokens.remaining == 65
        assert is_admitted(await take(ledger, chat(2, 10, 4000)))
        refused = await take(ledger, chat(3, 10, 4000))
        assert isinstance(refused, SeatRefused)
        assert (refused.limit, refused.retry_after_s) == ("tokens_per_minute", 1)
        counted = [await ledger.answer("http-1", TokensGenerated(1, 26)) for _ in range(6)]
        # Beside 20 tokens of prompts and 50 that both calls have reserved.
        assert [each.is_overdrawn for each in counted if isinstance(each, TokensCounted)] == [False] * 5 + [
            True
        ]
        assert (await usage(ledger)).num_tokens == 176

    with fake_clock():
        run(main())


def test_a_prompt_near_the_limit_starts_with_what_is_left_of_it() -> None:
    async def main() -> None:
        ledger = ledger_of(TenantLimits(tokens_per_minute=100))
        assert is_admitted(await take(ledger, chat(1, 99, 4000)))
        refused = await take(ledger_of(TenantLimits(tokens_per_minute=100)), chat(1, 100, 4000))
        assert isinstance(refused, SeatRefused)
        assert refused.retry_after_s is None

    run(main())


def test_a_call_with_a_length_reserves_what_it_has_not_generated_and_never_ends_early() -> None:
    async def main() -> None:
        ledger = ledger_of(TenantLimits(tokens_per_minute=100))
        await take(ledger, request(1, 10, num_new=90))
        await ledger.answer("http-1", TokensGenerated(1, 40))
        assert isinstance(await take(ledger, request(2, 1)), SeatRefused)
        answer = await ledger.answer("http-1", TokensGenerated(1, 200))
        assert answer == TokensCounted(1, is_overdrawn=False)
        await ledger.answer("http-1", GiveBack(1, 0))
        assert (await usage(ledger)).num_tokens == 250

    with fake_clock():
        run(main())


def test_a_tenant_that_overdraws_whenever_it_can_gets_its_limit_per_minute() -> None:
    async def main(clock: Clock) -> None:
        ledger, used, begun = ledger_of(TenantLimits(tokens_per_minute=1000)), 0, clock.now
        for number in range(1000):
            if clock.now > begun + 600:
                break
            answer = await take(ledger, chat(number, 10, 100_000))
            if isinstance(answer, SeatRefused):
                assert answer.retry_after_s is not None
                clock.advance(answer.retry_after_s)
                continue
            used += 10
            may_go_on = True
            while may_go_on:
                used += 60
                counted = await ledger.answer("http-1", TokensGenerated(number, 60))
                may_go_on = counted == TokensCounted(number, is_overdrawn=False)
            await ledger.answer("http-1", GiveBack(number, 0))
        # The limits of ten minutes, and the two that a burst may have.
        assert 9_000 <= used <= 12_000

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
        assert is_admitted(await take(ledger, request(2, 10, num_new=60)))

    with fake_clock():
        run(main())


AMOUNTS = st.lists(
    st.tuples(st.floats(0, 70), st.integers(1, 3), st.integers(1, 30), st.integers(0, 40), st.booleans()),
    max_size=15,
)


@given(
    history=AMOUNTS,
    requests=st.integers(1, 6),
    tokens=st.integers(1, 40),
    start=st.floats(1.8e9, 1.8e9 + 60),
    known=st.booleans(),
)
def test_a_refused_request_is_admitted_after_its_retry_after(
    history: Sequence[tuple[float, int, int, int, bool]],
    requests: int,
    tokens: int,
    start: float,
    known: bool,
) -> None:
    """If its tokens are not all known with the seat, it may be refused once more, and not a third time."""

    async def main(clock: Clock) -> None:
        ledger = ledger_of(TenantLimits(requests_per_minute=requests, tokens_per_minute=tokens))
        for number, (seconds, num_requests, num_prompt, num_new, may_overdraw) in enumerate(history):
            clock.advance(seconds)
            asked = Tokens(num_prompt, num_new, may_overdraw)
            seat = TakeSeat(number, "a", "request", num_requests, asked if known else Tokens())
            num_refusals, most = 0, 1 if known and not may_overdraw else 2
            while isinstance(answer := await take(ledger, Call(seat, asked)), SeatRefused):
                if answer.retry_after_s is None:
                    assert num_requests > requests or num_prompt + num_new > tokens
                    break
                num_refusals += 1
                assert num_refusals <= most
                clock.advance(answer.retry_after_s)
            # The tokens that it generates may exceed the limit.
            await ledger.answer("http-1", GiveBack(number, 2 * num_new))

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
        assert is_admitted(await take(ledger, request(3, 1)))

    with fake_clock() as clock:
        run(main(clock))


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
