"""`POST /generate` with the application in the tests' process: the thread that submits, and clients that leave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from server.app import create_app
from server.engine.engine import Engine
from server.engine.request import Request
from server.engine.request_state import OnEvent
from server.settings import Settings
from tests.server.helpers.served import Family, make_family, slow_down

WAIT_S = 60.0


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("family"), seed=5, num_variants=0)


def exercise(
    family: Family, registry: Path, talk: Callable[[httpx.AsyncClient, FastAPI], Awaitable[None]]
) -> None:
    """Load a real engine into an application and run `talk` with a client of it."""

    async def main() -> None:
        app = create_app(
            Settings(
                base=family.base, registry=registry, device="cpu", dtype="float32", max_gpu_deltas=2,
                max_host_cache_gb=0, max_num_seqs=4, max_model_len=256,
            )
        )  # fmt: skip
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            await app.state.service.loading
            await talk(client, app)

    asyncio.run(main())


def test_a_request_is_not_submitted_on_the_event_loop(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    submit = Engine.submit

    def recorded(engine: Engine, request: Request, on_event: OnEvent) -> None:
        threads.append(threading.current_thread())
        submit(engine, request, on_event)

    monkeypatch.setattr(Engine, "submit", recorded)

    async def talk(client: httpx.AsyncClient, app: FastAPI) -> None:
        reply = await client.post("/generate", json={"prompt": "a", "max_new_tokens": 2})
        assert reply.status_code == 200, reply.text

    exercise(family, tmp_path / "registry", talk)
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


def test_the_engine_s_id_of_a_request_begins_with_the_client_s(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: list[str] = []
    submit = Engine.submit

    def recorded(engine: Engine, request: Request, on_event: OnEvent) -> None:
        ids.append(request.id)
        submit(engine, request, on_event)

    monkeypatch.setattr(Engine, "submit", recorded)

    async def talk(client: httpx.AsyncClient, app: FastAPI) -> None:
        for _ in range(2):
            body = {"prompt": "a", "max_new_tokens": 1}
            reply = await client.post("/generate", json=body, headers={"X-Request-Id": "mine"})
            assert reply.headers["X-Request-Id"] == "mine"

    exercise(family, tmp_path / "registry", talk)
    assert len(set(ids)) == 2
    assert all(id.startswith("mine-") for id in ids)


def test_a_client_that_leaves_during_submission_ends_its_request(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitting, left = threading.Event(), threading.Event()
    submit = Engine.submit

    def held_up(engine: Engine, request: Request, on_event: OnEvent) -> None:
        submitting.set()
        assert left.wait(WAIT_S)
        submit(engine, request, on_event)

    monkeypatch.setattr(Engine, "submit", held_up)
    slow_down(monkeypatch)

    async def talk(client: httpx.AsyncClient, app: FastAPI) -> None:
        body = {"prompt": "a", "max_new_tokens": 200}
        asking = asyncio.create_task(client.post("/generate", json=body))
        assert await asyncio.to_thread(submitting.wait, WAIT_S)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        left.set()
        ended = 'peraxis_variant_requests_total{finish_reason="cancelled",variant="base"} 1.0'
        for _ in range(500):
            if ended in (await client.get("/metrics")).text:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the request was not cancelled")

    exercise(family, tmp_path / "registry", talk)
