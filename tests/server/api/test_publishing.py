"""Uploads that go on after something has changed: a key that was revoked, other uploads of the tenant."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from server.api.publishing import MAX_UPLOADS_PER_TENANT
from server.errors import LoadTimeout
from server.tenants.changes import AuditLog, Auditor
from server.tenants.keys import KeyStore, NewKey
from tests.server.helpers.http_app import HttpApp, running_app, settings_of
from tests.server.helpers.live_server import ARTIFACT_PREFIX, Artifacts, error_of

MEBIBYTE = 1 << 20


def serve(
    artifacts: Artifacts,
    registry: Path,
    talk: Callable[[HttpApp, NewKey], Awaitable[None]],
    **given: Any,
) -> None:
    """Run an application with keys and an engine, and let `talk` send requests with a key of `acme`."""
    made = KeyStore(registry).create(Auditor(AuditLog(registry)), "acme", ["publish"])

    async def main() -> None:
        settings = settings_of(artifacts.base, registry, auth="keys", **given)
        async with running_app(settings) as app, app.engine():
            app.client.headers["Authorization"] = f"Bearer {made.text}"
            await talk(app, made)

    asyncio.run(main())


@pytest.mark.parametrize("is_adapter", [False, True], ids=["upload", "load_lora_adapter"])
def test_uploads_of_a_tenant_at_a_time_are_bounded_whatever_route_they_take(
    is_adapter: bool, artifacts: Artifacts, tmp_path: Path
) -> None:
    async def talk(app: HttpApp, _: NewKey) -> None:
        async def publish() -> int:
            if is_adapter:
                body = {"lora_name": "one", "lora_path": str(artifacts.plain)}
                return (await app.client.post("/v1/load_lora_adapter", json=body)).status_code
            return (
                await app.client.post("/variants?name=one", content=artifacts.plain.read_bytes())
            ).status_code

        counts = app.service.num_uploads
        counts["acme"] = MAX_UPLOADS_PER_TENANT
        assert await publish() == 503
        assert not await asyncio.to_thread(app.service.registry.names, "acme")
        counts["acme"] -= 1
        assert await publish() == (200 if is_adapter else 201)
        assert counts["acme"] == MAX_UPLOADS_PER_TENANT - 1

    given = {"compat": "vllm-lora", "lora_dir": artifacts.plain.parent} if is_adapter else {}
    serve(artifacts, tmp_path / "registry", talk, **given)


def test_a_key_that_is_revoked_during_an_upload_publishes_nothing(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    registry = tmp_path / "registry"
    content = artifacts.plain.read_bytes()

    async def talk(app: HttpApp, key: NewKey) -> None:
        async def body() -> AsyncIterator[bytes]:
            yield content[:1000]
            keys = KeyStore(registry)
            await asyncio.to_thread(keys.revoke, Auditor(AuditLog(registry)), key.id)
            yield content[1000:]

        reply = await app.client.post("/variants?name=late", content=body())
        assert (reply.status_code, error_of(reply)["code"]) == (401, "invalid_api_key")
        assert not await asyncio.to_thread(app.service.registry.variants, "acme")
        assert not list((registry / "uploads").iterdir())

    serve(artifacts, registry, talk)


def test_unfinished_uploads_of_a_tenant_have_a_bound_in_bytes(artifacts: Artifacts, tmp_path: Path) -> None:
    registry = tmp_path / "registry"

    async def talk(app: HttpApp, key: NewKey) -> None:
        refused = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            yield ARTIFACT_PREFIX.ljust(7 * MEBIBYTE // 2, b" ")
            await refused.wait()

        # Of four times the largest upload, half is for one tenant.
        holding = [asyncio.create_task(app.client.post("/variants?name=a", content=body())) for _ in range(2)]
        while sum(part.stat().st_size for part in (registry / "uploads").iterdir()) < 7 * MEBIBYTE:
            await asyncio.sleep(0.01)
        third = await app.client.post(
            "/variants?name=b", content=ARTIFACT_PREFIX.ljust(3 * MEBIBYTE // 2, b" ")
        )
        refused.set()
        assert (third.status_code, error_of(third)["code"]) == (503, "overloaded")
        assert "unfinished uploads" in error_of(third)["message"]
        await asyncio.gather(*holding)
        again = await app.client.post("/variants?name=b", content=artifacts.plain.read_bytes())
        assert again.status_code == 201, again.text

    serve(artifacts, registry, talk, max_upload_gb=4 * MEBIBYTE / 1e9)


def test_a_pin_that_fails_after_its_reply_has_no_audit_line(
    artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = tmp_path / "registry"

    async def talk(app: HttpApp, key: NewKey) -> None:
        for name in ("fails", "works"):
            reply = await app.client.post(f"/variants?name={name}", content=artifacts.plain.read_bytes())
            assert reply.status_code == 201, reply.text
        outcomes: list[asyncio.Future[None]] = []

        def load(*_: Any) -> asyncio.Future[None]:
            outcomes.append(asyncio.get_running_loop().create_future())
            return outcomes[-1]

        monkeypatch.setattr(app.service.engine, "load", load)
        for name in ("fails", "works"):
            assert (await app.client.post(f"/variants/{name}/pin")).status_code == 202
        assert "pin" not in audited(registry)
        outcomes[0].set_exception(LoadTimeout("no slot"))
        outcomes[1].set_result(None)
        while "pin" not in audited(registry):
            await asyncio.sleep(0.01)
        assert audited(registry)["pin"] == ["works"]

    serve(artifacts, registry, talk)


def audited(registry: Path) -> dict[str, list[str]]:
    """Return the variants that the audit log names, by action."""
    found: dict[str, list[str]] = {}
    for file in (registry / "audit").iterdir():
        for line in map(json.loads, file.read_text().splitlines()):
            found.setdefault(line["action"], []).append(line.get("variant"))
    return found
