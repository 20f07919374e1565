"""`peraxis keys` over HTTP, against a server that asks for keys; and what a key lets other commands do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from peraxis.cli import run
from server.tenants.audit import AuditLog, Auditor
from server.tenants.keys import KeyStore
from tests.client.helpers.scripted_server import answer, scripted_server
from tests.server.helpers.live_server import Artifacts, LiveServer, eventually, live_server

Output = pytest.CaptureFixture[str]


@dataclass(frozen=True, slots=True)
class Guarded:
    """A server that asks for keys, and an administrator's key file."""

    server: LiveServer
    admin: Path

    def run(self, *args: str, key_file: Path | None = None) -> int:
        return run([*args, "--url", self.server.url, "--key-file", str(key_file or self.admin)])

    def accepts(self, key_file: Path) -> bool:
        """True once the server knows a key; it reads changes within a second."""
        return eventually(lambda: self.run("ls", key_file=key_file) == 0)

    def document(self, capsys: Output, *args: str) -> Any:
        assert self.run(*args, "--json") == 0
        return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def guarded(artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    directory = tmp_path_factory.mktemp("guarded")
    registry, admin = directory / "registry", directory / "admin.key"
    admin.write_text(KeyStore(registry).create(Auditor(AuditLog(registry)), "ops", ["admin"]).text + "\n")
    with live_server(artifacts.base, registry, "--auth", "keys", "--max-gpu-deltas", 2) as server:
        yield Guarded(server, admin)


@pytest.fixture(autouse=True)
def _no_key_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERAXIS_API_KEY", raising=False)


def test_a_created_key_stands_alone_on_stdout_and_works(
    guarded: Guarded, capsys: Output, tmp_path: Path
) -> None:
    assert guarded.run("keys", "create", "--tenant", "acme", "--role", "publish", "--expires-in", "1d") == 0
    captured = capsys.readouterr()
    (tmp_path / "acme.key").write_text(captured.out)
    key = captured.out.strip()
    assert captured.err.startswith("key ")
    assert "of tenant acme, roles publish, expires at 20" in captured.err
    assert key not in captured.err
    assert guarded.accepts(tmp_path / "acme.key")


def test_keys_are_listed_without_their_text_and_revoked_by_id(guarded: Guarded, capsys: Output) -> None:
    made = guarded.document(capsys, "keys", "create", "--tenant", "short", "--role", "inference")
    listed = guarded.document(capsys, "keys", "list", "--tenant", "short")["keys"]
    assert listed == [{name: value for name, value in made.items() if name != "key"}]
    assert guarded.run("keys", "list") == 0
    assert made["key"] not in (table := capsys.readouterr().out)
    assert f"{made['id']}  short   inference" in table
    assert guarded.run("keys", "revoke", made["id"]) == 0
    assert capsys.readouterr().out == f"revoked {made['id']}\n"
    assert guarded.document(capsys, "keys", "list", "--tenant", "short") == {"keys": []}


def test_a_whole_key_is_revoked_by_its_id_alone(capsys: Output) -> None:
    with scripted_server(answer(200, {"id": "0" * 12, "revoked": True})) as server:
        assert run(["keys", "revoke", f"pxk_{'0' * 12}_{'ab' * 32}", "--url", server.url]) == 0
    assert server.calls == [f"DELETE /keys/{'0' * 12}"]
    assert capsys.readouterr().out == f"revoked {'0' * 12}\n"


@pytest.mark.parametrize("text", ["ab" * 32, f"pxk_{'ab' * 32}", f"{'ab' * 32}_", "secret-word"])
def test_what_holds_no_id_is_neither_sent_nor_repeated(text: str, capsys: Output) -> None:
    with scripted_server() as server:
        assert run(["keys", "revoke", text, "--url", server.url]) == 2
    assert server.calls == []
    assert text[:12] not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["create", "list", "revoke"])
def test_help_lists_the_options_of_both_forms(command: str, capsys: Output) -> None:
    assert run(["keys", command, "--help"]) == 0
    page = capsys.readouterr().out
    assert "With --registry" in page
    assert {"--registry", "--url", "--key-file"} <= set(page.split())


