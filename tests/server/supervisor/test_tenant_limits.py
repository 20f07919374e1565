"""Limits of tenants on a running server with two HTTP processes: one budget, counted once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from server.tenants.admission import COUNT_TOKENS
from server.tenants.changes import AuditLog, Auditor
from server.tenants.keys import KeyStore
from server.tenants.limits import WINDOW_S
from server.tenants.tenant import Role
from tests.server.helpers.live_server import (
    MAX_MODEL_LEN,
    Artifacts,
    LiveServer,
    error_of,
    eventually,
    live_server,
)
from tests.server.supervisor.test_faults import ENGINE, HTTP, is_ready, processes

BODY: dict[str, Any] = {"prompt": "hello", "temperature": 0, "max_new_tokens": 1}
# Runs until the client disconnects.
ENDLESS = {
    "model": "base", "prompt": "hello", "max_tokens": MAX_MODEL_LEN - 10, "n": 16, "ignore_eos": True, "stream": True,
}  # fmt: skip


@dataclass(slots=True)
class Tenants:
    """A running server, and a key of each tenant."""

    server: LiveServer
    registry: Path

    @contextmanager
    def client(self, tenant: str, *roles: Role) -> Iterator[httpx.Client]:
        """Yield a client with a new key of a tenant, which every HTTP process knows."""
        author = Auditor(AuditLog(self.registry))
        made = KeyStore(self.registry).create(author, tenant, roles or ("inference", "publish"))
        headers = {"Authorization": f"Bearer {made.text}"}
        with httpx.Client(base_url=self.server.url, headers=headers, timeout=240) as client:
            assert eventually(lambda: all(_once(client, "/me").status_code == 200 for _ in range(8)))
            yield client

    def limit(self, tenant: str, **limits: int) -> None:
        """Set a tenant's limits, and wait until the server counts by them."""
        with self.client("operator", "admin") as admin, self.client(tenant) as client:
            assert admin.put(f"/tenants/{tenant}", json=limits).status_code == 200
            given = {name: value for name, value in limits.items() if value is not None}
            assert eventually(lambda: given.items() <= client.get("/me").json()["limits"].items())


# Over a connection of its own, so that any of the HTTP processes answers.
ALONE = {"Connection": "close"}


def _once(client: httpx.Client, path: str) -> httpx.Response:
    return client.get(path, headers=ALONE)


def _generate(client: httpx.Client, **body: Any) -> httpx.Response:
    return client.post("/generate", headers=ALONE, json={**BODY, **body})


