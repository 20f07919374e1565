"""The rate limiter admits what limits allow, names the time to come again, and frees what has ended."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import QueueFull
from server.tenants.limits import WINDOW_S, RateLimiter, SlidingWindow
from server.tenants.tenant import Admitted, Refused, TenantLimits
from tests.server.tenants.clock import Clock

# Seconds that pass, and the amount that comes then.
HISTORY = st.lists(st.tuples(st.floats(0, 90), st.integers(1, 40)), max_size=12)
STARTS = st.floats(1_800_000_000, 1_800_000_060)


def rate_limiter(limits: TenantLimits, clock: Clock | None = None) -> RateLimiter:
    return RateLimiter(lambda tenant: limits, clock or Clock())


def admit(limiter: RateLimiter, work_id: int, num_requests: int = 1, tenant: str = "a") -> Admitted | Refused:
    return limiter.admit_requests("http-1", work_id, tenant, num_requests)


def refusal(answer: Admitted | Refused) -> Refused:
    assert isinstance(answer, Refused)
    return answer


@given(history=HISTORY, start=STARTS)
def test_a_window_weighs_the_minute_before_by_its_part_within_the_last_60_seconds(
    history: Sequence[tuple[float, int]], start: float
) -> None:
    window, now, minutes = SlidingWindow(), start, Counter[int]()
    for seconds, amount in history:
        now += seconds
        window.add(amount, now)
        minute = int(now // WINDOW_S)
        minutes[minute] += amount
        part = 1 - now % WINDOW_S / WINDOW_S
        assert abs(window.used(now) - (minutes[minute] + minutes[minute - 1] * part)) <= 1


@given(history=HISTORY, limit=st.integers(1, 60), amount=st.integers(1, 60), start=STARTS)
def test_an_amount_fits_after_its_wait_and_not_before(
    history: Sequence[tuple[float, int]], limit: int, amount: int, start: float
) -> None:
    window, now, amount = SlidingWindow(), start, min(amount, limit)
    for seconds, came in history:
        now += seconds
        window.add(came, now)
    wait_s = window.wait_s(limit, amount, now)
    assert 0 <= wait_s <= 2 * WINDOW_S + 0.01
    if wait_s > 0.01:
        now += wait_s - 0.01
        assert window.used(now) + amount > limit
        wait_s = 0.01
    assert window.used(now + wait_s) + amount <= limit


def test_a_window_counts_what_exceeds_every_limit_and_forgets_it_in_two_minutes() -> None:
    window, now = SlidingWindow(), 1_800_000_000.0
    window.add(1000, now)
    assert [window.used(now + seconds) for seconds in (0, 90, 120)] == [1000, 500, 0]


def test_the_wait_of_a_full_window_is_that_of_the_formula() -> None:
    """Ten at the beginning of a minute: one more fits when less than ten of them are left, just after the minute."""
    window, now = SlidingWindow(), 1_800_000_000.0
    window.add(10, now)
    assert math.isclose(window.wait_s(10, 1, now + 20), 40, abs_tol=2e-3)
    assert math.isclose(window.wait_s(10, 6, now + 20), 40 + 30, abs_tol=2e-3)


PROCESSES = st.sampled_from(["p", "q"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), PROCESSES, st.sampled_from(["a", "b"]), st.integers(1, 3)),
        st.tuples(st.just("count"), PROCESSES, st.sampled_from(["a", "b"]), st.integers(0, 30)),
        st.tuples(st.just("release"), PROCESSES, st.just(""), st.integers(0, 30)),
        st.tuples(st.just("free"), PROCESSES, st.just(""), st.just(0)),
    ),
    max_size=40,
)


@given(steps=STEPS, max_running=st.integers(1, 4))
def test_usage_is_that_of_a_plain_model(steps: Sequence[tuple[str, str, str, int]], max_running: int) -> None:
    """Within one moment nothing expires, so usage is a sum over what was done."""
    limiter = rate_limiter(TenantLimits(max_running=max_running))
    running: dict[tuple[str, int], tuple[str, int]] = {}
    requests, tokens = Counter[str](), Counter[str]()
    for number, (kind, process, tenant, amount) in enumerate(steps):
        if kind == "admit":
            fits = sum(size for owner, size in running.values() if owner == tenant) + amount <= max_running
            answer = limiter.admit_requests(process, number, tenant, amount)
            assert isinstance(answer, Admitted) == fits
            if fits:
                running[process, number] = (tenant, amount)
                requests[tenant] += amount
        elif kind == "count":
            limiter.count_tokens(tenant, amount)
            tokens[tenant] += amount
        elif kind == "release":
            limiter.release(process, amount)
            running.pop((process, amount), None)
        else:
            limiter.free(process)
            running = {key: value for key, value in running.items() if key[0] != process}
        for name in ("a", "b"):
            now = limiter.usage(name)
            assert now.num_running == sum(size for owner, size in running.values() if owner == name)
            assert (now.num_requests, now.num_tokens) == (requests[name], tokens[name])


def test_a_refused_request_counts_for_nothing() -> None:
    limiter = rate_limiter(TenantLimits(requests_per_minute=1))
    admit(limiter, 1)
    before = limiter.usage("a")
    refusal(admit(limiter, 2))
    assert limiter.usage("a") == before


def test_a_call_counts_as_one_request_until_its_prompts_are_known() -> None:
    limiter = rate_limiter(TenantLimits(requests_per_minute=5, max_running=4))
    for work_id in (1, 2, 3):
        admit(limiter, work_id)
    assert isinstance(admit(limiter, 1, 2), Admitted)
    assert refusal(admit(limiter, 2, 2)).limit == "max_running"
    # What was refused is released, and its one request stays counted.
    assert (limiter.usage("a").num_running, limiter.usage("a").num_requests) == (3, 4)
    assert refusal(admit(limiter, 3, 6)).retry_after_s is None
    admit(limiter, 4)
    assert refusal(admit(limiter, 4, 2)).limit == "requests_per_minute"
    limiter.release("http-1", 1)
    assert (limiter.usage("a").num_running, limiter.usage("a").num_requests) == (0, 5)


def test_changed_limits_keep_the_window() -> None:
    limits = {"a": TenantLimits(requests_per_minute=1)}
    limiter = RateLimiter(limits.__getitem__, Clock())
    admit(limiter, 1)
    refusal(admit(limiter, 2))
    limits["a"] = TenantLimits(requests_per_minute=2)
    assert isinstance(admit(limiter, 3), Admitted)
    refusal(admit(limiter, 4))


def test_a_process_that_dies_frees_its_work_and_keeps_the_window() -> None:
    limiter = rate_limiter(TenantLimits(max_running=1))
    limiter.admit_requests("http-1", 1, "a", 1)
    limiter.count_tokens("a", 7)
    refusal(limiter.admit_requests("http-2", 1, "a", 1))
    limiter.free("http-1")
    now = limiter.usage("a")
    assert (now.num_running, now.num_requests, now.num_tokens) == (0, 1, 7)
    assert isinstance(limiter.admit_requests("http-2", 2, "a", 1), Admitted)


def test_uploads_count_beside_requests_and_reserve_their_bytes() -> None:
    limiter = rate_limiter(TenantLimits(max_uploads=2, max_running=1, requests_per_minute=1))
    for work_id, num_bytes in ((1, 10), (2, 5)):
        assert isinstance(limiter.admit_upload("http-1", work_id, "a", num_bytes), Admitted)
    assert [limiter.grow_upload("http-1", work_id, 0) for work_id in (1, 2)] == [5, 10]
    third = refusal(limiter.admit_upload("http-1", 3, "a", 0))
    assert (third.limit, third.retry_after_s) == ("max_uploads", 1)
    limiter.release("http-1", 1)
    assert isinstance(limiter.admit_upload("http-1", 4, "a", 0), Admitted)
    assert limiter.grow_upload("http-1", 4, 0) == 5
    assert isinstance(admit(limiter, 5), Admitted)


def test_bytes_of_an_upload_that_grows_count_at_once_and_go_with_it() -> None:
    limiter = rate_limiter(TenantLimits())
    for work_id in (1, 2):
        limiter.admit_upload("http-1", work_id, "a", 0)
    grown = [(1, 7), (2, 4), (1, 3)]
    assert [limiter.grow_upload("http-1", *each) for each in grown] == [0, 7, 4]
    limiter.release("http-1", 1)
    assert limiter.grow_upload("http-1", 2, 0) == 0
    with pytest.raises(QueueFull, match="not counted any more"):
        limiter.grow_upload("http-1", 1, 1)
    limiter.free("http-1")
    limiter.admit_upload("http-1", 3, "a", 0)
    assert limiter.grow_upload("http-1", 3, 0) == 0


def test_unknown_limits_admit_nothing() -> None:
    def damaged(tenant: str) -> TenantLimits:
        raise QueueFull(f"the limits of {tenant} cannot be read")

    limiter = RateLimiter(damaged)
    for ask in (
        lambda: limiter.admit_requests("http-1", 1, "a", 1),
        lambda: limiter.admit_upload("http-1", 1, "a", 1),
        lambda: limiter.usage("a"),
    ):
        with pytest.raises(QueueFull, match="limits of a"):
            ask()


def test_work_that_is_released_twice_or_was_never_admitted_changes_nothing() -> None:
    limiter = rate_limiter(TenantLimits())
    for work_id in (1, 2):
        admit(limiter, work_id)
    for work_id in (1, 1, 99):
        limiter.release("http-1", work_id)
    assert limiter.usage("a").num_running == 1


AMOUNTS = st.lists(st.tuples(st.floats(0, 70), st.integers(1, 3), st.integers(0, 60)), max_size=15)


@given(history=AMOUNTS, requests=st.integers(1, 6), tokens=st.integers(1, 40), start=STARTS)
def test_a_refused_request_is_admitted_after_its_retry_after(
    history: Sequence[tuple[float, int, int]], requests: int, tokens: int, start: float
) -> None:
    clock = Clock(start)
    limiter = rate_limiter(TenantLimits(requests_per_minute=requests, tokens_per_minute=tokens), clock)
    for number, (seconds, num_requests, num_tokens) in enumerate(history):
        clock.advance(seconds)
        answer = admit(limiter, number, num_requests)
        if isinstance(answer, Refused):
            if answer.retry_after_s is None:
                assert num_requests > requests
                continue
            clock.advance(answer.retry_after_s)
            assert isinstance(admit(limiter, number, num_requests), Admitted)
        limiter.count_tokens("a", num_tokens)
        limiter.release("http-1", number)


def test_tokens_beyond_the_limit_refuse_the_next_request_until_the_window_has_room() -> None:
    clock = Clock()
    limiter = rate_limiter(TenantLimits(tokens_per_minute=100), clock)
    admit(limiter, 1)
    limiter.count_tokens("a", 99)
    # One token is left: the next request may use any number.
    admit(limiter, 2)
    limiter.count_tokens("a", 301)
    refused = refusal(admit(limiter, 3))
    assert refused.limit == "tokens_per_minute"
    assert refused.rates.tokens is not None
    assert refused.rates.tokens.remaining == 0
    # 400 tokens weigh less than 100 when a quarter of their minute is left.
    assert refused.retry_after_s == WINDOW_S + 45 + 1
    clock.advance(WINDOW_S + 44)
    refusal(admit(limiter, 3))
    clock.advance(2)
    assert isinstance(admit(limiter, 3), Admitted)


@given(history=AMOUNTS, limit=st.integers(1, 40), max_running=st.integers(1, 3))
def test_usage_exceeds_the_limit_by_what_running_requests_used_at_most(
    history: Sequence[tuple[float, int, int]], limit: int, max_running: int
) -> None:
    clock, running = Clock(), list[int]()
    limiter = rate_limiter(TenantLimits(tokens_per_minute=limit, max_running=max_running), clock)
    most = max((num_tokens for _, _, num_tokens in history), default=0)
    for number, (seconds, num_ended, num_tokens) in enumerate(history):
        clock.advance(seconds)
        if isinstance(admit(limiter, number), Admitted):
            running.append(number)
            limiter.count_tokens("a", num_tokens)
        for work_id in running[: num_ended - 1]:
            limiter.release("http-1", work_id)
        running = running[num_ended - 1 :]
        assert limiter.usage("a").num_tokens <= limit - 1 + max_running * most


def test_tenants_that_did_nothing_for_two_minutes_are_forgotten_and_others_are_not() -> None:
    clock = Clock()
    limiter = rate_limiter(TenantLimits(requests_per_minute=2), clock)
    for number in range(1000):
        limiter.admit_requests("http-1", number, f"tenant-{number}", 1)
        limiter.count_tokens(f"tenant-{number}", 5)
        if number:
            limiter.release("http-1", number)
    clock.advance(WINDOW_S)
    admit(limiter, 1000, tenant="a")
    # What was used within the last minute still counts.
    assert len(limiter._usage) == 1001
    clock.advance(WINDOW_S)
    admit(limiter, 1001, tenant="a")
    assert set(limiter._usage) == {"tenant-0", "a"}
    assert limiter.usage("tenant-0").num_running == 1
    refusal(admit(limiter, 1002, tenant="a"))


def test_a_call_that_exceeds_a_limit_by_itself_has_no_time_to_come_again() -> None:
    for limits, name in (
        (TenantLimits(requests_per_minute=2), "requests_per_minute"),
        (TenantLimits(max_running=2), "max_running"),
    ):
        refused = refusal(admit(rate_limiter(limits), 1, 3))
        assert (refused.limit, refused.retry_after_s) == (name, None)


ALONE = "this call alone is more: send a smaller one"


@pytest.mark.parametrize(
    ("limits", "num_requests", "message"),
    [
        (TenantLimits(requests_per_minute=1), 1, "may send 1 request per minute: send this one again in 61 s"),
        (TenantLimits(tokens_per_minute=5), 1, "may use 5 tokens per minute: send this one again in 61 s"),
        (TenantLimits(max_running=1), 1, "may run 1 request at a time: send this one again in 1 s"),
        (TenantLimits(max_running=1), 2, f"may run 1 request at a time, and {ALONE}"),
    ],
    ids=["requests", "tokens", "running", "alone"],
)  # fmt: skip
def test_a_refusal_is_a_sentence_about_what_the_tenant_may_do(
    limits: TenantLimits, num_requests: int, message: str
) -> None:
    limiter = rate_limiter(limits)
    admit(limiter, 1)
    limiter.count_tokens("a", 5)
    assert refusal(admit(limiter, 2, num_requests)).message == f"tenant 'a' {message}"


def test_the_rates_after_admission_are_what_is_left() -> None:
    limiter = rate_limiter(TenantLimits(requests_per_minute=10, tokens_per_minute=100))
    limiter.count_tokens("a", 30)
    rates = admit(limiter, 1).rates
    assert rates.requests is not None
    assert rates.tokens is not None
    assert (rates.requests.limit, rates.requests.remaining) == (10, 9)
    assert (rates.tokens.limit, rates.tokens.remaining) == (100, 70)
    # All tokens are free when less than one of the thirty is left: 58 s into the next minute.
    assert 118 <= rates.tokens.reset_s <= 118.1