def test_without_a_key_every_command_ends_with_4(guarded: Guarded, capsys: Output) -> None:
    for command in (["ls"], ["keys", "list"], ["chat", "a", "--once", "Hi"], ["rm", "a"]):
        assert run([*command, "--url", guarded.server.url]) == 4
        assert "set PERAXIS_API_KEY or give --key-file" in capsys.readouterr().err


def test_a_key_without_the_role_ends_with_4(guarded: Guarded, capsys: Output, tmp_path: Path) -> None:
    assert guarded.run("keys", "create", "--tenant", "acme", "--role", "inference") == 0
    (tmp_path / "key").write_text(capsys.readouterr().out)
    assert guarded.accepts(tmp_path / "key")
    capsys.readouterr()
    assert guarded.run("keys", "list", key_file=tmp_path / "key") == 4
    assert "needs a key with the role admin" in capsys.readouterr().err


def test_a_push_by_a_key_belongs_to_its_tenant(
    guarded: Guarded, artifacts: Artifacts, capsys: Output, tmp_path: Path
) -> None:
    assert guarded.run("keys", "create", "--tenant", "owner", "--role", "publish") == 0
    (tmp_path / "key").write_text(capsys.readouterr().out)
    assert guarded.accepts(tmp_path / "key")
    capsys.readouterr()
    for _ in range(2):
        arguments = ["push", str(artifacts.plain), "--name", "owned", "--json"]
        assert guarded.run(*arguments, key_file=tmp_path / "key") == 0
        assert json.loads(capsys.readouterr().out)["version"] == 1
    assert [path.name for path in (guarded.server.registry / "variants" / "owner").iterdir()] == ["owned"]


def test_an_administrator_acts_for_a_tenant(guarded: Guarded, artifacts: Artifacts, capsys: Output) -> None:
    acting = ["--tenant", "managed", "--json"]
    assert guarded.run("push", str(artifacts.third), "--name", "theirs", *acting) == 0
    assert json.loads(capsys.readouterr().out)["active"] is True
    assert [each["name"] for each in guarded.document(capsys, "ls", "--tenant", "managed")["variants"]] == [
        "theirs"
    ]
    assert "theirs" not in json.dumps(guarded.document(capsys, "ls"))


def test_a_public_variant_of_another_tenant_is_listed_with_its_owner_and_show_explains(
    guarded: Guarded, artifacts: Artifacts, capsys: Output, tmp_path: Path
) -> None:
    public = ["--name", "for-all", "--tenant", "giver", "--visibility", "public"]
    assert guarded.run("push", str(artifacts.plain), *public) == 0
    assert capsys.readouterr().out.startswith("giver/for-all@1 ")
    assert guarded.run("keys", "create", "--tenant", "taker", "--role", "inference") == 0
    (tmp_path / "key").write_text(capsys.readouterr().out)
    assert guarded.accepts(tmp_path / "key")
    captured = capsys.readouterr()
    rows = [line.split() for line in captured.out.splitlines()]
    assert ["for-all", "giver"] in [row[:2] for row in rows]
    assert captured.err.endswith("no variants of tenant taker\n")
    assert guarded.run("show", "for-all", key_file=tmp_path / "key") == 1
    assert "is public and belongs to tenant 'giver'" in capsys.readouterr().err


def test_a_push_with_an_admin_key_tells_its_tenant(
    guarded: Guarded, artifacts: Artifacts, capsys: Output
) -> None:
    assert guarded.run("push", str(artifacts.plain), "--name", "own") == 0
    assert capsys.readouterr().out.startswith("ops/own@1 ")


@pytest.mark.parametrize(
    "args",
    [
        ["create", "--tenant", "acme"],
        ["create", "--role", "admin"],
        ["create", "--tenant", "acme", "--role", "root"],
        ["create", "--tenant", "acme", "--role", "admin", "--expires-in", "soon"],
        ["create", "--tenant", "acme", "--role", "admin", "--expires-in", "0d"],
        ["revoke", ".."],
    ],
)
def test_wrong_arguments_end_with_2_before_any_call(args: list[str], capsys: Output) -> None:
    with scripted_server() as server:
        assert run(["keys", *args, "--url", server.url]) == 2
    assert server.calls == []
    assert capsys.readouterr().err.count("\n") == 1
