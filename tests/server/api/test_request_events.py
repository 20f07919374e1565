"""The events of a call's requests: those that are not read, and its admission when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import fastapi
import pytest
from starlette.requests import ClientDisconnect

from server.api import outputs
from server.api.outputs import MAX_UNREAD, PAUSE_UNREAD, RequestEvents, while_connected
from server.errors import InvalidRequest, QueueFull, RequestTimeout
from server.fairness import FairBudget
from server.inline import LocalMetrics
from server.protocol.engine_client import EngineClient, OnEvent
from server.protocol.messages import PromptEvent, ScoredToken, TokenEvent
from server.protocol.request import Request, SamplingParams, token_ids_of
from server.tenants.admission import Admissions
from server.tenants.tenant import TenantLimits
from tests.server.tenants.shared import admissions_of


def make_events() -> RequestEvents:
    return events_of(EngineClient("test"), FairBudget(1 << 20, "bytes"))


def events_of(engine: EngineClient, unsent: FairBudget) -> RequestEvents:
    return RequestEvents(engine, LocalMetrics(EngineClient("test")).frontend, "request", "acme", unsent)


class OpenEngine(EngineClient):
    """Takes one request, and keeps what it is told of it."""

    def __init__(self) -> None:
        super().__init__("test")
        self.pauses: list[bool] = []
        self.send: OnEvent

    def submit(self, request: Request, on_event: OnEvent, first_mask: bytes | None = None) -> None:
        self.send = on_event

    def set_paused(self, request_id: str, is_paused: bool) -> None:
        self.pauses.append(is_paused)


def a_request() -> Request:
    return Request("r", "acme", None, None, token_ids_of([1]), 300, SamplingParams())


def one_running() -> Admissions:
    return admissions_of(TenantLimits(max_running=1))


async def num_running(admissions: Admissions) -> int:
    usage = await admissions.usage("acme")
    assert usage is not None
    return usage.num_running


def test_an_admission_that_comes_after_the_client_has_left_is_released() -> None:
    async def main() -> None:
        admissions, events = one_running(), make_events()
        admission = await admissions.admit("acme")
        events.cancel()
        with pytest.raises(ClientDisconnect):
            events.admitted(admission)
        # Answered after the release, which was told first.
        assert await num_running(admissions) == 0

    asyncio.run(main())


@pytest.mark.parametrize("num_turns", range(12))
def test_a_client_that_leaves_around_its_admission_leaves_none_behind(num_turns: int) -> None:
    async def main() -> None:
        admissions, events, has_left = one_running(), make_events(), asyncio.Event()

        async def submit() -> None:
            events.admitted(await admissions.admit("acme"))

        async def receive() -> Any:
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def answer() -> None:
            try:
                await while_connected(fastapi.Request({"type": "http"}, receive), submit())
            finally:
                events.cancel()

        answering = asyncio.create_task(answer())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        has_left.set()
        with contextlib.suppress(ClientDisconnect):
            await answering
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
        assert await num_running(admissions) == 0

    asyncio.run(main())


def test_nothing_is_submitted_for_a_client_that_has_left() -> None:
    async def main() -> None:
        events = make_events()
        events.cancel()
        with pytest.raises(ClientDisconnect):
            events.submit(a_request())

    asyncio.run(main())


def test_asyncio_logs_no_error_of_work_whose_client_has_left(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                raise InvalidRequest("the prompt is too long")

        async def leave() -> Any:
            return {"type": "http.disconnect"}

        with pytest.raises(ClientDisconnect):
            await while_connected(fastapi.Request({"type": "http"}, leave), work())
        await asyncio.sleep(0)

    asyncio.run(main())
    assert not caplog.records


TOP = tuple((token, -1.0) for token in range(20))


def test_the_requests_of_a_stream_that_is_not_read_pause_and_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine, unsent = OpenEngine(), FairBudget(1 << 20, "bytes")
        events = events_of(engine, unsent)
        events.submit(a_request())
        engine.send(TokenEvent(0, 1))
        await events.take()
        with events.sending:
            engine.send(TokenEvent(0, 2))
            # A client that is late for a moment keeps its rows.
            assert (engine.pauses, unsent.held("acme")) == ([], 0)
            monkeypatch.setattr(outputs, "STALLED_S", 0.0)
            engine.send(TokenEvent(0, 3, -1.0, TOP))
            held = unsent.held("acme")
            assert engine.pauses == [True]
            assert held > 20 * 100
            # Of the step that was under way.
            engine.send(TokenEvent(0, 4, -1.0, TOP))
            assert unsent.held("acme") > held
        assert [event for _, event in await events.take()] == [
            TokenEvent(0, 2), TokenEvent(0, 3, -1.0, TOP), TokenEvent(0, 4, -1.0, TOP),
        ]  # fmt: skip
        # It has read when it asks for what comes next.
        assert (engine.pauses, unsent.held("acme")) == ([True], 0)
        taking = asyncio.create_task(events.take())
        await asyncio.sleep(0)
        assert engine.pauses == [True, False]
        engine.send(TokenEvent(0, 5))
        assert await taking == [(0, TokenEvent(0, 5))]

    asyncio.run(main())


def test_requests_pause_also_when_their_tokens_are_not_decoded_as_fast_as_they_come() -> None:
    async def main() -> None:
        engine = OpenEngine()
        events = events_of(engine, FairBudget(1 << 30, "bytes"))
        events.submit(a_request())
        for _ in range(PAUSE_UNREAD // 21 + 1):
            engine.send(TokenEvent(0, 1, -1.0, TOP))
        assert engine.pauses == [True]
        # An engine that goes on all the same.
        for _ in range(MAX_UNREAD // 21 - PAUSE_UNREAD // 21):
            engine.send(TokenEvent(0, 1, -1.0, TOP))
        with pytest.raises(RequestTimeout, match="not read in time"):
            await events.take()

    asyncio.run(main())


def test_what_a_tenant_leaves_unread_of_its_streams_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "STALLED_S", 0.0)

    async def main() -> None:
        unsent = FairBudget(64 << 10, "bytes")
        engines = [OpenEngine() for _ in range(40)]
        streams = [events_of(engine, unsent) for engine in engines]
        with contextlib.ExitStack() as stack:
            for engine, events in zip(engines, streams, strict=True):
                events.submit(a_request())
                stack.enter_context(events.sending)
                engine.send(TokenEvent(0, 1, -1.0, TOP))
            assert unsent.has("another", 16 << 10)
            with pytest.raises(RequestTimeout, match="not read in time"):
                await streams[-1].take()
            # What a tenant may leave unread stays.
            assert await streams[0].take() == [(0, TokenEvent(0, 1, -1.0, TOP))]
            for events in streams:
                events.cancel()
        assert unsent.free == 64 << 10

    asyncio.run(main())


def test_log_probabilities_of_prompts_are_counted_until_the_reply_ends() -> None:
    async def main() -> None:
        engine, unsent = OpenEngine(), FairBudget(64 << 10, "bytes")
        events, second = events_of(engine, unsent), events_of(engine, unsent)
        prompt = PromptEvent((ScoredToken(1, -1.0, TOP),) * 4)
        events.submit(a_request())
        engine.send(prompt)
        assert await events.take() == [(0, prompt)]
        second.submit(a_request())
        engine.send(prompt)
        with pytest.raises(QueueFull, match="too many bytes"):
            await second.take()
        events.cancel()
        second.cancel()
        assert unsent.free == 64 << 10

    asyncio.run(main())
