"""Replies while the base loads, when the engine is stuck, and when a route has a bug."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from deltastore.errors import CheckpointError
from server.api.service import Backend
from server.app import create_app
from server.engine.engine import Engine
from server.settings import Settings
from server.text.tokenizer import Tokenizers
from tests.server.helpers.live_server import error_of


class EngineStub:
    """An engine without a model, for health checks and shutdown. It is also its own tokenizers."""

    is_alive = True

    def alive(self) -> bool:
        return self.is_alive

    def drain(self) -> None:
        self.is_drained = True

    def close(self, timeout_s: float = 0.0) -> None:
        self.is_closed = True


@pytest.fixture
def engine() -> EngineStub:
    return EngineStub()


def exercise(
    tmp_path: Path,
    build: Callable[[], EngineStub],
    talk: Callable[[httpx.AsyncClient, FastAPI], Awaitable[None]],
) -> None:
    """Run an application whose backend comes from `build`, and let `talk` send requests to it."""

    def backend(*_: Any) -> Backend:
        engine = build()
        return Backend(cast(Engine, engine), cast(Tokenizers, engine))

    async def main() -> None:
        app = create_app(Settings(base=tmp_path, registry=tmp_path / "registry", shutdown_timeout=5), backend)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            await talk(client, app)

    asyncio.run(main())


def test_while_the_base_loads_the_server_is_alive_and_not_ready(tmp_path: Path, engine: EngineStub) -> None:
    may_end = threading.Event()

    def build() -> EngineStub:
        may_end.wait(60)
        return engine

    async def talk(client: httpx.AsyncClient, app: FastAPI) -> None:
        assert (await client.get("/health")).status_code == 200
        for reply in (await client.get("/ready"), await client.post("/generate", json={"prompt": "a"})):
            assert (reply.status_code, error_of(reply)["code"]) == (503, "overloaded")
            assert reply.headers["Retry-After"] == "1"
        assert "peraxis_ready 0.0" in (await client.get("/metrics")).text
        may_end.set()
        await app.state.service.loading
        assert (await client.get("/ready")).status_code == 200
        assert "peraxis_ready 1.0" in (await client.get("/metrics")).text

    exercise(tmp_path, build, talk)


def test_loading_ends_with_the_error_of_the_base(tmp_path: Path) -> None:
    def build() -> EngineStub:
        raise CheckpointError("no such base")

    async def talk(client: httpx.AsyncClient, app: FastAPI) -> None:
        with pytest.raises(CheckpointError):
            await app.state.service.loading
        assert (await client.get("/ready")).status_code == 503

    exercise(tmp_path, build, talk)


def test_a_stuck_engine_is_neither_healthy_nor_ready(tmp_path: Path, engine: EngineStub) -> None:
    async def talk(client: httpx.AsyncClient, app: FastAPI) -> None:
        await app.state.service.loading
        engine.is_alive = False
        for path in ("/health", "/ready"):
            reply = await client.get(path)
            assert (reply.status_code, error_of(reply)["code"]) == (500, "internal_error")

    exercise(tmp_path, lambda: engine, talk)


def test_the_end_drains_and_closes_the_engine(tmp_path: Path, engine: EngineStub) -> None:
    async def talk(client: httpx.AsyncClient, app: FastAPI) -> None:
        await app.state.service.loading

    exercise(tmp_path, lambda: engine, talk)
    assert engine.is_drained
    assert engine.is_closed


def test_a_bug_in_a_route_shows_an_id_and_no_traceback(tmp_path: Path, engine: EngineStub) -> None:
    async def talk(client: httpx.AsyncClient, app: FastAPI) -> None:
        await app.state.service.loading
        reply = await client.get("/v1/models")  # EngineStub has no base
        error = error_of(reply)
        assert (reply.status_code, error["code"], error["type"]) == (500, "internal_error", "server_error")
        assert reply.headers["X-Request-Id"] in error["message"]
        assert "base" not in error["message"]
        assert 'code="500",route="/v1/models"} 1.0' in (await client.get("/metrics")).text

    exercise(tmp_path, lambda: engine, talk)
