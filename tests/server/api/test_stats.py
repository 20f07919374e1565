"""`GET /stats` over HTTP: what the server does now, and has done."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from server.api import operations
from tests.server.helpers.http_app import running_app, settings_of
from tests.server.helpers.live_server import MAX_MODEL_LEN, Artifacts, LiveServer, eventually, live_server

LONG: dict[str, Any] = {"max_new_tokens": MAX_MODEL_LEN - 10, "n": 8, "temperature": 2.0, "seed": 1}


def stats_of(server: LiveServer) -> dict[str, Any]:
    document: dict[str, Any] = server.client.get("/stats").json()
    return document


def resident(server: LiveServer, name: str) -> dict[str, Any] | None:
    return next((each for each in stats_of(server)["variants"] if each["name"] == name), None)


def test_the_document_names_the_server_and_its_slots(server: LiveServer) -> None:
    document = stats_of(server)
    assert document["server"]["ready"] is True
    assert document["server"]["draining"] is False
    assert set(document["server"]["versions"]) == {"python", *operations.PACKAGES}
    assert document["engine"]["slots"] == 4
    assert document["engine"]["device_memory_bytes"]["base"] > 0
    assert document["uploads"]["created"] >= 3


def test_a_variant_in_a_slot_is_listed_with_its_requests(server: LiveServer) -> None:
    server.unload_all()

    def document_of_a_running_request() -> dict[str, Any] | None:
        # A stream may end before the document is made.
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


def test_totals_grow_with_what_is_done(server: LiveServer) -> None:
    before = stats_of(server)
    body = {"prompt": "hello", "max_new_tokens": 3, "temperature": 0}
    usage = server.client.post("/generate?variant=plain", json=body).json()["usage"]
    after = stats_of(server)
    grown = {name: after["requests"][name] - before["requests"][name] for name in after["requests"]}
    assert (grown["finished"], grown["prompt_tokens"]) == (1, usage["prompt_tokens"])
    assert grown["generation_tokens"] == usage["completion_tokens"]
    assert after["engine"]["steps"] > before["engine"]["steps"]
    listed = next(each for each in after["variants"] if each["name"] == "plain")
    assert listed["finished"] >= 1
    assert listed["tokens"] >= usage["total_tokens"]


def test_loads_and_cold_starts_are_counted_by_stage(server: LiveServer) -> None:
    server.unload_all()

    def counts() -> tuple[dict[tuple[str, str], int], int]:
        document = stats_of(server)
        for each in (*document["loads"], *document["cold_starts"], document["first_token"]):
            assert sum(each["buckets"]) == each["count"]
            assert len(each["buckets"]) == len(document["duration_bounds_s"]) + 1
        loads = {(each["source"], each["stage"]): each["count"] for each in document["loads"]}
        return loads, sum(each["count"] for each in document["cold_starts"])

    (loads, cold), body = counts(), {"prompt": "hello", "max_new_tokens": 1}
    assert server.client.post("/generate?variant=third", json=body).status_code == 200
    loaded, colder = counts()
    assert colder == cold + 1
    grown = {key for key, count in loaded.items() if count > loads[key]}
    assert {stage for _, stage in grown} >= {"copy", "total"}
    assert server.client.post("/generate?variant=third", json=body).status_code == 200
    assert counts() == (loaded, colder)


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


def test_several_http_processes_show_one_server(artifacts: Artifacts, tmp_path: Any) -> None:
    options = ("--http-workers", 2, "--max-gpu-deltas", 2)
    with live_server(artifacts.base, tmp_path / "registry", *options) as server:
        assert server.upload("counted", artifacts.plain).status_code == 201
        for _ in range(8):
            # A process that answers late is counted with its last figures.
            assert eventually(lambda: stats_of(server)["uploads"]["created"] == 1)


def test_a_stream_is_not_offered(server: LiveServer) -> None:
    reply = server.client.get("/stats", headers={"Accept": "text/event-stream"})
    assert reply.headers["Content-Type"] == "application/json"
