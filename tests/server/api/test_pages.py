"""Pages of lists over HTTP: variants, versions, models, tenants and keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from deltastore.errors import RegistryUnavailable
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from server.api import models, variants
from server.api.json_io import MAX_PAGE_BYTES
from server.protocol.engine_client import EngineClient
from server.tenants.changes import AuditLog, Auditor
from server.tenants.keys import KeyStore
from tests.deltastore.helpers.crash_storage import FACTS, artifact, push
from tests.server.helpers.http_app import running_app, settings_of
from tests.server.helpers.live_server import error_of

REPORT = {"text": "x" * 200_000}


def publish(registry: Registry, name: str, seed: int, *, tenant: str = "acme", activate: bool = True) -> None:
    """Publish a version with a large report."""
    with registry.open_upload(None) as upload:
        upload.write(artifact(seed))
        facts = replace(FACTS, fidelity=REPORT)
        registry.publish(upload.seal(), facts, tenant=tenant, name=name, activate=activate)


def serve(directory: Path, talk: Callable[[httpx.AsyncClient, Registry], Awaitable[None]]) -> None:
    """Let `talk` ask an application without an engine, as the administrator of the tenant `acme`."""

    async def main() -> None:
        registry = Registry(directory / "registry")
        made = KeyStore(registry.root).create(Auditor(AuditLog(registry.root)), "acme", ["admin"])
        async with running_app(settings_of(directory, registry.root, auth="keys")) as app:
            app.client.headers["Authorization"] = f"Bearer {made.text}"
            await talk(app.client, registry)

    asyncio.run(main())


async def pages_of(client: httpx.AsyncClient, path: str, key: str, **params: Any) -> list[list[Any]]:
    """Follow a list as OpenAI's clients do; return the entries of each page."""
    pages: list[list[Any]] = []
    while True:
        page = (await client.get(path, params=params)).raise_for_status()
        assert len(page.content) < MAX_PAGE_BYTES + len(str(REPORT)) + 10_000
        pages.append(page.json()[key])
        if not page.json()["has_more"]:
            return pages
        # Their pagers stop at an empty page.
        assert pages[-1]
        params["after"] = page.json()["last_id"]


def test_variants_come_a_page_at_a_time_without_their_reports(tmp_path: Path) -> None:
    async def talk(client: httpx.AsyncClient, registry: Registry) -> None:
        for number in range(5):
            publish(registry, f"v{number}", number)
        pages = await pages_of(client, "/variants", "variants", limit=2)
        assert [[each["name"] for each in page] for page in pages] == [["v0", "v1"], ["v2", "v3"], ["v4"]]
        whole = await client.get("/variants")
        assert whole.json()["variants"] == [each for page in pages for each in page]
        assert len(whole.content) < 10_000
        registry.delete("acme", "v4")
        last = (await client.get("/variants", params={"after": "v3"})).json()
        assert last == {"total": 4, "variants": [], "has_more": False, "last_id": None}

    serve(tmp_path, talk)


def test_variants_are_searched_by_a_part_of_their_names_a_page_at_a_time(tmp_path: Path) -> None:
    async def talk(client: httpx.AsyncClient, registry: Registry) -> None:
        for number, name in enumerate(("math-1", "Math-2", "code", "aftermath", "x.y_z")):
            push(registry, artifact(number), name, tenant="acme")

        async def found(search: str, **params: Any) -> tuple[list[str], int, bool]:
            page = (await client.get("/variants", params={"search": search, **params})).json()
            return [each["name"] for each in page["variants"]], page["total"], page["has_more"]

        assert await found("MATH") == (["Math-2", "aftermath", "math-1"], 3, False)
        assert await found("math", limit=2) == (["Math-2", "aftermath"], 3, True)
        assert await found("math", limit=2, after="aftermath") == (["math-1"], 3, False)
        assert await found("") == (["Math-2", "aftermath", "code", "math-1", "x.y_z"], 5, False)
        # No pattern of any kind.
        assert await found(".") == (["x.y_z"], 1, False)
        for literal in ("*", "m.th", "%", "<b>"):
            assert await found(literal) == ([], 0, False)
        long = await client.get("/variants", params={"search": "x" * 65})
        assert (long.status_code, error_of(long)["param"]) == (400, "search")

    serve(tmp_path, talk)


@pytest.mark.parametrize("read_ahead", [1, 5, 20])
def test_versions_come_with_their_reports_as_many_as_a_page_holds(
    read_ahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "READ_AHEAD", read_ahead)

    async def talk(client: httpx.AsyncClient, registry: Registry) -> None:
        for number in range(1, 13):
            publish(registry, "v", number, activate=number == 1)
        (listed,) = (await client.get("/variants")).json()["variants"]
        assert [each["version"] for each in listed["versions"]] == [1, 8, 9, 10, 11, 12]
        assert (listed["active"], listed["num_versions"]) == (1, 12)
        pages = await pages_of(client, "/variants/v", "versions")
        assert [each["version"] for page in pages for each in page] == list(range(1, 13))
        assert len(pages) > 1
        assert all(each["fidelity"] == REPORT for page in pages for each in page)
        short = await pages_of(client, "/variants/v", "versions", limit=1, after=10)
        assert [[each["version"] for each in page] for page in short] == [[11], [12]]

    serve(tmp_path, talk)


