"""`--admin-port`: routes of administration are on it, and on the public port they do not exist."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from bench.process import free_port
from peraxis.cli import run
from server.api import openapi
from server.api.access import ROLES
from server.app import create_admin_app, create_app
from server.settings import Settings
from tests.server.helpers.http_app import make_service
from tests.server.helpers.live_server import WAIT_S, Artifacts, error_of, eventually, live_server

Route = tuple[str, str]
# Each port describes its own routes, says that it is well, and tells a caller who it is and what it may use.
SHARED = {
    ("GET", "/health"), ("GET", "/ready"),
    ("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/docs/{asset}"),
    ("GET", "/me"), ("GET", "/v1/models"), ("GET", "/v1/models/{model_id}"),
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/tokenize"), ("POST", "/detokenize"),
}  # fmt: skip
# Prefixes of the routes that name all tenants' variants or change them.
ADMINISTRATION = ("/metrics", "/stats", "/changes", "/variants", "/keys", "/tenants", "/console")


def routes_of(
    tmp_path: Path, admin_port: int | None, compat: Literal["none", "vllm-lora"] = "none"
) -> tuple[set[Route], set[Route]]:
    """Return the method and path of each route of the public and of the admin application."""
    settings = Settings(
        base=tmp_path, registry=str(tmp_path / "registry"), admin_port=admin_port, compat=compat
    )

    async def main() -> tuple[set[Route], set[Route]]:
        service = make_service(settings)
        try:
            return listed(create_app(service)), listed(create_admin_app(service))
        finally:
            await service.close()

    return asyncio.run(main())


def listed(app: FastAPI) -> set[Route]:
    routes = [(getattr(each, "original_route", each), str(each.path)) for each in openapi.routes_of(app)]
    return {
        (method, path)
        for route, path in routes
        if isinstance(route, APIRoute)
        for method in route.methods or ()
    }


def is_administration(route: Route) -> bool:
    return route[1].startswith(ADMINISTRATION) or route[1] == "/"


def test_without_an_admin_port_the_public_one_has_every_route(tmp_path: Path) -> None:
    public, admin = routes_of(tmp_path, None)
    assert admin < public


def test_an_admin_port_takes_all_routes_of_administration_and_no_other(tmp_path: Path) -> None:
    every, _ = routes_of(tmp_path, None)
    public, admin = routes_of(tmp_path, 9000)
    administration = {route for route in every if is_administration(route)}
    assert admin - SHARED == administration
    assert public == every - administration
    assert {
        ("GET", "/metrics"),
        ("GET", "/stats"),
        ("POST", "/variants"),
        ("DELETE", "/variants/{name}"),
    } <= admin


def test_the_calls_of_vllms_controllers_stay_on_the_public_port_and_need_the_role_publish(
    tmp_path: Path,
) -> None:
    without, _ = routes_of(tmp_path, 9000)
    public, admin = routes_of(tmp_path, 9000, "vllm-lora")
    calls = {("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter")}
    assert public - without == calls
    assert not calls & admin
    assert {ROLES[call] for call in calls} == {"publish"}


@pytest.fixture(scope="module")
def ports(artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Run a server with an admin port; return the URLs of both ports."""
    registry, port = tmp_path_factory.mktemp("admin") / "registry", free_port()
    with live_server(artifacts.base, registry, "--admin-port", port, "--max-gpu-deltas", 2) as server:
        yield server.url, f"http://127.0.0.1:{port}"


def test_administration_answers_only_on_its_port(ports: tuple[str, str], artifacts: Artifacts) -> None:
    public, admin = ports
    with (
        httpx.Client(base_url=public, timeout=240) as user,
        httpx.Client(base_url=admin, timeout=240) as operator,
    ):
        for method, path in (
            ("GET", "/metrics"),
            ("GET", "/stats"),
            ("GET", "/variants"),
            ("POST", "/variants"),
        ):
            reply = user.request(method, path)
            assert (reply.status_code, error_of(reply)["code"]) == (404, "not_found")
        assert operator.post("/variants?name=plain", content=artifacts.plain.read_bytes()).status_code == 201
        assert "peraxis_ready 1.0" in operator.get("/metrics").text
        assert operator.get("/stats").json()["server"]["ready"] is True
        assert (
            user.post("/generate?variant=plain", json={"prompt": "a", "max_new_tokens": 1}).status_code == 200
        )
        assert operator.post("/generate", json={"prompt": "a"}).status_code == 404
        body = {"model": "plain", "prompt": "a", "max_tokens": 2, "temperature": 0}
        answers = [client.post("/v1/completions", json=body).json()["choices"] for client in (user, operator)]
        assert answers[0] == answers[1]
        assert operator.post("/tokenize", json={"model": "plain", "prompt": "a"}).json()["count"] > 0
        chatty = {"name": "chatty"}
        assert (
            operator.post("/variants", params=chatty, content=artifacts.chatty.read_bytes()).status_code
            == 201
        )
        messages = [{"role": "user", "content": "a"}]
        chat = operator.post(
            "/v1/chat/completions", json={"model": "chatty", "messages": messages, "max_tokens": 2}
        )
        assert chat.json()["object"] == "chat.completion"


def test_each_port_says_that_it_is_well(ports: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    for url in ports:
        for path in ("health", "ready"):
            assert httpx.get(f"{url}/{path}", timeout=WAIT_S).status_code == 200
        assert run(["doctor", "--url", url]) == 0
    assert "requests are admitted" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["ls"], ["ps"], ["show", "listed"]])
def test_commands_with_a_key_read_variants_from_the_port(
    ports: tuple[str, str],
    artifacts: Artifacts,
    tmp_path: Path,
    command: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a key, `ls` also asks which variants of other tenants are public, and `ps` whose list is empty."""
    _, admin = ports
    key = tmp_path / "key"
    key.write_text("any-text-without-auth")
    assert (
        run(["push", str(artifacts.third), "--name", "listed", "--url", admin, "--key-file", str(key)]) == 0
    )
    assert run(["load", "listed", "--url", admin, "--key-file", str(key)]) == 0
    capsys.readouterr()

    def shows_the_device() -> bool:
        code = run([*command, "--url", admin, "--key-file", str(key)])
        return code == 0 and "device" in capsys.readouterr().out

    # The command may end before the load.
    assert eventually(shows_the_device)
