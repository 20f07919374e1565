"""The table of roles covers every route, and a request shows one valid key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts

from server.api.access import ROLES
from server.app import create_admin_app, create_app
from server.tenants.audit import AuditLog, Auditor
from server.tenants.keys import KeyStore
from server.tenants.tenant import Role
from tests.server.helpers.http_app import HttpApp, make_service, running_app, settings_of
from tests.server.helpers.live_server import error_of


def routes_of(app: FastAPI) -> set[tuple[str, str]]:
    """Return every method and path that an application answers."""
    found = set()
    for context in iter_route_contexts(app.routes):
        assert isinstance(context.original_route, APIRoute), (
            f"{context.path}: no dependency guards such a route"
        )
        found |= {(method, str(context.path)) for method in context.original_route.methods or ()}
    return found


@pytest.mark.parametrize("admin_port", [None, 1])
def test_every_route_is_in_the_table_of_roles(tmp_path: Path, admin_port: int | None) -> None:
    async def routes() -> set[tuple[str, str]]:
        settings = settings_of(tmp_path, tmp_path / "registry", admin_port=admin_port, compat="vllm-lora")
        service = make_service(settings)
        found = routes_of(create_app(service))
        return found if admin_port is None else found | routes_of(create_admin_app(service))

    assert asyncio.run(routes()) == set(ROLES)


def exercise(tmp_path: Path, talk: Callable[[HttpApp], Awaitable[None]]) -> None:
    """Run an application with keys and without an engine, and let `talk` send requests to it."""

    async def main() -> None:
        async with running_app(settings_of(tmp_path, tmp_path / "registry", auth="keys")) as app:
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
    ],
)
def test_a_key_comes_in_either_header(tmp_path: Path, make_headers: Callable[[str], Any]) -> None:
    async def talk(app: HttpApp) -> None:
        reply = await app.client.get("/variants", headers=make_headers(key))
        assert (reply.status_code, reply.json()) == (200, {"variants": []})

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
        lambda key: {"Authorization": f"Basic {key}", "X-API-Key": key},
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
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
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