def test_the_last_changes_of_all_servers_are_listed_newest_first(tmp_path: Path) -> None:
    async def talk(client: httpx.AsyncClient, registry: Registry) -> None:
        for number in range(2):
            push(registry, artifact(number), "v", tenant="acme")
        for version in (1, 2, 1):
            await client.patch("/variants/v", json={"active": version})
        (key,) = KeyStore(registry.root).records("acme")
        (log,) = registry.root.glob("audit/*.jsonl")
        # Another machine's, of a clock that is late; and lines that a crash or a later version left.
        old = (
            '{"time": "2020-01-01T00:00:00.000+00:00", "action": "delete", "tenant": "t", "variant": "<b>"}\n'
        )
        (log.parent / "audit-2020-01-01-other.jsonl").write_text("cut\n" + old + '{"action": "unknown"}\n')
        found = (await client.get("/changes")).json()["changes"]
        assert [(each["action"], each.get("version")) for each in found] == [
            ("promote", 1),
            ("promote", 2),
            ("promote", 1),
            ("create_key", None),
            ("delete", None),
        ]
        assert found[0]["key_id"] == key
        assert (found[0]["tenant"], found[0]["variant"]) == ("acme", "v")
        assert found == sorted(found, key=lambda change: change["time"], reverse=True)
        assert (await client.get("/changes", params={"limit": 2})).json()["changes"] == found[:2]
        # Of a long log the end is read.
        log.write_bytes((b'{"time": "2021", "action": "pin", "tenant": "t"}\n' * 20_000) + log.read_bytes())
        assert (await client.get("/changes", params={"limit": 3})).json()["changes"] == found[:3]

    serve(tmp_path, talk)


def test_tenants_and_keys_come_a_page_at_a_time(tmp_path: Path) -> None:
    async def talk(client: httpx.AsyncClient, registry: Registry) -> None:
        push(registry, artifact(1), "v", tenant="storing")
        keys = KeyStore(registry.root)
        for number in range(3):
            keys.create(Auditor(AuditLog(registry.root)), f"t{number}", ["inference"])
        pages = await pages_of(client, "/tenants", "tenants", limit=2)
        assert [[each["name"] for each in page] for page in pages] == [
            ["acme", "storing"],
            ["t0", "t1"],
            ["t2"],
        ]
        storing = pages[0][1]
        assert (storing["num_variants"], storing["num_versions"]) == (1, 1)
        nothing = {"requests_last_minute": 0, "tokens_last_minute": 0, "running": 0, "uploads": 0}
        assert storing["usage"] == {**nothing, "stored_bytes": len(artifact(1)), "pinned": 0}
        pages = await pages_of(client, "/keys", "keys", limit=3)
        assert [len(page) for page in pages] == [3, 1]
        assert [each["id"] for page in pages for each in page] == list(keys.records())
        (only,) = await pages_of(client, "/keys", "keys", limit=3, tenant="t1")
        assert [each["tenant"] for each in only] == ["t1"]
        gone = await client.get("/keys", params={"after": "0" * 12})
        assert (gone.status_code, error_of(gone)["param"]) == (400, "after")
        for limit in (0, 1001, "many"):
            wrong = await client.get("/tenants", params={"limit": limit})
            assert (wrong.status_code, error_of(wrong)["param"]) == (400, "limit")

    serve(tmp_path, talk)


def test_public_names_of_others_keep_no_variant_of_its_own_from_a_tenants_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "MAX_PAGE_ENTRIES", 3)
    facts = SimpleNamespace(base=SimpleNamespace(id="tiny"), max_model_len_of=lambda record: 8)
    monkeypatch.setattr(EngineClient, "facts", facts)
    looked_up: list[str] = []
    active_records = Registry.active_records

    def counted(self: Registry, tenant: str, names: Sequence[str]) -> list[VersionRecord]:
        looked_up.extend(names)
        return active_records(self, tenant, names)

    async def talk(client: httpx.AsyncClient, registry: Registry) -> None:
        for name in ("a", "m", "z"):
            push(registry, artifact(1), name, tenant="acme")
        # Five without an active version sort before those that have one.
        for number in range(8):
            name = f"0-{number}"
            publish(registry, name, number, tenant="hostile", activate=number > 4)
            registry.set_visibility("hostile", name, "public")
        monkeypatch.setattr(Registry, "active_records", counted)
        first = (await client.get("/v1/models")).json()
        assert [card["id"] for card in first["data"]] == ["base", "a", "m", "z"]
        # A page looks at no more of what others made than it has entries.
        assert looked_up == ["a", "m", "z", "0-0", "0-1", "0-2"]
        assert (first["has_more"], first["last_id"]) == (True, "public~0-2")
        for after in ("public~0-2", "0-2"):
            second = (await client.get("/v1/models", params={"after": after})).json()
            assert [card["id"] for card in second["data"]] == ["0-5"]
        pages = [["base"], ["a"], ["m"], ["z"], ["0-5"], ["0-6"], ["0-7"]]
        monkeypatch.setattr(models, "MAX_PAGE_ENTRIES", 8)
        found = await pages_of(client, "/v1/models", "data", limit=1)
        assert [[card["id"] for card in page] for page in found] == pages
        registry.delete("acme", "m")
        resumed = (await client.get("/v1/models", params={"after": "m"})).json()
        assert [card["id"] for card in resumed["data"]] == ["z", "0-5", "0-6", "0-7"]
        wrong = await client.get("/v1/models", params={"after": "other~m"})
        assert (wrong.status_code, error_of(wrong)["param"]) == (400, "after")

    serve(tmp_path, talk)


