"""Replies while the base loads, while the engine restarts, while the server drains, and when a route has a bug."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.api import inference
from server.api.generation import TOKEN_BYTES
from server.api.outputs import TextToken
from tests.server.helpers.http_app import HttpApp, running_app, settings_of, with_engine
from tests.server.helpers.live_server import error_of
from tests.server.helpers.served import Family, make_family
from tests.server.metrics.helpers.samples import value_of


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("family"), seed=5, num_variants=0)


def exercise(base: Path, tmp_path: Path, talk: Callable[[HttpApp], Awaitable[None]]) -> None:
    """Run an application on `base`, without an engine at first, and let `talk` send requests to it."""

    async def main() -> None:
        async with running_app(settings_of(base, tmp_path / "registry")) as app:
            await talk(app)

    asyncio.run(main())


def num_cancelled(app: HttpApp) -> float:
    """Return how many requests to the base the engine has counted as cancelled."""
    labels = {"finish_reason": "cancelled", "variant": "base"}
    return value_of(app.metrics.engine, "peraxis_variant_requests_total", labels) or 0.0


def is_refused(reply: httpx.Response, code: str) -> bool:
    retries = int(reply.headers["Retry-After"]) > 0
    return (reply.status_code, error_of(reply)["code"], retries) == (503, code, True)


def test_while_the_base_loads_the_server_is_alive_and_not_ready(family: Family, tmp_path: Path) -> None:
    async def talk(app: HttpApp) -> None:
        client = app.client
        assert (await client.get("/health")).status_code == 200
        for reply in (await client.get("/ready"), await client.post("/generate", json={"prompt": "a"})):
            assert is_refused(reply, "overloaded")
        assert "peraxis_ready 0.0" in (await client.get("/metrics")).text
        async with app.engine():
            assert (await client.get("/ready")).status_code == 200
            assert "peraxis_ready 1.0" in (await client.get("/metrics")).text

    exercise(family.base, tmp_path, talk)


def test_the_tokens_of_a_whole_reply_count_as_unread_until_it_is_sent(family: Family, tmp_path: Path) -> None:
    async def talk(app: HttpApp) -> None:
        unsent = app.service.unsent
        # At least a token of each sequence.
        body = {"prompt": "a", "max_new_tokens": 4, "n": 8}
        async with app.engine():
            assert (await app.client.post("/generate", json=body)).status_code == 200
            unsent.free = 8 * TOKEN_BYTES
            assert is_refused(await app.client.post("/generate", json=body), "overloaded")
            short = {**body, "max_new_tokens": 1, "n": 1}
            assert (await app.client.post("/generate", json=short)).status_code == 200
        assert unsent.free == 8 * TOKEN_BYTES

    exercise(family.base, tmp_path, talk)


def test_between_two_engines_requests_are_told_so_and_the_server_is_alive(
    family: Family, tmp_path: Path
) -> None:
    async def talk(app: HttpApp) -> None:
        client = app.client
        async with app.engine():
            assert (await client.get("/ready")).status_code == 200
        for reply in (await client.get("/ready"), await client.post("/generate", json={"prompt": "a"})):
            assert is_refused(reply, "engine_restarted")
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200
        text = (await client.get("/metrics")).text
        assert 'peraxis_admission_rejections_total{reason="engine_restarted"} 1.0' in text
        async with app.engine():
            reply = await client.post("/generate", json={"prompt": "a", "max_new_tokens": 1})
            assert reply.status_code == 200

    exercise(family.base, tmp_path, talk)


def test_requests_of_a_lost_engine_end_with_an_error(family: Family, tmp_path: Path) -> None:
    async def talk(app: HttpApp) -> None:
        async with app.engine():
            body = {"prompt": "a", "max_new_tokens": 200, "n": 100, "temperature": 2.0, "seed": 1}
            asking = asyncio.create_task(app.client.post("/generate", json=body))
            while not app.engine_client.num_open:
                await asyncio.sleep(0.01)
            app.service.engine.disconnect()
            assert is_refused(await asking, "engine_restarted")
            # An engine that stops before it has missed its client counts the request as failed, too.
            while not num_cancelled(app):
                await asyncio.sleep(0.01)
        text = (await app.client.get("/metrics")).text
        assert 'peraxis_variant_requests_total{finish_reason="error",variant="base"} 1.0' in text

    exercise(family.base, tmp_path, talk)


def test_a_draining_server_refuses_and_says_so(family: Family, tmp_path: Path) -> None:
    async def talk(app: HttpApp) -> None:
        async with app.engine():
            app.service.draining = True
            for reply in (
                await app.client.get("/ready"),
                await app.client.post("/generate", json={"prompt": "a"}),
            ):
                assert is_refused(reply, "draining")

    exercise(family.base, tmp_path, talk)


def test_a_bug_in_a_route_shows_an_id_and_no_traceback(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk(app: HttpApp) -> None:
        def broken(tenant: str) -> None:
            raise RuntimeError("a secret of the server")

        monkeypatch.setattr(app.service.registry, "names", broken)
        reply = await app.client.get("/variants")
        error = error_of(reply)
        assert (reply.status_code, error["code"], error["type"]) == (500, "internal_error", "server_error")
        assert reply.headers["X-Request-Id"] in error["message"]
        assert "secret" not in error["message"]
        monkeypatch.undo()
        assert 'code="500",route="/variants"} 1.0' in (await app.client.get("/metrics")).text

    exercise(family.base, tmp_path, talk)


@pytest.mark.parametrize("is_stream", [False, True])
def test_log_probabilities_of_prompts_become_json_beside_the_event_loop(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    """Those of one reply take 0.2 s, charged to its tenant."""
    threads = set[threading.Thread]()
    made = inference.completion_logprobs

    def noted(tokens: Iterable[TextToken], num_chars: int = 0) -> dict[str, list[Any]]:
        threads.add(threading.current_thread())
        return made(tokens, num_chars)

    async def talk(app: HttpApp) -> None:
        monkeypatch.setattr(inference, "completion_logprobs", noted)
        body = {"model": "base", "prompt": [3, 4, 5], "max_tokens": 2, "echo": True, "logprobs": 1}
        reply = await app.client.post("/v1/completions", json={**body, "stream": is_stream})
        assert b'"token_logprobs":[null,' in reply.content
        assert threads
        assert threading.main_thread() not in threads

    with_engine(family.base, tmp_path / "registry", talk)
