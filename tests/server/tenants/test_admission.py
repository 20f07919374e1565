"""An HTTP process asks for the admission of work: what it does with each answer, and without one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from server.errors import InvalidRequest, QueueFull, RateLimited
from server.tenants import admission as admission_module
from server.tenants.admission import Admission, Admissions, RequestWindows
from server.tenants.tenant import Admitted, Rate, Rates, Refused, TenantLimits, Usage
from tests.server.tenants.shared import SilentState, admissions_of


class AnsweringState(SilentState):
    """A shared state that has one answer."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self._answer = answer

    async def answer(self) -> Any:
        return self._answer


def admission_by(state: SilentState, limits: TenantLimits) -> Admission:
    return Admission(state.shared, "http-1", 7, "a", Admitted(Rates(), limits))


async def usage_of(admissions: Admissions) -> Usage:
    usage = await admissions.usage("a")
    assert usage is not None
    return usage


def test_without_an_answer_the_request_is_refused_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "ANSWER_S", 0.01)

    async def main() -> None:
        state = SilentState()
        with pytest.raises(QueueFull, match="cannot count"):
            await Admissions(state.shared, "http-1").admit("a")
        assert (state.asked, state.told) == ([("http-1", 0, "a", 1)], [("release", "http-1", 0)])

    asyncio.run(main())


def test_a_client_that_leaves_while_its_request_waits_for_admission_releases_it() -> None:
    async def main() -> None:
        state = SilentState()
        asking = asyncio.create_task(Admissions(state.shared, "http-1").admit("a"))
        while not state.asked:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert state.told == [("release", "http-1", 0)]

    asyncio.run(main())


def test_a_refusal_is_the_error_that_names_its_limit_and_its_wait() -> None:
    async def main() -> None:
        rates = Rates(requests=Rate(1, 0, 60.0))
        refused = Refused(rates, "requests_per_minute", "too many", 17)
        with pytest.raises(RateLimited, match="too many") as caught:
            await Admissions(AnsweringState(refused).shared).admit("a")
        error = caught.value
        assert (error.param, error.retry_after_s, error.rates) == ("requests_per_minute", 17, rates)

    asyncio.run(main())


def test_prompts_that_never_fit_are_invalid_and_their_call_is_over() -> None:
    async def main() -> None:
        state = AnsweringState(Refused(Rates(), "max_running", "too many", None))
        admission = admission_by(state, TenantLimits(max_running=1))
        with pytest.raises(InvalidRequest, match="too many"):
            await admission.need(2)
        admission.release()
        assert not state.told

    asyncio.run(main())


def test_one_prompt_is_counted_already() -> None:
    async def main() -> None:
        state = SilentState()
        await admission_by(state, TenantLimits(max_running=1)).need(1)
        assert not state.asked

    asyncio.run(main())


def test_tokens_are_counted_in_slices_and_the_rest_at_the_end() -> None:
    state = SilentState()
    admission = admission_by(state, TenantLimits(tokens_per_minute=64))
    for _ in range(10):
        admission.count(1)
    admission.count(50)
    admission.count(2)
    admission.release()
    admission.release()
    assert state.told == [
        *(("count_tokens", "a", number) for number in (4, 4, 52, 2)),
        ("release", "http-1", 7),
    ]
    assert not state.asked


def test_all_that_is_counted_and_released_arrives() -> None:
    async def main() -> None:
        admissions = admissions_of(TenantLimits(max_running=1))
        admission = await admissions.admit("a")
        with pytest.raises(RateLimited):
            await admissions.admit("a")
        admission.count(5)
        admission.release()
        admission.release()
        # Begun after the calls that were told.
        usage = await usage_of(admissions)
        assert (usage.num_running, usage.num_requests, usage.num_tokens) == (0, 1, 5)

    asyncio.run(main())


def test_an_admission_is_asked_before_a_release_that_follows_it() -> None:
    async def main() -> None:
        admissions = admissions_of(TenantLimits(max_running=1))
        for num_turns in range(6):
            asking = asyncio.create_task(admissions.admit("a"))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            asking.cancel()
            [outcome] = await asyncio.gather(asking, return_exceptions=True)
            if isinstance(outcome, Admission):
                outcome.release()
            assert (await usage_of(admissions)).num_running == 0

    asyncio.run(main())


def test_without_limits_everything_is_admitted_and_nothing_is_known() -> None:
    async def main() -> None:
        admissions = Admissions()
        admission = await admissions.admit("a")
        await admission.need(10**6)
        admission.count(10**9)
        admission.release()
        assert (admission.rates, admission.limits) == (Rates(), TenantLimits())
        assert await admissions.usage("a") is None

    asyncio.run(main())


def test_every_request_asks_under_an_id_of_its_own() -> None:
    async def main() -> None:
        state = SilentState()
        admissions = Admissions(state.shared, "http-1")
        asking = [asyncio.create_task(admissions.admit("a")) for _ in range(3)]
        while len(state.asked) < len(asking):
            await asyncio.sleep(0)
        assert state.asked == [("http-1", number, "a", 1) for number in range(3)]
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    asyncio.run(main())


async def begun(windows: RequestWindows, number: int, tenant: str = "a") -> list[asyncio.Task[None]]:
    """Return so many tasks that enter, after as many turns of the loop as one needs that need not wait."""
    tasks = [asyncio.create_task(windows.enter(tenant)) for _ in range(number)]
    await turns()
    return tasks


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def num_in(tasks: list[asyncio.Task[None]]) -> int:
    return sum(task.done() for task in tasks)


