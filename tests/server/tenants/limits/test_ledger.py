"""The ledger counts what was admitted, and every seat that is given back or freed is free again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from server.errors import QueueFull
from server.protocol.limits import (
    AddTokens,
    GiveBack,
    GrowUpload,
    LimitsUnknown,
    SeatRefused,
    SeatTaken,
    TakeSeat,
    Tokens,
    UploadGrown,
)
from server.tenants.limits.ledger import Ledger
from server.tenants.limits.tenant_limits import TenantLimits
from tests.server.tenants.limits.calls import is_admitted, ledger_of, request, run, take, usage
from tests.server.tenants.limits.clock import fake_clock

NONE = TenantLimits()


async def take_upload(ledger: Ledger, call: TakeSeat) -> SeatTaken | SeatRefused:
    answer = await ledger.answer("http-1", call)
    assert isinstance(answer, SeatTaken | SeatRefused)
    return answer


async def others(ledger: Ledger, call_id: int, num_bytes: int = 0) -> int:
    """Count bytes of an upload, and return those of its tenant's other uploads."""
    answer = await ledger.answer("http-1", GrowUpload(call_id, num_bytes))
    assert isinstance(answer, UploadGrown)
    return answer.reserved_bytes


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
                assert is_admitted(answer) == (running + first <= max_running)
                if is_admitted(answer):
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


def test_a_refused_request_counts_for_nothing() -> None:
    async def main() -> None:
        ledger = ledger_of(TenantLimits(requests_per_minute=1))
        await take(ledger, request(1, 5))
        before = await usage(ledger)
        assert isinstance(await take(ledger, request(2, 5)), SeatRefused)
        assert await usage(ledger) == before

    with fake_clock():
        run(main())


def test_a_request_whose_tokens_are_refused_counts_and_frees_its_seat_at_once() -> None:
    async def main() -> None:
        ledger = ledger_of(TenantLimits(requests_per_minute=3, tokens_per_minute=100, max_running=2))
        await take(ledger, request(1, 90))
        await ledger.answer("http-1", GiveBack(1, 0))
        refused = await take(ledger, request(2, 11, num_requests=2))
        assert isinstance(refused, SeatRefused)
        assert refused.limit == "tokens_per_minute"
        now = await usage(ledger)
        assert (now.num_running, now.num_requests, now.num_tokens) == (0, 3, 90)
        # Until two more of three requests fit; the tokens alone would fit after 61 s.
        assert refused.retry_after_s == 81

    with fake_clock():
        run(main())


def test_tokens_that_are_certain_before_tokenizing_are_refused_with_the_seat() -> None:
    async def main() -> None:
        ledger = ledger_of(TenantLimits(tokens_per_minute=100))
        await take(ledger, request(1, 90))
        certain = TakeSeat(2, "a", "request", 1, Tokens(1, 20))
        answer = await ledger.answer("http-1", certain)
        assert isinstance(answer, SeatRefused)
        assert (await usage(ledger)).num_requests == 1
        # Work without tokens goes on.
        assert isinstance(await ledger.answer("http-1", TakeSeat(3, "a", "request", 1)), SeatTaken)

    with fake_clock():
        run(main())


def test_tokens_without_a_seat_are_not_counted() -> None:
    async def main() -> None:
        ledger = ledger_of(NONE)
        assert isinstance(await ledger.answer("http-1", AddTokens(1, Tokens(5, 5))), LimitsUnknown)
        assert (await usage(ledger)).num_tokens == 0

    run(main())


def test_changed_limits_keep_the_window() -> None:
    async def main() -> None:
        limits = {"a": TenantLimits(requests_per_minute=1)}
        ledger = Ledger(limits.__getitem__)
        await take(ledger, request(1))
        assert isinstance(await take(ledger, request(2)), SeatRefused)
        limits["a"] = TenantLimits(requests_per_minute=2)
        assert is_admitted(await take(ledger, request(3)))
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
        assert is_admitted(await take(ledger, request(2), "http-2"))

    with fake_clock():
        run(main())


def test_uploads_have_seats_of_their_own_and_reserve_their_bytes() -> None:
    async def main() -> None:
        ledger = ledger_of(TenantLimits(max_uploads=2, max_running=1, requests_per_minute=1))
        first, second = await take_upload(ledger, upload(1, 10)), await take_upload(ledger, upload(2, 5))
        assert isinstance(first, SeatTaken)
        assert isinstance(second, SeatTaken)
        assert [await others(ledger, 1), await others(ledger, 2)] == [5, 10]
        third = await take_upload(ledger, upload(3))
        assert isinstance(third, SeatRefused)
        assert (third.limit, third.retry_after_s) == ("max_uploads", 1)
        await ledger.answer("http-1", GiveBack(1, 0))
        third = await take_upload(ledger, upload(4))
        assert isinstance(third, SeatTaken)
        assert await others(ledger, 4) == 5
        assert is_admitted(await take(ledger, request(5)))

    with fake_clock():
        run(main())


def test_bytes_of_an_upload_that_grows_count_at_once_and_go_with_its_seat() -> None:
    async def main() -> None:
        ledger = ledger_of(NONE)
        for call_id in (1, 2):
            await take_upload(ledger, upload(call_id))
        assert [await others(ledger, 1, 7), await others(ledger, 2, 4), await others(ledger, 1, 3)] == [
            0,
            7,
            4,
        ]
        await ledger.answer("http-1", GiveBack(1, 0))
        assert await others(ledger, 2) == 0
        assert isinstance(await ledger.answer("http-1", GrowUpload(1, 1)), LimitsUnknown)
        ledger.free("http-1")
        await take_upload(ledger, upload(3))
        assert await others(ledger, 3) == 0

    with fake_clock():
        run(main())


def test_unknown_limits_admit_nothing() -> None:
    def damaged(tenant: str) -> TenantLimits:
        raise QueueFull(f"the limits of {tenant} cannot be read")

    async def main() -> None:
        answer = await Ledger(damaged).answer("http-1", request(1).seat)
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
