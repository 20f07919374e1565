"""A stream whose first token is late begins without it, and says that the server is there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from server.api.generation import WAITING
from server.api.outputs import Sending, TextOutputs
from server.errors import QueueFull
from tests.server.helpers.http_app import HttpApp, with_engine
from tests.server.helpers.served import Family, make_family

BODIES = {
    "/generate": {"prompt": "a", "max_new_tokens": 2, "temperature": 0},
    "/v1/completions": {"model": "base", "prompt": "a", "max_tokens": 2, "temperature": 0},
}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("family"), seed=5, num_variants=0)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when a stream sends its first piece."""
    begun = asyncio.Event()
    enter = Sending.__enter__

    def noted(sending: Sending) -> None:
        begun.set()
        enter(sending)

    monkeypatch.setattr(Sending, "__enter__", noted)
    return begun


@pytest.mark.parametrize("route", BODIES)
def test_a_late_stream_is_as_one_in_time_behind_its_comments(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: asyncio.Event, route: str
) -> None:
    take = TextOutputs.take

    async def late(outputs: TextOutputs) -> list[Any]:
        await begun.wait()
        return await take(outputs)

    async def talk(app: HttpApp) -> None:
        body = {**BODIES[route], "stream": True}
        in_time = await app.client.post(route, json=body)
        begun.clear()
        monkeypatch.setattr(TextOutputs, "take", late)
        reply = await app.client.post(route, json=body)
        assert reply.content.startswith(WAITING)
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.content.count(b"data: ") == in_time.content.count(b"data: ")

    with_engine(family.base, tmp_path / "registry", talk, stream_keepalive=0.05)


@pytest.mark.parametrize("route", BODIES)
def test_an_error_is_an_event_once_the_stream_has_begun_and_a_status_before(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: asyncio.Event, route: str
) -> None:
    is_late = False

    async def failing(outputs: TextOutputs) -> list[Any]:
        if is_late:
            await begun.wait()
        raise QueueFull("no more")

    monkeypatch.setattr(TextOutputs, "take", failing)

    async def talk(app: HttpApp) -> None:
        nonlocal is_late
        body = {**BODIES[route], "stream": True}
        assert (await app.client.post(route, json=body)).status_code == 503
        is_late = True
        reply = await app.client.post(route, json=body)
        assert (reply.status_code, b"overloaded" in reply.content) == (200, True)
        assert reply.content.startswith(WAITING)
        assert app.engine_client.num_open == 0

    with_engine(family.base, tmp_path / "registry", talk, stream_keepalive=0.05)


def test_a_client_that_leaves_a_late_stream_ends_its_request(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: asyncio.Event
) -> None:
    async def endless(outputs: TextOutputs) -> list[Any]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(TextOutputs, "take", endless)

    async def talk(app: HttpApp) -> None:
        before = asyncio.all_tasks()
        body = {**BODIES["/generate"], "stream": True, "n": 100}
        asking = asyncio.create_task(app.client.post("/generate", json=body))
        await begun.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        while app.engine_client.num_open or app.service.num_in_flight:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        assert {task for task in asyncio.all_tasks() - before if not task.done()} <= {asking}

    with_engine(family.base, tmp_path / "registry", talk, stream_keepalive=0.05)