async def ended(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes in which a request tries, or has waited for too long."""
    for name in ("TRY_S", "WAIT_S", "CLOSED_S"):
        monkeypatch.setattr(admission_module, name, 3600.0)


@pytest.mark.usefixtures("closed")
def test_after_a_refusal_as_many_requests_of_the_tenant_run_as_the_engine_took() -> None:
    async def main() -> None:
        windows = RequestWindows()
        assert num_in(await begun(windows, 4)) == 4
        windows.leave("a", "refused")
        waiting = await begun(windows, 3)
        assert num_in(waiting) == 0
        # Those of another tenant begin.
        assert num_in(await begun(windows, 2, "b")) == 2
        windows.leave("a", "answered")
        await turns()
        assert [task.done() for task in waiting] == [True, False, False]
        # A refusal is no end: it makes room for no other.
        windows.leave("a", "refused")
        await turns()
        assert num_in(waiting) == 1
        await ended(*waiting)

    asyncio.run(main())


@pytest.mark.usefixtures("closed")
def test_requests_that_end_again_and_again_before_an_answer_count_as_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission_module, "_now", lambda: 0.0)

    async def main() -> None:
        windows = RequestWindows()
        running = await begun(windows, 2)
        for _ in range(admission_module.MAX_VAIN):
            (one,) = await begun(windows, 1)
            assert one.done()
            windows.leave("a", "vain")
        (last,) = await begun(windows, 1)
        windows.leave("a", "vain")
        (waiting,) = await begun(windows, 1)
        assert (num_in(running), last.done(), waiting.done()) == (2, True, False)
        windows.leave("a", "answered")
        await turns()
        assert waiting.done()
        # However many they were, they are forgotten within seconds.
        for _ in range(100):
            windows._windows["a"].num_open += 1
            windows.leave("a", "vain")
        assert windows._windows["a"].vain_until < 1.5

    asyncio.run(main())


def test_what_was_vain_is_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "MAX_VAIN", 1000)
    monkeypatch.setattr(admission_module, "TRY_S", 0.001)

    async def main() -> None:
        windows = RequestWindows()
        for _ in range(100):
            await begun(windows, 1)
            windows.leave("a", "vain")
        while windows._windows:
            await asyncio.sleep(0.001)

    asyncio.run(main())


@pytest.mark.usefixtures("closed")
def test_a_client_that_leaves_before_or_in_its_turn_takes_no_place() -> None:
    async def main() -> None:
        windows = RequestWindows()
        await begun(windows, 2)
        windows.leave("a", "refused")
        first, second, third = await begun(windows, 3)
        await ended(first)
        windows.leave("a", "answered")
        # The second has its turn, and its client leaves before its task sees that.
        second.cancel()
        await turns()
        assert (second.cancelled(), third.done()) == (True, True)

    asyncio.run(main())


@pytest.mark.usefixtures("closed")
def test_of_the_places_to_wait_a_tenant_has_as_many_as_it_leaves_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission_module, "MAX_WAITING", 4)

    async def main() -> None:
        windows = RequestWindows()
        for tenant in ("a", "b"):
            await begun(windows, 1, tenant)
            windows.leave(tenant, "refused")
        waiting = await begun(windows, 2)
        with pytest.raises(QueueFull, match="wait"):
            await windows.enter("a")
        other = await begun(windows, 1, "b")
        assert num_in([*waiting, *other]) == 0
        await ended(*waiting, *other)
        assert windows._places.free == 4

    asyncio.run(main())


def test_while_requests_are_refused_one_more_tries_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "TRY_S", 0.001)

    async def main() -> None:
        windows = RequestWindows()
        await begun(windows, 1)
        windows.leave("a", "refused")
        for _ in range(3):
            # Nothing has ended.
            await windows.enter("a")

    asyncio.run(main())


def test_when_none_was_refused_for_long_all_begin_and_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission_module, "CLOSED_S", 0.01)
    monkeypatch.setattr(admission_module, "TRY_S", 0.02)

    async def main() -> None:
        windows = RequestWindows()
        await begun(windows, 1)
        windows.leave("a", "refused")
        await asyncio.gather(*(windows.enter("a") for _ in range(10)))
        for _ in range(10):
            windows.leave("a", "answered")
        assert not windows._windows

    asyncio.run(main())


def test_a_request_that_has_waited_long_is_refused_and_takes_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission_module, "TRY_S", 3600.0)
    monkeypatch.setattr(admission_module, "WAIT_S", 0.01)

    async def main() -> None:
        windows = RequestWindows()
        await begun(windows, 2)
        windows.leave("a", "refused")
        with pytest.raises(QueueFull, match="try again in a moment"):
            await windows.enter("a")
        windows.leave("a", "answered")
        await windows.enter("a")

    asyncio.run(main())


def test_work_that_is_released_gives_its_place_back_once() -> None:
    async def main() -> None:
        admissions = Admissions(AnsweringState(Admitted(Rates(), TenantLimits())).shared, "test")
        for _ in range(3):
            admission = await admissions.admit_to_engine("a")
            admission.release()
            admission.release()
        refused = Refused(Rates(), "requests_per_minute", "too many", 17)
        admissions._shared = AnsweringState(refused).shared
        with pytest.raises(RateLimited):
            await admissions.admit_to_engine("a")
        assert not admissions._windows._windows

    asyncio.run(main())
