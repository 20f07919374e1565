"""One tenant's requests beside another's on a running server: places in the queue, and sequences of one prompt."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.tenants.changes import AuditLog, Auditor
from server.tenants.keys import KeyStore
from server.tenants.tenant import Role
from tests.helpers.tiny_models import make_pair
from tests.server.helpers.live_server import (
    MAX_MODEL_LEN,
    LiveServer,
    error_of,
    live_server,
)
from tests.server.supervisor.test_faults import ENGINE, LONG, processes
from tests.vllm.helpers.environment import NEEDS_VLLM, PYTHON, SIZES

NUM_ROWS, NUM_WAITING = 4, 124
NUM_OPEN = NUM_ROWS + NUM_WAITING
WAIT_S = 240.0


@dataclass(slots=True)
class Tenants:
    """A running server of few rows, and keys of its tenants."""

    server: LiveServer

    @asynccontextmanager
    async def client(self, tenant: str, role: Role = "inference") -> AsyncIterator[httpx.AsyncClient]:
        """Yield a client with a new key of a tenant."""
        author = Auditor(AuditLog(self.server.registry))
        made = KeyStore(self.server.registry).create(author, tenant, (role,))
        headers = {"Authorization": f"Bearer {made.text}"}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self.server.url, headers=headers, timeout=WAIT_S, limits=limits
        ) as client:
            while (await client.get("/me")).status_code != 200:
                await asyncio.sleep(0.02)
            yield client

    def engine_bytes(self) -> int:
        [engine] = processes(self.server, ENGINE)
        resident: int = engine.memory_info().rss
        return resident


@pytest.fixture(scope="module", params=["native", pytest.param("vllm", marks=NEEDS_VLLM)])
def tenants(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    directory = tmp_path_factory.mktemp("shares")
    sizes: dict[str, Any] = {**SIZES, "max_position_embeddings": MAX_MODEL_LEN}
    base = make_pair("llama", directory, changes=(), **sizes).base
    options = ("--auth", "keys", "--max-num-seqs", NUM_ROWS, "--max-queue", NUM_WAITING)
    backend: list[object] = ["--backend", request.param]
    if request.param == "vllm":
        backend += ["--engine-python", PYTHON]
    with live_server(base, directory / "registry", *options, *backend, "--kv-cache-gb", 0.1) as server:
        yield Tenants(server)


async def num_open(admin: httpx.AsyncClient) -> float:
    """Return the number of requests that run or wait in the engine."""
    lines = (await admin.get("/metrics")).text.splitlines()
    names = ("peraxis_num_requests_running ", "peraxis_num_requests_waiting ")
    return sum(float(line.split()[1]) for line in lines if line.startswith(names))


async def wait_for_open(admin: httpx.AsyncClient, number: int) -> None:
    while await num_open(admin) != number:
        await asyncio.sleep(0.05)


def test_a_tenant_has_as_many_open_requests_as_it_leaves_free(tenants: Tenants) -> None:
    async def keep_one_open(client: httpx.AsyncClient, refusals: asyncio.Queue[httpx.Response]) -> None:
        async with client.stream(
            "POST", "/generate", json={"prompt": "hello", "stream": True, **LONG}
        ) as reply:
            if reply.status_code != 200:
                await reply.aread()
                refusals.put_nowait(reply)
            await asyncio.Event().wait()

    async def talk(crowd: httpx.AsyncClient, one: httpx.AsyncClient, admin: httpx.AsyncClient) -> None:
        refusals: asyncio.Queue[httpx.Response] = asyncio.Queue()
        opened = [asyncio.create_task(keep_one_open(crowd, refusals)) for _ in range(NUM_OPEN // 2)]
        await wait_for_open(admin, NUM_OPEN // 2)
        refused = await crowd.post("/generate", json={"prompt": "hello"})
        assert (refused.status_code, error_of(refused)["code"]) == (503, "overloaded")
        assert refused.headers["Retry-After"] == "1"
        reply = await one.post("/generate", json={"prompt": "hello", "max_new_tokens": 3, "temperature": 0})
        assert reply.status_code == 200, reply.text
        # A call of more prompts than a tenant alone may have open would never be served.
        body = {"model": "base", "prompt": ["hello"] * (NUM_OPEN // 2 + 1), "max_tokens": 1}
        refused = await one.post("/v1/completions", json=body)
        assert (refused.status_code, error_of(refused)["param"]) == (400, "prompt")
        # None of the first ones has ended.
        assert refusals.empty()
        for task in opened:
            task.cancel()
        await asyncio.wait(opened)
        await wait_for_open(admin, 0)

    run(tenants, talk, "crowd", "one")


@pytest.mark.timeout(1800)
def test_sequences_of_one_prompt_take_no_memory_before_they_have_a_row(tenants: Tenants) -> None:
    num_prompts, n, num_calls = 8, 128, 7
    prompt = [5 + position % 100 for position in range(MAX_MODEL_LEN // 2)]

    kept: list[AsyncIterator[bytes]] = []

    async def until_each_has_a_token(
        client: httpx.AsyncClient, stack: AsyncExitStack, num_prompts: int
    ) -> None:
        """Send a call, and return when each of its prompts has a token; the call goes on until the stack is closed."""
        body = {
            "model": "base", "prompt": [prompt] * num_prompts, "n": n, "max_tokens": 2, "temperature": 2.0,
            "seed": 1, "stream": True,
        }  # fmt: skip
        reply = await stack.enter_async_context(client.stream("POST", "/v1/completions", json=body))
        assert reply.status_code == 200, await reply.aread()
        parts = reply.aiter_bytes()
        # An iterator that is dropped ends its stream.
        kept.append(parts)
        missing, received = {n * number for number in range(num_prompts)}, b""
        while missing:
            received += await anext(parts)
            missing -= set(map(int, re.findall(rb'"index": ?(\d+)[,}]', received)))

    async def talk(client: httpx.AsyncClient, admin: httpx.AsyncClient) -> None:
        async with AsyncExitStack() as stack:
            await until_each_has_a_token(client, stack, 1)
        await wait_for_open(admin, 0)
        before = tenants.engine_bytes()
        async with AsyncExitStack() as stack:
            await asyncio.gather(
                *(until_each_has_a_token(client, stack, num_prompts) for _ in range(num_calls))
            )
            # A copy of the prompt and a sampler for each sequence take 150 MB.
            assert tenants.engine_bytes() - before < 60 << 20
        await wait_for_open(admin, 0)

    run(tenants, talk, "many")


def test_requests_that_fill_the_kv_cache_keep_no_other_tenant_waiting(tmp_path: Path) -> None:
    """One answers for minutes, and one of another tenant waits for more pages than that leaves."""
    num_tokens = 1 << 13
    base = make_pair("llama", tmp_path, changes=(), **{**SIZES, "max_position_embeddings": num_tokens}).base
    config = json.loads((base / "config.json").read_text())
    token_bytes = 2 * 4 * config["head_dim"] * config["num_key_value_heads"] * config["num_hidden_layers"]
    cache_gb = (num_tokens + 64) * token_bytes / 1e9

    def body(num_prompt: int, max_tokens: int) -> dict[str, Any]:
        return {"model": "base", "prompt": [5] * num_prompt, "max_tokens": max_tokens, "ignore_eos": True}

    async def talk(
        long: httpx.AsyncClient, large: httpx.AsyncClient, good: httpx.AsyncClient, admin: httpx.AsyncClient
    ) -> None:
        async with AsyncExitStack() as stack:
            call = {**body(100, num_tokens - 100), "stream": True}
            reply = await stack.enter_async_context(long.stream("POST", "/v1/completions", json=call))
            parts = reply.aiter_bytes()
            await anext(parts)
            waiting = asyncio.create_task(large.post("/v1/completions", json=body(num_tokens - 8, 8)))
            await wait_for_open(admin, 2)
            answer = await good.post("/v1/completions", json=body(20, 4))
            assert answer.status_code == 200, answer.text
            # The last answer may still be counted.
            assert await num_open(admin) >= 2
            waiting.cancel()

    with live_server(
        base, tmp_path / "registry", "--auth", "keys", "--backend", "native", "--kv-cache-gb", cache_gb
    ) as server:
        run(Tenants(server), talk, "long", "large", "good")


def run(tenants: Tenants, talk: Callable[..., Awaitable[None]], *names: str) -> None:
    """Run `talk` with a client of each named tenant and one of an operator."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(tenants.client(name)) for name in names]
            await talk(*clients, await stack.enter_async_context(tenants.client("operator", "admin")))

    asyncio.run(main())