@pytest.fixture(scope="module")
def tenants(artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    registry = tmp_path_factory.mktemp("limits") / "registry"
    options = ("--http-workers", 2, "--auth", "keys", "--max-restarts", 1000, "--shutdown-timeout", 1)
    with live_server(artifacts.base, registry, *options) as server:
        yield Tenants(server, registry)


def test_two_http_processes_have_one_budget_of_requests(tenants: Tenants) -> None:
    tenants.limit("budget", requests_per_minute=10)
    with tenants.client("budget") as client, ThreadPoolExecutor(8) as pool:
        began = time.monotonic()
        replies = list(pool.map(lambda _: _generate(client), range(40)))
        statuses = [reply.status_code for reply in replies]
        assert set(statuses) == {200, 429}
        # One more in each six seconds behind the turn of a minute. Two budgets would admit twenty.
        assert 10 <= statuses.count(200) <= min(19, 11 + (time.monotonic() - began) // 6)
        refused = next(reply for reply in replies if reply.status_code == 429)
        error = error_of(refused)
        assert (error["code"], error["param"]) == ("rate_limited", "requests_per_minute")
        assert 1 <= int(refused.headers["Retry-After"]) <= 120
        assert refused.headers["x-ratelimit-limit-requests"] == "10"
        admitted = next(reply for reply in replies if reply.status_code == 200)
        assert 0 <= int(admitted.headers["x-ratelimit-remaining-requests"]) <= 9
        assert admitted.headers["x-ratelimit-reset-requests"].endswith("s")
        assert "x-ratelimit-limit-tokens" not in admitted.headers
        number = float(statuses.count(429))
        series = 'peraxis_tenant_rejections_total{reason="requests_per_minute",tenant="budget"}'
        with tenants.client("operator", "admin") as admin:
            assert eventually(lambda: f"{series} {number}" in admin.get("/metrics").text)


def test_processes_that_are_killed_free_their_requests_and_forget_no_window(tenants: Tenants) -> None:
    tenants.limit("busy", max_running=2)
    with tenants.client("busy") as client, ExitStack() as streams:
        reading = []
        minute = time.monotonic() // WINDOW_S
        for _ in range(2):
            reply = streams.enter_context(client.stream("POST", "/v1/completions", json=ENDLESS))
            assert reply.status_code == 200
            # An iterator that is dropped ends its stream.
            reading.append(reply.iter_bytes())
            next(reading[-1])
        refused = _generate(client)
        assert (refused.status_code, error_of(refused)["param"]) == (429, "max_running")
        assert refused.headers["Retry-After"] == "1"
        counted = client.get("/me").json()["usage"]
        # Behind the turn of a minute, what came before counts as a little less.
        has_turned = time.monotonic() // WINDOW_S > minute
        assert counted["running"] == 2
        assert counted["requests_last_minute"] == 2 or has_turned
        # Tokens are counted in slices: those of an unfinished slice are lost with their process.
        assert eventually(lambda: client.get("/me").json()["usage"]["tokens_last_minute"] > COUNT_TOKENS)
        killed = processes(tenants.server, HTTP)
        for process in killed:
            process.kill()
        psutil.wait_procs(killed)
        assert eventually(
            lambda: is_ready(tenants.server) and len(processes(tenants.server, HTTP)) == len(killed)
        )
        usage = _once(client, "/me").json()["usage"]
        assert (usage["running"], usage["tokens_last_minute"] > 0) == (0, True)
        [engine] = processes(tenants.server, ENGINE)
        engine.kill()
        assert eventually(lambda: [each for each in processes(tenants.server, ENGINE) if each != engine])
        assert eventually(lambda: is_ready(tenants.server))
        assert _once(client, "/me").json()["usage"]["running"] == 0
        # A process may hear of the new engine after its neighbour.
        assert eventually(lambda: _generate(client).status_code == 200)


def test_tokens_of_the_prompt_and_of_the_answer_count(tenants: Tenants) -> None:
    tenants.limit("words", tokens_per_minute=100)
    with tenants.client("words") as client:
        minute = time.monotonic() // WINDOW_S
        reply = _generate(client, max_new_tokens=20, n=4)
        assert reply.status_code == 200
        total = reply.json()["usage"]["total_tokens"]
        assert eventually(lambda: client.get("/me").json()["usage"]["running"] == 0)
        used = client.get("/me").json()["usage"]["tokens_last_minute"]
        assert used == total or (time.monotonic() // WINDOW_S > minute and 0 < used < total)
        limited = [_generate(client, max_new_tokens=20, n=4) for _ in range(4)]
        refused = next(each for each in limited if each.status_code == 429)
        assert error_of(refused)["param"] == "tokens_per_minute"
        assert refused.headers["x-ratelimit-remaining-tokens"] == "0"


def test_limits_change_while_the_server_runs_and_are_listed(tenants: Tenants) -> None:
    tenants.limit("changing", requests_per_minute=1)
    with tenants.client("changing") as client, tenants.client("operator", "admin") as admin:
        assert eventually(lambda: _generate(client).status_code == 429)
        assert admin.put("/tenants/changing", json={}).status_code == 200
        assert eventually(lambda: _generate(client).status_code == 200)
        listed = {each["name"]: each for each in admin.get("/tenants").json()["tenants"]}
        assert listed["changing"]["has_own_limits"]
        assert set(listed["changing"]["limits"].values()) == {None}
        assert listed["operator"]["num_keys"] >= 1
        unknown = admin.put("/tenants/changing", json={"requests": 1})
        assert (unknown.status_code, error_of(unknown)["param"]) == (400, "requests")
        named = admin.put("/tenants/..", json={"max_running": 1})
        assert named.status_code in (400, 404, 405)


def test_stored_bytes_and_uploads_have_limits(tenants: Tenants, artifacts: Artifacts) -> None:
    content = artifacts.plain.read_bytes()
    tenants.limit("storing", max_stored_bytes=len(content), max_uploads=1)
    headers = {"Content-Type": "application/octet-stream"}
    with tenants.client("storing") as client:
        first = client.post("/variants?name=one", content=content, headers=headers)
        assert first.status_code == 201, first.text
        assert client.get("/me").json()["usage"]["stored_bytes"] == len(content)
        other = artifacts.third.read_bytes()
        refused = client.post("/variants?name=two", content=other, headers=headers)
        assert (refused.status_code, error_of(refused)["param"]) == (429, "max_stored_bytes")
        assert "Retry-After" not in refused.headers
        chunked = client.post("/variants?name=two", content=iter([other]), headers=headers)
        assert (chunked.status_code, error_of(chunked)["param"]) == (429, "max_stored_bytes")
        assert client.delete("/variants/one").status_code == 200
        sent = client.post("/variants?name=two", content=iter([other]), headers=headers)
        assert sent.status_code == 201, sent.text


def test_variants_and_versions_have_limits_and_what_exists_stays(
    tenants: Tenants, artifacts: Artifacts
) -> None:
    plain, third, chatty = (
        path.read_bytes() for path in (artifacts.plain, artifacts.third, artifacts.chatty)
    )
    headers = {"Content-Type": "application/octet-stream"}
    with tenants.client("growing") as client:

        def upload(name: str, content: bytes) -> httpx.Response:
            return client.post(f"/variants?name={name}", content=content, headers=headers)

        for name, content in (("one", plain), ("one", third), ("two", plain)):
            assert upload(name, content).status_code == 201
        tenants.limit("growing", max_variants=1, max_versions=1)
        for name, content, limit in (
            ("three", plain, "max_variants"), ("one", chatty, "max_versions"), ("two", third, "max_versions"),
        ):  # fmt: skip
            refused = upload(name, content)
            assert (refused.status_code, error_of(refused)["param"]) == (429, limit)
            assert "Retry-After" not in refused.headers
        # The bytes of a version that exists make no new one.
        assert upload("one", plain).status_code == 200
        assert [len(each["versions"]) for each in client.get("/variants").json()["variants"]] == [2, 1]
        client.patch("/variants/one", json={"active": 2})
        assert client.delete("/variants/one?version=1").status_code == 200
        assert client.delete("/variants/two").status_code == 200
        error = error_of(upload("one", chatty))
        assert error["param"] == "max_versions"
        assert "(max_versions)" in error["message"]
        assert client.delete("/variants/one").status_code == 200
        assert upload("three", chatty).status_code == 201


def test_what_a_tenant_may_store_has_default_limits_that_are_logged(tenants: Tenants) -> None:
    with tenants.client("operator", "admin") as admin:
        limits = admin.get("/me").json()["limits"]
        assert admin.get("/tenants").json()["default_limits"] == limits
    assert (limits["max_variants"], limits["max_versions"]) == (10_000, 1_000)
    assert (limits["max_stored_versions"], limits["max_stored_bytes"]) == (20_000, None)
    log = tenants.server.log.read_text()
    assert "max_stored_bytes as many as are left free, max_stored_versions 20000, max_variants 10000" in log


def test_pinned_slots_have_a_limit(tenants: Tenants, artifacts: Artifacts) -> None:
    tenants.limit("pinning", max_pinned=1)
    headers = {"Content-Type": "application/octet-stream"}
    with tenants.client("pinning") as client:
        for name in ("plain", "third"):
            content = getattr(artifacts, name).read_bytes()
            reply = client.post(f"/variants?name={name}", content=content, headers=headers)
            assert reply.status_code == 201
        assert client.post("/variants/plain/pin").status_code == 202
        assert eventually(lambda: client.get("/me").json()["usage"]["pinned"] == 1)
        refused = client.post("/variants/third/pin")
        assert (refused.status_code, error_of(refused)["param"]) == (429, "max_pinned")
        assert client.post("/variants/plain/pin").status_code == 202
        assert client.post("/variants/plain/unpin").status_code == 202
        assert client.post("/variants/third/pin").status_code == 202


def test_a_tenant_s_pin_of_bytes_that_another_tenant_has_is_its_own(
    tenants: Tenants, artifacts: Artifacts
) -> None:
    tenants.limit("twin-b", max_pinned=1)
    headers = {"Content-Type": "application/octet-stream"}
    with tenants.client("twin-a") as a, tenants.client("twin-b") as b:
        for client, name, file in (
            (a, "x", artifacts.plain), (b, "x", artifacts.plain), (b, "y", artifacts.third),
        ):  # fmt: skip
            reply = client.post(f"/variants?name={name}", content=file.read_bytes(), headers=headers)
            assert reply.status_code == 201
        assert a.post("/variants/x/pin").status_code == 202
        assert eventually(lambda: _is_pinned(a))
        assert not _is_pinned(b)
        assert b.post("/variants/x/pin").status_code == 202
        assert eventually(lambda: _is_pinned(b))
        assert error_of(b.post("/variants/y/pin"))["param"] == "max_pinned"
        for action in ("unpin", "unload"):
            document = b.post(f"/variants/x/{action}").json()
            level = "device" if action == "unpin" else "disk"
            assert (document["pinned"], document["level"]) == (False, level)
        assert _is_pinned(a)
        assert b.post("/variants/x/pin").status_code == 202
        assert a.delete("/variants/x").status_code == 200
        assert eventually(lambda: a.get("/me").json()["usage"]["pinned"] == 0)
        assert _is_pinned(b)
        (engine,) = processes(tenants.server, ENGINE)
        engine.kill()
        engine.wait(30)
        assert eventually(lambda: is_ready(tenants.server) and _is_pinned(b))
        assert b.post("/variants/x/unpin").status_code == 202


def _is_pinned(client: httpx.Client) -> bool:
    reply = client.get("/variants/x")
    # Refused by a process that has not heard of a new engine yet.
    return reply.is_success and bool(reply.json()["versions"][0]["pinned"])


def test_me_shows_the_key_and_its_roles(tenants: Tenants) -> None:
    with tenants.client("someone", "inference") as client:
        document = client.get("/me").json()
    assert (document["tenant"], document["roles"]) == ("someone", ["inference"])
    assert document["key"]["expires_at"] is None
    limited = {name for name, value in document["limits"].items() if value is not None}
    assert limited >= {"max_stored_versions", "max_variants", "max_versions"}
