"""Calls of several requests with the application in the tests' process: they end together, and replies are bounded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from server.api import generation
from tests.server.helpers.http_app import HttpApp, with_engine
from tests.server.helpers.live_server import error_of
from tests.server.helpers.served import Family, make_family

WAIT_S = 240.0
PROMPTS = ["a", "bc", "def"]
# Ends only when it is cancelled: with this seed, sequences are long.
LONG = {"model": "base", "prompt": PROMPTS, "max_tokens": 200, "n": 30, "temperature": 2.0, "seed": 1}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("family"), seed=5, num_variants=0)


async def ended(app: HttpApp, count: int) -> None:
    """Wait until the engine has cancelled a number of requests."""
    series = f'peraxis_variant_requests_total{{finish_reason="cancelled",variant="base"}} {count}.0'
    while series not in (await app.client.get("/metrics")).text:
        await asyncio.sleep(0.02)
    assert app.engine_client.num_open == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_the_requests_of_all_its_prompts(
    family: Family, tmp_path: Path, stream: bool
) -> None:
    async def talk(app: HttpApp) -> None:
        asking = asyncio.create_task(app.client.post("/v1/completions", json={**LONG, "stream": stream}))
        while app.engine_client.num_open < len(PROMPTS):
            await asyncio.sleep(0.001)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await ended(app, len(PROMPTS))

    with_engine(family.base, tmp_path / "registry", talk)


def test_a_request_that_fails_ends_the_others_of_its_call(family: Family, tmp_path: Path) -> None:
    async def talk(app: HttpApp) -> None:
        # The engine has four places: one is left for a second call.
        first = asyncio.create_task(app.client.post("/v1/completions", json=LONG))
        while app.engine_client.num_open < len(PROMPTS):
            await asyncio.sleep(0.001)
        reply = await app.client.post("/v1/completions", json=LONG)
        assert (reply.status_code, error_of(reply)["code"]) == (503, "overloaded")
        first.cancel()
        await ended(app, len(PROMPTS) + 1)

    with_engine(family.base, tmp_path / "registry", talk, max_num_seqs=1, max_queue=3)


def test_of_a_call_with_an_unfit_prompt_no_request_begins(family: Family, tmp_path: Path) -> None:
    async def talk(app: HttpApp) -> None:
        body = {**LONG, "prompt": [[1, 2], [3], [100_000]]}
        reply = await app.client.post("/v1/completions", json=body)
        assert (reply.status_code, error_of(reply)["param"]) == (400, "prompt")
        assert app.engine_client.num_open == 0
        await ended(app, 0)

    with_engine(family.base, tmp_path / "registry", talk)


def test_a_whole_reply_with_too_many_log_probabilities_is_refused(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "MAX_LOGPROBS", 100)

    async def talk(app: HttpApp) -> None:
        reply = await app.client.post("/v1/completions", json={**LONG, "logprobs": 2})
        assert (reply.status_code, error_of(reply)["param"]) == (400, "logprobs")
        await ended(app, len(PROMPTS))
        body = {
            "model": "base",
            "prompt": "a",
            "max_tokens": 40,
            "logprobs": 2,
            "seed": 1,
            "temperature": 2.0,
        }
        streamed = await app.client.post("/v1/completions", json={**body, "stream": True})
        assert streamed.status_code == 200
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert "error" not in streamed.text

    with_engine(family.base, tmp_path / "registry", talk)
