"""`GET /stats` over HTTP: what the server does now, as a document and as events."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from server.api.operations import stats
from server.frontend.feed import Feed
from tests.server.helpers.http_app import running_app, settings_of
from tests.server.helpers.live_server import (
    MAX_MODEL_LEN,
    Artifacts,
    LiveServer,
    error_of,
    eventually,
    live_server,
)

LONG: dict[str, Any] = {"max_new_tokens": MAX_MODEL_LEN - 10, "n": 8, "temperature": 2.0, "seed": 1}
EVENTS = {"Accept": "text/event-stream"}


def stats_of(server: LiveServer) -> dict[str, Any]:
    document: dict[str, Any] = server.client.get("/stats").json()
    return document


def resident(server: LiveServer, name: str) -> dict[str, Any] | None:
    return next((each for each in stats_of(server)["variants"] if each["name"] == name), None)


def documents(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in reply.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_the_document_names_the_server_and_its_slots(server: LiveServer) -> None:
    document = stats_of(server)
    assert document["server"]["ready"] is True
    assert document["server"]["draining"] is False
    assert set(document["server"]["versions"]) == {"python", *stats.PACKAGES}
    assert document["engine"]["slots"] == 4
    assert document["engine"]["device_memory_bytes"]["base"] > 0
    assert document["uploads"]["created"] >= 3


def test_a_variant_in_a_slot_is_listed_with_its_requests(server: LiveServer) -> None:
    server.unload_all()

    def document_of_a_running_request() -> dict[str, Any] | None:
        # The document is made once a second, and a stream may end before the next one.
        with server.streaming("third", **LONG) as stream:
            next(stream)
            document = stats_of(server)
        return document if document["requests"]["running"] == 1 else None

    document = eventually(document_of_a_running_request)
    assert document is not None
    listed = next(each for each in document["variants"] if each["name"] == "third")
    shown = server.client.get("/variants/third").json()["versions"][0]
    assert (listed["tenant"], listed["version"], listed["level"]) == ("default", 1, "device")
    assert (listed["digest"], listed["device_bytes"]) == (shown["digest"], shown["device_bytes"])
    assert listed["num_requests"] == 1


def test_an_unloaded_variant_is_not_listed(server: LiveServer) -> None:
    server.unload_all()
    assert server.client.post("/variants/chatty/load").status_code == 202
    assert eventually(lambda: resident(server, "chatty"))
    assert server.client.post("/variants/chatty/unload").status_code == 202
    assert eventually(lambda: resident(server, "chatty") is None)


def test_events_come_one_after_the_other_with_rates(server: LiveServer) -> None:
    with server.streaming("plain", **LONG) as stream:
        next(stream)
        with server.client.stream("GET", "/stats", headers=EVENTS) as reply:
            assert reply.headers["Content-Type"].startswith("text/event-stream")
            events = documents(reply)
            assert eventually(lambda: (next(events)["requests"]["generation_tokens_per_s"] or 0) > 0)


def test_listeners_beyond_the_bound_are_refused(artifacts: Artifacts, tmp_path: Any) -> None:
    async def main() -> httpx.Response:
        async with running_app(settings_of(artifacts.base, tmp_path / "registry")) as app:
            application = app.client._transport.app  # type: ignore[attr-defined]
            assert isinstance(application, FastAPI)
            feed: Feed = application.state.stats_feed
            feed.num_listeners = stats.MAX_LISTENERS
            return await app.client.get("/stats", headers=EVENTS)

    reply = asyncio.run(main())
    assert (reply.status_code, error_of(reply)["code"]) == (503, "overloaded")


def test_statistics_are_shown_before_an_engine_is_ready(artifacts: Artifacts, tmp_path: Any) -> None:
    async def main() -> httpx.Response:
        async with running_app(settings_of(artifacts.base, tmp_path / "registry")) as app:
            return await app.client.get("/stats")

    document = asyncio.run(main()).json()
    assert (document["server"]["ready"], document["server"]["base"], document["variants"]) == (
        False,
        None,
        [],
    )


def test_several_http_processes_show_one_server_and_shutdown_ends_the_streams(
    artifacts: Artifacts, tmp_path: Any
) -> None:
    options = ("--http-workers", 2, "--max-gpu-deltas", 2, "--shutdown-timeout", 30)
    with live_server(artifacts.base, tmp_path / "registry", *options) as server:
        assert server.upload("counted", artifacts.plain).status_code == 201
        with server.client.stream("GET", "/stats", headers=EVENTS) as reply:
            events = documents(reply)
            for _ in range(8):
                assert httpx.get(f"{server.url}/stats").json()["uploads"]["created"] == 1
            assert next(events)["uploads"]["created"] == 1
            server.process.send_signal(signal.SIGTERM)
            assert len(list(events)) < 40
        assert server.process.wait(20) == 0


@pytest.mark.parametrize("accept", ["*/*", "application/json"])
def test_other_accepted_types_get_a_document(server: LiveServer, accept: str) -> None:
    reply = server.client.get("/stats", headers={"Accept": accept})
    assert reply.headers["Content-Type"] == "application/json"
