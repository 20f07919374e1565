"""Limits of tenants on the routes of a service with its engine and its ledger in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.serving import publish
from server.api import generate as generate_route
from server.api.submission import GenerationCall
from server.protocol.limits import (
    AddTokens,
    GiveBack,
    LimitAnswer,
    LimitQuestion,
    Tokens,
)
from server.tenants.audit import AuditLog, Auditor
from server.tenants.keys import KeyStore
from server.tenants.limits import limiter as limiter_module
from server.tenants.limits import windows
from server.tenants.limits.directory import LimitsDirectory
from server.tenants.limits.ledger import Ledger
from server.tenants.limits.limiter import Limiter
from server.tenants.limits.local_link import LocalLink
from server.tenants.limits.tenant_limits import TenantLimits
from server.text.variant_text import VariantText
from server.workers.pool import WorkerPool
from tests.server.helpers.http_app import HttpApp, running_app, settings_of
from tests.server.helpers.live_server import Artifacts, error_of

BODY: dict[str, Any] = {"prompt": "hello", "temperature": 0, "max_new_tokens": 2}


@pytest.fixture(autouse=True)
def no_turn_of_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count over decades: just after the turn of a minute, what came before counts as a little less."""
    monkeypatch.setattr(windows, "WINDOW_S", 10**9)


def serve(
    artifacts: Artifacts, registry: Path, limits: TenantLimits, talk: Callable[[HttpApp], Awaitable[None]]
) -> None:
    """Run an application whose tenants have `limits`, and let `talk` send requests with a key of `acme`."""
    author = Auditor(AuditLog(registry))
    made = KeyStore(registry).create(author, "acme", ["inference", "publish"])

    async def main() -> None:
        settings = settings_of(artifacts.base, registry, auth="keys", default_limits=limits)
        async with running_app(settings) as app, app.engine():
            app.client.headers["Authorization"] = f"Bearer {made.text}"
            await talk(app)

    asyncio.run(main())


async def generate(app: HttpApp, **body: Any) -> httpx.Response:
    return await app.client.post("/generate", json={**BODY, **body})


async def usage(app: HttpApp) -> dict[str, int]:
    document: dict[str, int] = (await app.client.get("/me")).json()["usage"]
    return document


