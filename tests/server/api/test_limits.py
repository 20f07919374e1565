"""Limits of tenants on the routes of a service with its engine and its shared state in one process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.engine import publish
from server.api import service as service_module
from server.api import variants as variants_module
from server.tenants import admission as admission_module
from server.tenants import limits as rate_limiter
from server.tenants.admission import Admissions
from server.tenants.changes import AuditLog, Auditor
from server.tenants.keys import KeyStore
from server.tenants.limits import LimitsDirectory
from server.tenants.tenant import TenantLimits
from server.text.service import VariantText
from server.workers.pool import WorkerPool
from tests.server.helpers.http_app import HttpApp, running_app, settings_of
from tests.server.helpers.live_server import Artifacts, error_of
from tests.server.helpers.served import slow_down
from tests.server.tenants.shared import SilentState, admissions_of

BODY: dict[str, Any] = {"prompt": "hello", "temperature": 0, "max_new_tokens": 2}


@pytest.fixture(autouse=True)
def no_turn_of_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count over decades: just after the turn of a minute, what came before counts as a little less."""
    monkeypatch.setattr(rate_limiter, "WINDOW_S", 10**9)


def serve(
    artifacts: Artifacts,
    registry: Path,
    limits: TenantLimits,
    talk: Callable[[HttpApp], Awaitable[None]],
    **more: Any,
) -> None:
    """Run an application whose tenants have `limits`, and let `talk` send requests with a key of `acme`."""
    author = Auditor(AuditLog(registry))
    made = KeyStore(registry).create(author, "acme", ["inference", "publish"])

    async def main() -> None:
        settings = settings_of(artifacts.base, registry, auth="keys", default_limits=limits, **more)
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


def test_a_token_limit_refuses_the_next_request_and_never_ends_a_running_one(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    async def talk(app: HttpApp) -> None:
        body = {"model": "base", "prompt": "hello", "n": 4, "temperature": 2.0, "seed": 1}
        whole = await app.client.post("/v1/completions", json={**body, "max_tokens": 200})
        # Far more than the limit, and all that the sequences have.
        assert whole.status_code == 200, whole.text
        used = whole.json()["usage"]
        assert used["completion_tokens"] > 100
        counted = await usage(app)
        assert (counted["running"], counted["tokens_last_minute"]) == (0, used["total_tokens"])
        refused = await app.client.post("/v1/completions", json={**body, "max_tokens": 1})
        assert (refused.status_code, error_of(refused)["param"]) == (429, "tokens_per_minute")
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
        assert (await usage(app))["requests_last_minute"] == 1

    serve(artifacts, tmp_path / "registry", TenantLimits(tokens_per_minute=50), talk)


def test_tokens_of_a_stream_count_while_it_runs(
    artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = slow_down(monkeypatch)

    async def talk(app: HttpApp) -> None:
        running = asyncio.create_task(
            generate(app, prompt="a" * 60, max_new_tokens=150, temperature=2.0, seed=1)
        )
        seen = {0}
        while not running.done():
            seen.add((await usage(app))["tokens_last_minute"])
            if sum(number >= 60 for number in seen) > 1:
                is_over.set()
            await asyncio.sleep(0)
        reply = await running
        assert reply.status_code == 200, reply.text
        # Those of the prompt, and at least one slice of those that were generated, before the end.
        assert len([number for number in seen if 60 <= number < reply.json()["usage"]["total_tokens"]]) > 1

    serve(artifacts, tmp_path / "registry", TenantLimits(tokens_per_minute=1000), talk)


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
            app.service.admissions = admissions_of(limits)
            admission = await app.service.admissions.admit("acme")
            admission.count(10)
            with counted_tasks(monkeypatch) as tasks:
                refused = await app.client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1})
                assert (refused.status_code, error_of(refused)["param"]) == (429, reason)
                assert int(refused.headers["Retry-After"]) >= 1
                assert not tasks
            admission.release()

    serve(artifacts, tmp_path / "registry", TenantLimits(), talk)


