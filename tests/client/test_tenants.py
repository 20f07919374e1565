"""`peraxis tenants` against a server that asks for keys, and against one that answers as a test says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client.tenants import LIMITS
from peraxis.cli import run
from server.tenants.changes import AuditLog, Auditor
from server.tenants.keys import KeyStore
from server.tenants.tenant import FIELDS
from tests.client.helpers.scripted_server import answer, scripted_server
from tests.server.helpers.live_server import Artifacts, eventually, live_server

Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def server(artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The options that reach a server with an administrator's key; tenants may pin three versions by default."""
    directory = tmp_path_factory.mktemp("tenants")
    registry, key, config = directory / "registry", directory / "admin.key", directory / "config.toml"
    key.write_text(KeyStore(registry).create(Auditor(AuditLog(registry)), "ops", ["admin"]).text)
    config.write_text("[default_limits]\nmax_pinned = 3\n")
    options = ("--auth", "keys", "--config", config, "--max-gpu-deltas", 2)
    with live_server(artifacts.base, registry, *options) as running:
        yield ["--url", running.url, "--key-file", str(key)]


def document(server: list[str], capsys: Output, *args: str) -> Any:
    assert run(["tenants", *args, *server, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_limits_that_are_not_given_stay(server: list[str], capsys: Output) -> None:
    assert run(["tenants", "set", "ops", "--requests-per-minute", "600", *server]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "requests_per_minute: 600",
        "tokens_per_minute: unlimited",
    ]
    reply = document(server, capsys, "set", "ops", "--max-stored-bytes", "0", "--max-pinned", "unlimited")
    assert {name: value for name, value in reply["limits"].items() if value is not None} == {
        "requests_per_minute": 600,
        "max_stored_bytes": 0,
        "max_stored_versions": 20_000,
        "max_variants": 10_000,
        "max_versions": 1_000,
    }


def test_the_first_limits_of_a_tenant_add_to_the_default_ones(server: list[str], capsys: Output) -> None:
    set_limits = document(server, capsys, "set", "new", "--max-running", "2")["limits"]
    assert (set_limits["max_running"], set_limits["max_pinned"]) == (2, 3)


def test_a_tenant_is_shown_with_its_keys_and_limits(server: list[str], capsys: Output) -> None:
    assert run(["keys", "create", "--tenant", "keyed", "--role", "inference", *server]) == 0
    capsys.readouterr()
    assert eventually(lambda: run(["tenants", "show", "keyed", *server]) == 0)
    shown = capsys.readouterr().out.splitlines()
    assert shown[-12:-9] == ["keys: 1", "variants: 0", "limits: default"]
    assert shown[-1] == "max_pinned: 3"
    assert document(server, capsys, "show", "keyed")["has_own_limits"] is False


def test_tenants_are_listed_with_a_column_per_limit(server: list[str], capsys: Output) -> None:
    assert run(["tenants", "set", "listed", "--max-stored-bytes", "2500000000", *server]) == 0
    capsys.readouterr()
    assert run(["tenants", "list", *server]) == 0
    titles, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    (row,) = [dict(zip(titles, each, strict=True)) for each in rows if each[0] == "listed"]
    assert (row["KEYS"], row["LIMITS"], row["STORED"], row["PINNED"]) == ("0", "own", "2.50GB", "3")
    assert row["REQUESTS/MIN"] == "-"
    names = [each["name"] for each in document(server, capsys, "list")["tenants"]]
    assert {"ops", "listed"} <= {*names}


def test_a_tenant_that_the_server_does_not_know_is_not_shown(server: list[str], capsys: Output) -> None:
    assert run(["tenants", "show", "absent", *server]) == 1
    assert "tenant 'absent' has no key, no variant and no limits" in capsys.readouterr().err


def test_a_limit_that_the_server_refuses_ends_with_1(server: list[str], capsys: Output) -> None:
    assert run(["tenants", "set", "ops", "--requests-per-minute", "0", *server]) == 1
    assert "requests_per_minute" in capsys.readouterr().err


def test_a_key_that_is_no_administrators_ends_with_4(
    server: list[str], tmp_path: Path, capsys: Output
) -> None:
    assert run(["keys", "create", "--tenant", "ops", "--role", "publish", *server]) == 0
    (tmp_path / "key").write_text(capsys.readouterr().out)
    options = [*server[:2], "--key-file", str(tmp_path / "key")]
    assert eventually(lambda: run(["ls", *options]) == 0)
    assert run(["tenants", "list", *options]) == 4


def test_limits_of_a_newer_server_are_kept_and_shown(capsys: Output) -> None:
    newer = dict.fromkeys(FIELDS) | {"max_new_things": 7}
    tenant = {"name": "a", "limits": newer, "has_own_limits": True, "num_keys": 0, "num_variants": 0}
    replies = (
        answer(200, {"tenants": [tenant], "default_limits": {}}),
        answer(200, {"name": "a", "limits": {**newer, "max_pinned": 1}, "has_own_limits": True}),
    )
    with scripted_server(*replies) as server:
        assert run(["tenants", "set", "a", "--max-pinned", "1", "--url", server.url]) == 0
    assert server.calls == ["GET /tenants", "PUT /tenants/a"]
    assert json.loads(server.received[1].body) == {**newer, "max_pinned": 1}
    assert "max_new_things: 7" in capsys.readouterr().out


def test_every_limit_of_the_server_has_an_option() -> None:
    assert tuple(LIMITS) == FIELDS


@pytest.mark.parametrize(
    "args",
    [
        ["a"],
        ["a", "--max-running", "many"],
        ["a", "--max-running", "-1"],
        ["a", "--max-running", "9" * 17],
        ["../keys", "--max-running", "1"],
    ],
)
def test_wrong_arguments_end_with_2_before_any_call(args: list[str], capsys: Output) -> None:
    with scripted_server() as server:
        assert run(["tenants", "set", *args, "--url", server.url]) == 2
    assert server.calls == []
    assert capsys.readouterr().err.count("\n") == 1