def test_a_list_of_models_goes_on_where_it_was_whatever_became_of_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = SimpleNamespace(base=SimpleNamespace(id="tiny"), max_model_len_of=lambda record: 8)
    monkeypatch.setattr(EngineClient, "facts", facts)

    async def page(client: httpx.AsyncClient, **params: Any) -> tuple[list[str], str]:
        found = (await client.get("/v1/models", params={"limit": 1, **params})).json()
        return [card["id"] for card in found["data"]], found["last_id"]

    async def talk(client: httpx.AsyncClient, registry: Registry) -> None:
        for name in ("a", "m", "z"):
            push(registry, artifact(1), name, tenant="acme")
        for name in ("b", "c", "m"):
            push(registry, artifact(2), name, tenant="hostile")
            registry.set_visibility("hostile", name, "public")
        assert await page(client, after="own~a") == (["m"], "own~m")
        # Its own is gone, and the name now means another tenant's.
        registry.delete("acme", "m")
        assert await page(client, after="own~m") == (["z"], "own~z")
        assert await page(client, after="own~z") == (["b"], "public~b")
        # Another tenant's is gone: the list does not begin again.
        registry.set_visibility("hostile", "b", "private")
        assert await page(client, after="public~b") == (["c"], "public~c")
        # Its own comes into being under the name of another tenant's.
        push(registry, artifact(1), "c", tenant="acme")
        assert await page(client, after="public~c") == (["m"], "public~m")

    serve(tmp_path, talk)


def test_a_list_of_variants_is_refused_while_the_registry_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk(client: httpx.AsyncClient, registry: Registry) -> None:
        for name in ("a", "b"):
            push(registry, artifact(1), name, tenant="acme")
        versions = Registry.versions

        def fail(self: Registry, tenant: str, name: str, **page: int) -> list[VersionRecord]:
            if name == "b":
                raise RegistryUnavailable("503 Slow Down")
            return versions(self, tenant, name, **page)

        monkeypatch.setattr(Registry, "versions", fail)
        refused = await client.get("/variants")
        assert (refused.status_code, error_of(refused)["code"]) == (503, "registry_unavailable")

    serve(tmp_path, talk)


def test_only_administrators_make_variants_public_if_the_operator_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        registry = Registry(tmp_path / "registry")
        author = Auditor(AuditLog(registry.root))
        keys = {
            role: KeyStore(registry.root).create(author, "acme", [role]).text for role in ("publish", "admin")
        }
        for name in ("mine", "shared"):
            push(registry, artifact(1), name, tenant="acme")
        settings = settings_of(tmp_path, registry.root, auth="keys", public_names="admin")
        async with running_app(settings) as app:

            async def ask(role: str, method: str, path: str, **options: Any) -> httpx.Response:
                headers = {"Authorization": f"Bearer {keys[role]}"}
                return await app.client.request(method, path, headers=headers, **options)

            public = {"visibility": "public"}
            for refused in (
                await ask("publish", "PATCH", "/variants/mine", json=public),
                await ask("publish", "POST", "/variants", params={"name": "new", **public}, content=b"x"),
            ):
                assert (refused.status_code, error_of(refused)["code"]) == (403, "forbidden")
            assert (await ask("admin", "PATCH", "/variants/shared", json=public)).status_code == 200
            private = {"visibility": "private"}
            assert (await ask("publish", "PATCH", "/variants/shared", json=private)).status_code == 200

    asyncio.run(main())


def test_a_key_that_is_revoked_while_the_body_of_a_call_comes_changes_nothing(tmp_path: Path) -> None:
    async def talk(client: httpx.AsyncClient, registry: Registry) -> None:
        push(registry, artifact(1), "v", tenant="acme")
        keys, auditor = KeyStore(registry.root), Auditor(AuditLog(registry.root))
        key = keys.create(auditor, "acme", ["publish"])

        async def body() -> AsyncIterator[bytes]:
            yield b'{"visibility": '
            keys.revoke(auditor, key.id)
            yield b'"public"}'

        headers = {"Authorization": f"Bearer {key.text}", "Content-Type": "application/json"}
        refused = await client.patch("/variants/v", content=body(), headers=headers)
        assert (refused.status_code, error_of(refused)["code"]) == (401, "invalid_api_key")
        assert registry.summary("acme", "v").visibility == "private"

    serve(tmp_path, talk)
