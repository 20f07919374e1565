"""`peraxis doctor --url`: findings about a running server."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import pytest

from peraxis.cli import run
from tests.client.helpers.scripted_server import Reaction, answer, refuse, scripted_server
from tests.server.helpers.live_server import LiveServer

Output = pytest.CaptureFixture[str]
ALIVE, READY = answer(200, {"status": "alive"}), answer(200, {"status": "ready"})
KEY = {"id": "0a1b", "expires_at": "2027-01-02T03:04:05+00:00"}
ME = answer(200, {"tenant": "acme", "roles": ["inference", "publish"], "key": KEY})
STATS = answer(200, {"server": {"versions": {"peraxis": version("peraxis")}}})


def examined(capsys: Output, *reactions: Reaction) -> tuple[int, dict[str, dict[str, Any]]]:
    """Examine a scripted server; return the exit code and the checks by subject."""
    with scripted_server(*reactions) as server:
        code = run(["doctor", "--url", server.url, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is (code == 0)
    return code, {check["subject"]: check for check in document["checks"]}


def test_a_running_server_has_no_failed_check(server: LiveServer, capsys: Output) -> None:
    assert run(["doctor", "--url", server.url]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines] == ["server", "ready", "key", "version"]
    assert [line[0] for line in lines][:2] == ["ok", "ok"]


def test_without_an_address_the_check_of_this_machine_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.delenv("PERAXIS_URL", raising=False)
    assert run(["doctor"]) == 2
    message = "error: give --url of a running server; `peraxis serve --check` checks this machine\n"
    assert capsys.readouterr().err == message


def test_the_address_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    with scripted_server(ALIVE, READY, ME, STATS) as server:
        monkeypatch.setenv("PERAXIS_URL", server.url)
        assert run(["doctor"]) == 0
    assert f"{server.url} answers" in capsys.readouterr().out


def test_findings_name_flags(capsys: Output) -> None:
    for failed in (refuse(401, "invalid_api_key"), answer(404, b"<html>")):
        code, checks = examined(capsys, ALIVE, failed, failed, STATS)
        assert code == 1
        assert "`" not in checks["ready"]["message"]
        assert "--url" in checks["ready"]["message"] or "--key-file" in checks["ready"]["message"]


def test_the_keys_tenant_roles_and_expiry_are_told(capsys: Output) -> None:
    code, checks = examined(capsys, ALIVE, READY, ME, STATS)
    assert code == 0
    assert checks["key"]["message"] == (
        "0a1b of tenant acme, roles inference, publish, expires at 2027-01-02T03:04:05+00:00"
    )
    assert checks["version"]["state"] == "ok"


def test_a_server_that_is_not_ready_has_failed(capsys: Output) -> None:
    code, checks = examined(capsys, ALIVE, refuse(503, "overloaded", "the base is still loading"), ME, STATS)
    assert code == 1
    assert (checks["ready"]["state"], checks["ready"]["message"]) == ("failed", "the base is still loading")


def test_a_key_that_is_refused_has_failed_and_the_version_is_unknown(capsys: Output) -> None:
    refused = refuse(401, "invalid_api_key")
    code, checks = examined(capsys, ALIVE, READY, refused, refused)
    assert code == 1
    assert "set PERAXIS_API_KEY" in checks["key"]["message"]
    assert checks["version"]["state"] == "note"


def test_another_version_is_noted(capsys: Output) -> None:
    other = answer(200, {"server": {"versions": {"peraxis": "9.9.9"}}})
    code, checks = examined(capsys, ALIVE, READY, ME, other)
    assert (code, checks["version"]["state"]) == (0, "note")
    assert checks["version"]["message"].startswith("9.9.9, and this command has ")


def test_without_an_answer_there_is_one_failed_check(capsys: Output) -> None:
    with scripted_server() as server:
        url = server.url
    assert run(["doctor", "--url", url]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"failed  server  no server answers at {url}")