def test_a_client_that_leaves_while_its_prompt_is_tokenized_is_not_running_any_more(
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


def test_after_a_refusal_by_the_engine_no_body_is_read_until_a_request_has_ended(
    artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TRY_S", "WAIT_S", "CLOSED_S"):
        monkeypatch.setattr(admission_module, name, 3600.0)
    read: list[int] = []

    async def body(number: int) -> AsyncIterator[bytes]:
        read.append(number)
        yield json.dumps(BODY).encode()

    async def talk(app: HttpApp) -> None:
        is_over = slow_down(monkeypatch)
        running = asyncio.create_task(generate(app, max_new_tokens=200))
        while not app.engine_client.num_open:
            await asyncio.sleep(0.01)
        refused = await generate(app)
        assert (refused.status_code, error_of(refused)["code"]) == (503, "overloaded")
        headers = {"Content-Type": "application/json"}
        waiting = [
            asyncio.create_task(app.client.post("/generate", content=body(number), headers=headers))
            for number in range(2)
        ]
        # Other calls of the tenant do not wait.
        assert (await usage(app))["running"] == 1
        assert not read
        is_over.set()
        assert (await running).status_code == 200
        assert [(await each).status_code for each in waiting] == [200, 200]
        assert read == [0, 1]

    serve(artifacts, tmp_path / "registry", TenantLimits(), talk, max_num_seqs=1, max_queue=1)


def test_requests_whose_clients_left_before_an_answer_make_further_ones_wait(
    artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TRY_S", "WAIT_S", "CLOSED_S"):
        monkeypatch.setattr(admission_module, name, 3600.0)
    # One in a thousand seconds.
    monkeypatch.setattr(admission_module, "MAX_VAIN", 0.001)

    async def talk(app: HttpApp) -> None:
        is_over = slow_down(monkeypatch)
        running = asyncio.create_task(generate(app, max_new_tokens=200))
        while app.engine_client.num_open != 1:
            await asyncio.sleep(0.01)
        leaving = asyncio.create_task(generate(app))
        while app.engine_client.num_open != 2:
            await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.wait({leaving})
        waiting = asyncio.create_task(generate(app))
        while not app.service.admissions._windows._windows["acme"].waiting:
            await asyncio.sleep(0.01)
        assert app.engine_client.num_open == 1
        is_over.set()
        assert (await running).status_code == (await waiting).status_code == 200

    serve(artifacts, tmp_path / "registry", TenantLimits(), talk, max_num_seqs=1, max_queue=8)


def test_requests_that_fail_or_are_left_are_not_running_any_more(
    artifacts: Artifacts, tmp_path: Path
) -> None:
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
    monkeypatch.setattr(admission_module, "ANSWER_S", 0.01)

    async def talk(app: HttpApp) -> None:
        app.service.admissions = Admissions(SilentState().shared)
        reply = await generate(app)
        assert (reply.status_code, error_of(reply)["code"]) == (503, "overloaded")
        assert "Retry-After" in reply.headers
        assert app.engine_client.num_open == 0

    serve(artifacts, tmp_path / "registry", TenantLimits(), talk)


def test_by_default_a_tenant_pins_half_of_the_slots(
    artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each answer waits for its load.
    monkeypatch.setattr(variants_module, "OUTCOME_S", 240.0)

    async def talk(app: HttpApp) -> None:
        for name in ("chatty", "plain"):
            publish(app.service.registry, getattr(artifacts, name), name, "acme")
        first, second = [await app.client.post(f"/variants/{name}/pin") for name in ("chatty", "plain")]
        assert first.status_code == 202
        assert (second.status_code, error_of(second)["param"]) == (429, "max_pinned")
        assert (await app.client.post("/variants/chatty/unpin")).status_code == 202
        assert (await app.client.post("/variants/plain/pin")).status_code == 202

    serve(artifacts, tmp_path / "registry", TenantLimits(), talk)


@pytest.mark.parametrize("action", ["load", "unload", "pin", "unpin"])
def test_calls_without_an_outcome_are_bounded(
    artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """Those of one tenant leave room for those of others, and none is counted once it has an outcome."""
    monkeypatch.setattr(variants_module, "OUTCOME_S", 0.001)
    monkeypatch.setattr(service_module, "MAX_LOAD_CALLS", 6)

    async def talk(app: HttpApp) -> None:
        outcomes: list[asyncio.Future[None]] = []

        def load(*_: Any) -> asyncio.Future[None]:
            outcomes.append(asyncio.get_running_loop().create_future())
            return outcomes[-1]

        async def call() -> tuple[int, str | None]:
            reply = await app.client.post(f"/variants/plain/{action}")
            return reply.status_code, None if reply.status_code == 202 else error_of(reply)["code"]

        record = publish(app.service.registry, artifacts.plain, "plain", "acme")
        monkeypatch.setattr(app.service.engine, "load", load)
        assert [await call() for _ in range(4)] == [(202, None)] * 3 + [(503, "overloaded")]
        app.service.load("load", replace(record, tenant="other"))
        for outcome in outcomes:
            outcome.set_result(None)
        assert [await call() for _ in range(4)] == [(202, None)] * 3 + [(503, "overloaded")]
        # A service that closes waits until it has noted pins.
        for outcome in outcomes[4:]:
            outcome.set_result(None)

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
