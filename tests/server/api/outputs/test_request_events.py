"""The events of a call's requests: what happens to its seat when the client leaves while it is submitted."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import fastapi
import pytest
from starlette.requests import ClientDisconnect

from server.api.outputs.request_events import RequestEvents, while_connected
from server.errors import InvalidRequest
from server.frontend.engine_client import EngineClient
from server.metrics.local import LocalMetrics
from server.protocol.request import Request
from server.protocol.sampling_params import SamplingParams
from server.tenants.limits.ledger import Ledger
from server.tenants.limits.limiter import Limiter
from server.tenants.limits.local_link import LocalLink
from server.tenants.limits.tenant_limits import TenantLimits


def make_events() -> RequestEvents:
    return RequestEvents(EngineClient("test"), LocalMetrics().frontend, "request")


def make_limiter() -> Limiter:
    return Limiter(LocalLink(Ledger(lambda tenant: TenantLimits(max_running=1))))


async def num_running(limiter: Limiter) -> int:
    usage = await limiter.usage("acme")
    assert usage is not None
    return usage.num_running


def test_a_seat_that_comes_after_the_client_has_left_is_given_back() -> None:
    async def main() -> None:
        limiter, events = make_limiter(), make_events()
        seat = await limiter.admit("acme")
        events.cancel()
        with pytest.raises(ClientDisconnect):
            events.hold(seat)
        # Answered after the seat's return, which was told first.
        assert await num_running(limiter) == 0

    asyncio.run(main())


@pytest.mark.parametrize("num_turns", range(12))
def test_a_client_that_leaves_around_the_grant_of_its_seat_leaves_none_behind(num_turns: int) -> None:
    async def main() -> None:
        limiter, events, has_left = make_limiter(), make_events(), asyncio.Event()

        async def submit() -> None:
            events.hold(await limiter.admit("acme"))

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
        assert await num_running(limiter) == 0

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
