"""The table of roles covers every route, and a request shows one valid key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from server.api import openapi
from server.api.access import ROLES
from server.app import create_admin_app, create_app
from server.tenants.changes import AuditLog, Auditor
from server.tenants.keys import KeyStore
from server.tenants.tenant import Role
from tests.server.helpers.http_app import HttpApp, make_service, running_app, settings_of
from tests.server.helpers.live_server import error_of


def routes_of(app: FastAPI) -> set[tuple[str, str]]:
    """Return every method and path that an application answers."""
    found = set()
    for route in openapi.routes_of(app):
        original = getattr(route, "original_route", route)
        assert isinstance(original, APIRoute), f"{route.path}: no dependency guards such a route"
        found |= {(method, str(route.path)) for method in original.methods or ()}
    return found


@pytest.mark.parametrize("admin_port", [None, 1])
def test_every_route_is_in_the_table_of_roles(tmp_path: Path, admin_port: int | None) -> None:
    async def routes() -> set[tuple[str, str]]:
        settings = settings_of(tmp_path, tmp_path / "registry", admin_port=admin_port, compat="vllm-lora")
        service = make_service(settings)
        found = routes_of(create_app(service))
        return found if admin_port is None else found | routes_of(create_admin_app(service))

    assert asyncio.run(routes()) == set(ROLES)


def exercise(tmp_path: Path, talk: Callable[[HttpApp], Awaitable[None]], **overrides: Any) -> None:
    """Run an application with keys and without an engine, and let `talk` send requests to it."""

    async def main() -> None:
        async with running_app(settings_of(tmp_path, tmp_path / "registry", auth="keys", **overrides)) as app:
            await talk(app)

    asyncio.run(main())


def make_key(tmp_path: Path, role: Role = "publish") -> str:
    root = tmp_path / "registry"
    return KeyStore(root).create(Auditor(AuditLog(root)), "acme", [role]).text


@pytest.mark.parametrize(
    "make_headers",
    [
        lambda key: {"Authorization": f"Bearer {key}"},
        lambda key: {"Authorization": f"bearer   {key} "},
        lambda key: {"X-API-Key": key},
        lambda key: {"Authorization": f"Bearer {key}", "X-API-Key": key},
        # A proxy's own credentials.
        lambda key: {"Authorization": "Basic YTpi", "X-API-Key": key},
    ],
)
def test_a_key_comes_in_either_header(tmp_path: Path, make_headers: Callable[[str], Any]) -> None:
    async def talk(app: HttpApp) -> None:
        reply = await app.client.get("/variants", headers=make_headers(key))
        assert (reply.status_code, reply.json()["variants"]) == (200, [])

    key = make_key(tmp_path)
    exercise(tmp_path, talk)


@pytest.mark.parametrize(
    "make_headers",
    [
        lambda key: {},
        lambda key: {"Authorization": key},
        lambda key: {"Authorization": f"Basic {key}"},
        lambda key: {"Authorization": "Bearer"},
        lambda key: {"Authorization": f"Bearer {key}", "X-API-Key": "another"},
        lambda key: [("Authorization", f"Bearer {key}"), ("Authorization", "Bearer another")],
        lambda key: {"X-API-Key": ""},
        lambda key: {"X-API-Key": b"\xff\xfe"},
        lambda key: {"Cookie": f"key={key}"},
    ],
)
def test_without_one_valid_key_a_request_is_refused_before_its_body_is_read(
    tmp_path: Path, make_headers: Callable[[str], Any]
) -> None:
    async def talk(app: HttpApp) -> None:
        for reply in (
            await app.client.get("/variants", headers=make_headers(key)),
            await app.client.patch("/variants/a", headers=make_headers(key), content=b"no JSON"),
        ):
            assert (reply.status_code, error_of(reply)["code"]) == (401, "invalid_api_key")
            assert reply.headers["WWW-Authenticate"] == "Bearer"

    key = make_key(tmp_path)
    exercise(tmp_path, talk)


def test_a_key_in_the_url_is_no_key(tmp_path: Path) -> None:
    async def talk(app: HttpApp) -> None:
        assert (await app.client.get(f"/variants?key={key}&api_key={key}")).status_code == 401

    key = make_key(tmp_path)
    exercise(tmp_path, talk)


@pytest.mark.parametrize("path", ["/variants", "/health", "/v1/models"])
def test_a_long_query_is_refused_before_it_is_read(path: str, tmp_path: Path) -> None:
    """A query that fills a head has ten thousand fields, which take the event loop 43 ms to check."""
    headers = {"X-API-Key": make_key(tmp_path)}

    async def talk(app: HttpApp) -> None:
        url = path + "?" + "&".join(f"{number:x}=" for number in range(2000))
        error = error_of(await app.client.get(url, headers=headers))
        assert error["code"] == "invalid_request"
        assert error["message"].startswith("the query has more than")

    exercise(tmp_path, talk)


def test_a_key_without_the_role_is_told_which_one_it_needs(tmp_path: Path) -> None:
    async def talk(app: HttpApp) -> None:
        reply = await app.client.post("/generate", headers={"X-API-Key": key}, content=b"no JSON")
        assert (reply.status_code, error_of(reply)["code"]) == (403, "forbidden")
        assert "inference" in error_of(reply)["message"]

    key = make_key(tmp_path)
    exercise(tmp_path, talk)


@pytest.mark.parametrize("admin_port", [None, 1])
def test_a_key_for_metrics_reads_them_on_either_port_and_nothing_else(
    tmp_path: Path, admin_port: int | None
) -> None:
    headers = {"X-API-Key": make_key(tmp_path, "metrics")}

    async def main() -> None:
        settings = settings_of(tmp_path, tmp_path / "registry", auth="keys", admin_port=admin_port)
        service = make_service(settings)
        app = create_app(service) if admin_port is None else create_admin_app(service)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers=headers
        ) as client:
            for method, path in routes_of(app):
                if ROLES[method, path] is not None:
                    status = (await client.request(method, path)).status_code
                    assert status == (200 if path == "/metrics" else 403), path
        await service.close()

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/health", "/ready", "/no/such/call"])
def test_liveness_needs_no_key(tmp_path: Path, path: str) -> None:
    async def talk(app: HttpApp) -> None:
        # Without an engine the application is not ready.
        assert (await app.client.get(path)).status_code in (200, 404, 503)

    exercise(tmp_path, talk)


FORM = {"Content-Type": "multipart/form-data; boundary=b"}
LOCAL = "localhost:8000"


@pytest.mark.parametrize("admin_port", [None, 1])
def test_without_keys_a_page_of_a_browser_cannot_act(tmp_path: Path, admin_port: int | None) -> None:
    async def main() -> None:
        for given, admitted, refused in (
            (
                {},
                [LOCAL, "LOCALHOST", "127.0.0.1:8000", "[::1]:8000"],
                ["evil.example", "localhost.evil.example", ""],
            ),
            (
                {"allowed_host": "models.lan,b.example"},
                ["models.lan:8000", "B.example", LOCAL],
                ["evil.example"],
            ),
            ({"allow_unauthenticated": True}, ["gateway.example", LOCAL], []),
            (
                {"allow_unauthenticated": True, "allowed_host": "a.example"},
                ["a.example"],
                ["gateway.example"],
            ),
        ):
            settings = settings_of(tmp_path, tmp_path / "registry", admin_port=admin_port, **given)
            service = make_service(settings)
            app = create_app(service) if admin_port is None else create_admin_app(service)
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                for host in (*admitted, *refused):
                    reply = await client.get("/variants", headers={"Host": host})
                    assert reply.status_code == (200 if host in admitted else 403), host
                    if host in refused:
                        assert error_of(reply)["code"] == "forbidden"
                        assert "--allowed-host" in error_of(reply)["message"]
                for headers in (
                    {"Origin": "http://evil.example"},
                    {"Origin": "null"},
                    {"Origin": "http://localhost:3000"},
                    {"Sec-Fetch-Site": "cross-site"},
                    {"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:8000"},
                ):
                    for kind in (FORM, {}):
                        sent = {"Host": admitted[0], **kind, **headers}
                        form = await client.post("/variants?name=a", content=b"--b--", headers=sent)
                        assert (form.status_code, error_of(form)["code"]) == (403, "forbidden"), headers
                    assert (
                        await client.get("/docs", headers={"Host": admitted[0], **headers})
                    ).status_code == 403
                for headers in (
                    {"Origin": f"http://{admitted[0]}", "Sec-Fetch-Site": "same-origin"},
                    {"Sec-Fetch-Site": "none"},
                    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"},
                ):
                    assert (
                        await client.get("/docs", headers={"Host": admitted[0], **headers})
                    ).status_code == 200
            await service.close()

    asyncio.run(main())


def test_with_keys_the_key_alone_decides(tmp_path: Path) -> None:
    async def talk(app: HttpApp) -> None:
        headers = {"X-API-Key": key, "Host": "a.example", "Origin": "https://b.example"}
        assert (await app.client.get("/variants", headers=headers)).status_code == 200

    key = make_key(tmp_path)
    exercise(tmp_path, talk)


PAGE = "https://chat.example.org"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang",
}


@pytest.mark.parametrize(
    ("allowed", "origin", "is_allowed"),
    [
        ((PAGE, "http://localhost:3000"), PAGE, True),
        ((PAGE, "http://localhost:3000"), "http://localhost:3000", True),
        (("*",), "https://any.example", True),
        ((PAGE,), "https://chat.example.org.evil.example", False),
        ((PAGE,), "http://chat.example.org", False),
        ((PAGE,), "null", False),
        ((), PAGE, False),
    ],
)
def test_pages_of_allowed_origins_alone_send_keys_and_read_replies(
    tmp_path: Path, allowed: tuple[str, ...], origin: str, is_allowed: bool
) -> None:
    async def talk(app: HttpApp) -> None:
        asked = await app.client.options("/v1/chat/completions", headers={"Origin": origin, **PREFLIGHT})
        assert (asked.status_code == 200) is is_allowed
        headers = {"Origin": origin, "Authorization": f"Bearer {key}"}
        got = await app.client.get("/variants", headers=headers)
        refused = await app.client.get("/variants", headers={"Origin": origin})
        # A program that names an origin is none of a browser's business.
        assert (got.status_code, refused.status_code) == (200, 401)
        for reply in (asked, got, refused):
            found = reply.headers.get("access-control-allow-origin")
            assert found == (("*" if "*" in allowed else origin) if is_allowed else None)
            assert "access-control-allow-credentials" not in reply.headers
        if is_allowed:
            assert "x-stainless-lang" in asked.headers["access-control-allow-headers"]
            assert {"PATCH", "DELETE"} <= set(asked.headers["access-control-allow-methods"].split(", "))
            assert "X-Request-Id" in got.headers["access-control-expose-headers"]

    key = make_key(tmp_path)
    exercise(tmp_path, talk, allowed_origin=allowed)


@pytest.mark.parametrize("method", ["GET", "HEAD", "PATCH"])
def test_a_page_may_send_any_method_that_is_answered(method: str, tmp_path: Path) -> None:
    async def talk(app: HttpApp) -> None:
        headers = {"Origin": PAGE, **PREFLIGHT, "Access-Control-Request-Method": method}
        asked = await app.client.options("/v1/models", headers=headers)
        assert asked.status_code == 200
        assert method in asked.headers["access-control-allow-methods"].split(", ")

    exercise(tmp_path, talk, allowed_origin=(PAGE,))


def test_a_page_of_an_allowed_origin_alone_reads_that_the_server_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk(app: HttpApp) -> None:
        def broken(tenant: str) -> None:
            raise RuntimeError

        monkeypatch.setattr(app.service.registry, "names", broken)
        for origin, allowed in ((PAGE, PAGE), ("https://evil.example", None)):
            headers = {"Origin": origin, "Authorization": f"Bearer {key}"}
            reply = await app.client.get("/variants", headers=headers)
            assert (reply.status_code, error_of(reply)["code"]) == (500, "internal_error")
            assert reply.headers.get("access-control-allow-origin") == allowed
            assert "X-Request-Id" in reply.headers

    key = make_key(tmp_path)
    exercise(tmp_path, talk, allowed_origin=(PAGE,))