def test_every_prompt_of_a_call_is_a_request_and_every_token_of_its_sequences_counts(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    async def talk(app: HttpApp) -> None:
        body = {"model": "base", "prompt": ["hello", "there"], "max_tokens": 3, "n": 2, "temperature": 1}
        reply = await app.client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        counted = await usage(app)
        assert counted["requests_last_minute"] == 2
        assert counted["tokens_last_minute"] == reply.json()["usage"]["total_tokens"]
        assert counted["running"] == 0
        assert reply.headers["x-ratelimit-remaining-requests"] == "2"
        assert (await generate(app)).status_code == 200
        # Two prompts are more than the one request that is left, and its body was read.
        refused = await app.client.post("/v1/completions", json=body)
        assert (refused.status_code, error_of(refused)["param"]) == (429, "requests_per_minute")
        assert await usage(app) == {**await usage(app), "requests_last_minute": 4, "running": 0}

    serve(artifacts, tmp_path / "registry", TenantLimits(requests_per_minute=4), talk)


def test_calls_at_the_same_time_share_what_the_tenant_may_still_generate(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    async def talk(app: HttpApp) -> None:
        body = {"model": "base", "prompt": "hello", "max_tokens": 10, "n": 4, "temperature": 1}
        sending = (app.client.post("/v1/completions", json=body) for _ in range(8))
        replies = await asyncio.gather(*sending)
        assert {reply.status_code for reply in replies} == {200, 429}
        refused = next(reply for reply in replies if reply.status_code == 429)
        assert error_of(refused)["param"] == "tokens_per_minute"
        assert int(refused.headers["Retry-After"]) >= 1
        assert (await usage(app))["tokens_last_minute"] <= 100
        too_large = await app.client.post("/v1/completions", json={**body, "max_tokens": 25})
        assert (too_large.status_code, error_of(too_large)["param"]) == (400, "max_tokens")
        assert "lower max_tokens" in error_of(too_large)["message"]

    serve(artifacts, tmp_path / "registry", TenantLimits(tokens_per_minute=100), talk)


def test_calls_that_use_a_tokenizer_count_as_requests(artifacts: Artifacts, tmp_path: Path) -> None:
    async def talk(app: HttpApp) -> None:
        for route, body in (("/tokenize", {"prompt": "hello"}), ("/detokenize", {"tokens": [65]})):
            assert (await app.client.post(route, json=body)).status_code == 200
        assert await usage(app) == {**await usage(app), "requests_last_minute": 2, "running": 0}
        for route, body in (("/tokenize", {"prompt": "hello"}), ("/detokenize", {"tokens": [65]})):
            refused = await app.client.post(route, json=body)
            assert (refused.status_code, error_of(refused)["param"]) == (429, "requests_per_minute")

    serve(artifacts, tmp_path / "registry", TenantLimits(requests_per_minute=2), talk)


CHAT: dict[str, Any] = {"model": "chatty", "messages": [{"role": "user", "content": "hi"}]}


def limiter_of(limits: TenantLimits) -> Limiter:
    """Make a limiter with a ledger of its own, by which every tenant has the same limits."""
    return Limiter(LocalLink(Ledger(lambda tenant: limits)))


@contextmanager
def counted_tasks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield the names of the functions that workers were given inside the block."""
    functions: list[str] = []
    run = WorkerPool.run

    async def counted(
        pool: WorkerPool, share: Any, deadline_s: float, function: Any, *args: Any, **options: Any
    ) -> Any:
        functions.append(function.__name__)
        return await run(pool, share, deadline_s, function, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(WorkerPool, "run", counted)
        yield functions


def test_a_tenant_over_its_requests_never_reaches_a_worker(
    artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk(app: HttpApp) -> None:
        publish(app.service.registry, artifacts.chatty, "chatty", "acme")
        with counted_tasks(monkeypatch) as tasks:
            assert (await app.client.post("/v1/chat/completions", json=CHAT)).status_code == 200
            assert tasks
            tasks.clear()
            refused = await app.client.post("/v1/chat/completions", json=CHAT)
            assert (refused.status_code, error_of(refused)["param"]) == (429, "requests_per_minute")
            assert not tasks
        assert (await usage(app))["requests_last_minute"] == 1

    serve(artifacts, tmp_path / "registry", TenantLimits(requests_per_minute=1), talk)


def test_a_tenant_with_all_its_running_requests_or_tokens_never_reaches_a_worker(
    artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk(app: HttpApp) -> None:
        publish(app.service.registry, artifacts.chatty, "chatty", "acme")
        for limits, reason in (
            (TenantLimits(max_running=1), "max_running"),
            (TenantLimits(tokens_per_minute=10), "tokens_per_minute"),
        ):
            app.service.limiter = limiter_of(limits)
            seat = await app.service.limiter.admit("acme")
            await seat.add_tokens(Tokens(1, 8), "max_tokens")
            with counted_tasks(monkeypatch) as tasks:
                body = {**CHAT, "max_tokens": 1}
                refused = await app.client.post("/v1/chat/completions", json=body)
                assert (refused.status_code, error_of(refused)["param"]) == (429, reason)
                assert refused.headers["Retry-After"] == "1"
                assert not tasks
            seat.release()

    serve(artifacts, tmp_path / "registry", TenantLimits(), talk)


def test_tokens_that_are_refused_when_they_are_known_free_the_seat_and_count_as_a_request(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    async def talk(app: HttpApp) -> None:
        assert (await generate(app, prompt="a" * 60)).status_code == 200
        refused = await generate(app, prompt="a" * 60)
        assert (refused.status_code, error_of(refused)["param"]) == (429, "tokens_per_minute")
        assert int(refused.headers["Retry-After"]) > 1
        counted = await usage(app)
        assert (counted["running"], counted["requests_last_minute"]) == (0, 2)
        assert 60 < counted["tokens_last_minute"] <= 62
        assert refused.headers["x-ratelimit-remaining-tokens"] == str(100 - counted["tokens_last_minute"])
        assert (await generate(app, prompt="a")).status_code == 200

    serve(artifacts, tmp_path / "registry", TenantLimits(tokens_per_minute=100, max_running=1), talk)


def test_a_client_that_leaves_while_its_prompt_is_tokenized_frees_its_seat(
    artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def endless(text: VariantText, *_: Any) -> list[int]:
        begun.set()
        await asyncio.Event().wait()
        return []

    async def talk(app: HttpApp) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(VariantText, "encode", endless)
            leaving = asyncio.create_task(generate(app))
            await begun.wait()
            assert (await usage(app))["running"] == 1
            leaving.cancel()
            await asyncio.wait({leaving})
        assert (await usage(app))["running"] == 0
        assert (await generate(app)).status_code == 200

    serve(artifacts, tmp_path / "registry", TenantLimits(max_running=1), talk)


def test_a_request_counts_before_its_body_is_read_whatever_becomes_of_it(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    read: list[str] = []

    async def talk(app: HttpApp) -> None:
        async def body(route: str) -> AsyncIterator[bytes]:
            read.append(route)
            yield b"[" * 1000

        headers = {"Content-Type": "application/json"}
        unknown = await app.client.post("/generate?variant=absent", json=BODY)
        assert (unknown.status_code, error_of(unknown)["code"]) == (404, "model_not_found")
        for status in (400, 429):
            for route in ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                reply = await app.client.post(route, content=body(route), headers=headers)
                assert reply.status_code == status, route
        assert await usage(app) == {**await usage(app), "requests_last_minute": 6, "running": 0}
        assert len(read) == 5

    serve(artifacts, tmp_path / "registry", TenantLimits(requests_per_minute=6), talk)


def test_a_chat_without_a_length_is_admitted_with_a_few_tokens_and_one_with_a_length_with_all_of_them(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    async def talk(app: HttpApp) -> None:
        publish(app.service.registry, artifacts.chatty, "chatty", "acme")
        body = {"messages": CHAT["messages"], "model": "chatty"}
        num_prompt = (await app.client.post("/tokenize", json=body)).json()["count"]
        # The variant's own default is five new tokens.
        app.service.limiter = limiter_of(TenantLimits(tokens_per_minute=num_prompt + 3))
        too_long = await app.client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 5})
        assert (too_long.status_code, error_of(too_long)["param"]) == (400, "max_tokens")
        reply = await app.client.post("/v1/chat/completions", json=CHAT)
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-ratelimit-remaining-tokens"] == "0"
        refused = await app.client.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, error_of(refused)["param"]) == (429, "tokens_per_minute")

    serve(artifacts, tmp_path / "registry", TenantLimits(), talk)


def test_a_call_without_a_length_ends_when_it_has_used_twice_the_limit(
    artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a chat's: without it, outputs have 16 tokens.
    monkeypatch.setattr(generate_route, "GenerationCall", partial(GenerationCall, default_new_tokens=None))

    async def talk(app: HttpApp) -> None:
        body = {"prompt": "hello", "temperature": 2.0, "seed": 1, "n": 4}
        reply = await app.client.post("/generate", json=body)
        assert reply.status_code == 200, reply.text
        assert "length" in {output["finish_reason"] for output in reply.json()["outputs"]}
        # The ledger's answer takes a few steps, more on a busy machine; the whole contexts have some 1000 tokens.
        assert 70 < reply.json()["usage"]["completion_tokens"] < 800
        counted = await usage(app)
        assert counted["tokens_last_minute"] == reply.json()["usage"]["total_tokens"]
        refused = await generate(app)
        assert (refused.status_code, error_of(refused)["param"]) == (429, "tokens_per_minute")

    serve(artifacts, tmp_path / "registry", TenantLimits(tokens_per_minute=50), talk)


def test_sequences_that_have_not_started_end_with_the_others_of_their_call(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    async def talk(app: HttpApp) -> None:
        body = {"model": "base", "prompt": ["hello"] * 10, "n": 100, "temperature": 2.0, "seed": 1}
        reply = await app.client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        choices = reply.json()["choices"]
        assert len(choices) == 1000
        # How many depends on when the ledger answers.
        assert sum(not choice["text"] for choice in choices) > 100
        assert "length" in {choice["finish_reason"] for choice in choices}
        counted = await usage(app)
        assert (counted["running"], counted["tokens_last_minute"]) == (
            0,
            reply.json()["usage"]["total_tokens"],
        )

    serve(artifacts, tmp_path / "registry", TenantLimits(tokens_per_minute=100), talk)


def test_requests_that_fail_or_are_left_give_their_seats_back(artifacts: Artifacts, tmp_path: Path) -> None:
    async def talk(app: HttpApp) -> None:
        leaving = asyncio.create_task(generate(app, max_new_tokens=200, n=4))
        while not (await usage(app))["running"]:
            await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.wait({leaving})
        while (await usage(app))["running"]:
            await asyncio.sleep(0.01)
        assert (await generate(app, prompt="hello " * 300)).status_code == 400
        assert (await generate(app)).status_code == 200
        assert (await usage(app))["running"] == 0

    serve(artifacts, tmp_path / "registry", TenantLimits(max_running=1), talk)


def test_without_an_answer_about_its_limits_a_request_is_refused(
    artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SilentLedger:
        async def ask(self, call: LimitQuestion) -> LimitAnswer:
            await asyncio.Event().wait()
            raise AssertionError

        def tell(self, call: AddTokens | GiveBack) -> None:
            """Nothing was taken."""

    monkeypatch.setattr(limiter_module, "ANSWER_S", 0.01)

    async def talk(app: HttpApp) -> None:
        app.service.limiter = Limiter(SilentLedger())
        reply = await generate(app)
        assert (reply.status_code, error_of(reply)["code"]) == (503, "overloaded")
        assert "Retry-After" in reply.headers
        assert app.engine_client.num_open == 0

    serve(artifacts, tmp_path / "registry", TenantLimits(), talk)


def test_by_default_a_tenant_pins_half_of_the_slots(artifacts: Artifacts, tmp_path: Path) -> None:
    async def talk(app: HttpApp) -> None:
        for name in ("chatty", "plain"):
            publish(app.service.registry, getattr(artifacts, name), name, "acme")
        first, second = [await app.client.post(f"/variants/{name}/pin") for name in ("chatty", "plain")]
        assert first.status_code == 202
        assert (second.status_code, error_of(second)["param"]) == (429, "max_pinned")
        assert (await app.client.post("/variants/chatty/unpin")).status_code == 202
        assert (await app.client.post("/variants/plain/pin")).status_code == 202

    serve(artifacts, tmp_path / "registry", TenantLimits(), talk)


def test_without_keys_there_are_no_limits(artifacts: Artifacts, tmp_path: Path) -> None:
    registry = tmp_path / "registry"
    LimitsDirectory(registry, TenantLimits()).write("default", TenantLimits(requests_per_minute=1))

    async def main() -> None:
        async with running_app(settings_of(artifacts.base, registry)) as app, app.engine():
            for _ in range(3):
                reply = await generate(app)
                assert reply.status_code == 200
                assert not [name for name in reply.headers if name.startswith("x-ratelimit")]
            document = (await app.client.get("/me")).json()
            assert (document["tenant"], document["key"]) == ("default", None)
            assert document["usage"]["requests_last_minute"] is None

    asyncio.run(main())
