"""The events of a call's requests: what becomes of its admission when the client leaves while it is submitted."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import fastapi
import pytest
from starlette.requests import ClientDisconnect

from server.api.outputs import RequestEvents, while_connected
from server.errors import InvalidRequest
from server.inline import LocalMetrics
from server.protocol.engine_client import EngineClient
from server.protocol.request import Request, SamplingParams
from server.tenants.admission import Admissions
from server.tenants.tenant import TenantLimits
from tests.server.tenants.shared import admissions_of


def make_events() -> RequestEvents:
    return RequestEvents(EngineClient("test"), LocalMetrics(EngineClient("test")).frontend, "request")


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
            events.submit(Request("r", "acme", None, None, (1,), 300, SamplingParams()))

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
