"""Uploads that go on after something has changed: a key that was revoked, other uploads of the tenant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from server.tenants.audit import AuditLog, Auditor
from server.tenants.keys import KeyStore, NewKey
from tests.server.helpers.http_app import HttpApp, running_app, settings_of
from tests.server.helpers.live_server import Artifacts, error_of


def serve(artifacts: Artifacts, registry: Path, talk: Callable[[HttpApp, NewKey], Awaitable[None]]) -> None:
    """Run an application with keys and an engine, and let `talk` send requests with a key of `acme`."""
    made = KeyStore(registry).create(Auditor(AuditLog(registry)), "acme", ["publish"])

    async def main() -> None:
        settings = settings_of(artifacts.base, registry, auth="keys")
        async with running_app(settings) as app, app.engine():
            app.client.headers["Authorization"] = f"Bearer {made.text}"
            await talk(app, made)

    asyncio.run(main())


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
