"""Uploads that go on after something has changed: a key that was revoked, other uploads of the tenant."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path, PurePath
from typing import Any

import pytest

from deltastore.registry.reader import RegistryReader, Stored
from server.api.publishing import MAX_UPLOADS_PER_TENANT
from server.errors import LoadTimeout
from server.tenants.changes import AuditLog, Auditor
from server.tenants.keys import KeyStore, NewKey
from server.tenants.tenant import TenantLimits
from tests.helpers.tiny_models import Change, make_pair
from tests.server.helpers.http_app import HttpApp, running_app, settings_of, with_engine
from tests.server.helpers.live_server import ARTIFACT_PREFIX, Artifacts, error_of
from tests.server.helpers.served import make_delta

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


def digest_of(content: bytes) -> dict[str, str]:
    """Return the header that names an upload's bytes before they come."""
    return {"Content-Digest": f"sha-256=:{base64.b64encode(hashlib.sha256(content).digest()).decode()}:"}


def test_versions_of_all_variants_together_have_a_limit(artifacts: Artifacts, tmp_path: Path) -> None:
    plain, third, chatty = (
        path.read_bytes() for path in (artifacts.plain, artifacts.third, artifacts.chatty)
    )

    async def talk(app: HttpApp, _: NewKey) -> None:
        async def upload(name: str, content: bytes, *, is_named: bool = True) -> tuple[int, str | None]:
            headers = digest_of(content) if is_named else {}
            reply = await app.client.post(f"/variants?name={name}", content=content, headers=headers)
            return reply.status_code, error_of(reply)["param"] if reply.is_error else None

        assert await upload("a", plain) == await upload("b", third) == (201, None)
        for is_named in (True, False):
            assert await upload("b", chatty, is_named=is_named) == (429, "max_stored_versions")
            # Bytes that the variant has already make no new version.
            assert (await upload("a", plain, is_named=is_named))[0] == 200
        assert (await app.client.delete("/variants/a")).status_code == 200
        assert (await upload("b", chatty))[0] == 201

    serve(artifacts, tmp_path / "registry", talk, default_limits=TenantLimits(max_stored_versions=2))


def test_heads_over_a_limit_are_refused_without_a_listing_each(
    artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listings: list[str] = []
    stored = RegistryReader.stored

    def counted(registry: RegistryReader, tenant: str, rest: Callable[[], None]) -> Stored:
        listings.append(tenant)
        return stored(registry, tenant, rest)

    # However slow this machine is.
    monkeypatch.setattr("server.tenants.stored.RECENT_S", 3600.0)

    async def talk(app: HttpApp, _: NewKey) -> None:
        content = artifacts.plain.read_bytes()
        assert (await app.client.post("/variants?name=a", content=content)).status_code == 201
        monkeypatch.setattr(RegistryReader, "stored", counted)
        for number in range(20):
            reply = await app.client.post(f"/variants?name=b{number}", content=content)
            assert error_of(reply)["param"] == "max_variants"
        assert listings == []

    serve(artifacts, tmp_path / "registry", talk, default_limits=TenantLimits(max_variants=1))


def test_uploads_that_end_together_are_counted_exactly(artifacts: Artifacts, tmp_path: Path) -> None:
    async def talk(app: HttpApp, _: NewKey) -> None:
        contents = [path.read_bytes() for path in (artifacts.plain, artifacts.third, artifacts.chatty)]
        have_all = asyncio.Barrier(len(contents))

        async def body(content: bytes) -> AsyncIterator[bytes]:
            yield content[:-1]
            await have_all.wait()
            yield content[-1:]

        posts = (
            app.client.post(f"/variants?name=v{number}", content=body(content))
            for number, content in enumerate(contents)
        )
        codes = [reply.status_code for reply in await asyncio.gather(*posts)]
        assert sorted(codes) == [201, 429, 429]

    serve(artifacts, tmp_path / "registry", talk, default_limits=TenantLimits(max_variants=1))


@pytest.mark.parametrize("has_length", [True, False])
def test_without_a_limit_a_tenant_stores_as_many_bytes_as_it_leaves_free(
    has_length: bool, artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, one = tmp_path / "registry", artifacts.plain.stat().st_size
    volume = round(5.9 * one)
    keys = {
        tenant: KeyStore(registry).create(Auditor(AuditLog(registry)), tenant, ["publish"]).text
        for tenant in ("first", "second", "third")
    }

    def free(root: PurePath) -> int:
        files = [*(registry / "objects").iterdir(), *(registry / "uploads").iterdir()]
        return volume - sum(file.stat().st_size for file in files)

    monkeypatch.setattr("server.api.publishing.free_bytes", free)
    plain = artifacts.plain.read_bytes()
    # Some signs of the first tensor.
    begin = 8 + int.from_bytes(plain[:8], "little")

    async def talk(app: HttpApp, _: NewKey) -> None:
        numbers = itertools.count()

        async def fill(tenant: str) -> int:
            """Publish until that is refused; return how many versions the tenant has."""
            for number in itertools.count():
                signs = bytes([next(numbers)])
                content = plain[:begin] + signs + plain[begin + 1 :]

                async def body(content: bytes = content) -> AsyncIterator[bytes]:
                    yield content

                reply = await app.client.post(
                    f"/variants?name=v{number}",
                    content=content if has_length else body(),
                    headers={"Authorization": f"Bearer {keys[tenant]}"},
                )
                if reply.is_error:
                    assert error_of(reply)["param"] == "max_stored_bytes", reply.text
                    assert "leaves free" in error_of(reply)["message"]
                    return number
            raise AssertionError

        assert [await fill(tenant) for tenant in ("first", "second", "third")] == [2, 1, 1]

    serve(artifacts, registry, talk)


@pytest.mark.parametrize("buffers", [False, True])
def test_an_upload_that_changes_what_no_layer_reads_is_refused_by_name(buffers: bool, tmp_path: Path) -> None:
    models = make_pair("apertus", tmp_path, changes=(Change(buffers=buffers),))
    delta = make_delta(models.base, models.finetunes[0], tmp_path / "delta.safetensors")

    async def talk(app: HttpApp) -> None:
        reply = await app.client.post("/variants?name=one", content=delta.read_bytes())
        if not buffers:
            assert reply.status_code == 201
            return
        assert reply.status_code == 400
        assert "it changes 'model.layers.0.mlp.act_fn.beta' (and 3 more)" in error_of(reply)["message"]

    with_engine(models.base, tmp_path / "registry", talk)
