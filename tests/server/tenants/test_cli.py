"""`peraxis keys --registry`: the first key, made on the registry's own machine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from deltastore.registry import Registry
from peraxis.cli import run
from server.tenants.keys import KeyStore

Output = pytest.CaptureFixture[str]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return Registry(tmp_path / "registry").root


def keys(root: Path, command: str, *args: str) -> int:
    return run(["keys", command, "--registry", str(root), *args])


def test_a_created_key_stands_alone_on_stdout_and_is_admitted(root: Path, capsys: Output) -> None:
    assert keys(root, "create", "--tenant", "ops", "--role", "admin", "--role", "publish") == 0
    captured = capsys.readouterr()
    caller = asyncio.run(KeyStore(root).caller(captured.out.strip()))
    assert caller.tenant.name == "ops"
    assert caller.roles == {"admin", "publish"}
    assert captured.out.strip() not in captured.err
    assert f"key {caller.key_id} of tenant ops, roles admin, publish, does not expire" in captured.err


def test_a_new_directory_becomes_a_registry_with_the_first_key(tmp_path: Path, capsys: Output) -> None:
    assert keys(tmp_path / "new", "create", "--tenant", "ops", "--role", "admin") == 0
    assert "is a new registry" in capsys.readouterr().err
    assert Registry(tmp_path / "new").check().is_clean


@pytest.mark.parametrize(
    "command", [["create", "--tenant", "a", "--role", "admin"], ["list"], ["revoke", "0" * 12]]
)
def test_a_directory_with_other_files_is_no_registry(
    tmp_path: Path, capsys: Output, command: list[str]
) -> None:
    (tmp_path / "notes.txt").write_text("")
    assert keys(tmp_path, *command) == 2
    assert f"{tmp_path} is not a registry" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_keys_are_listed_without_their_text_and_revoked(root: Path, capsys: Output) -> None:
    assert (
        keys(root, "create", "--tenant", "acme", "--role", "inference", "--expires-in", "30d", "--json") == 0
    )
    made = json.loads(capsys.readouterr().out)
    assert keys(root, "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["keys"]
    assert listed == [{name: value for name, value in made.items() if name != "key"}]
    assert keys(root, "list") == 0
    head, line = map(str.split, capsys.readouterr().out.splitlines())
    assert head == ["ID", "TENANT", "ROLES", "CREATED", "EXPIRES"]
    assert line == [made["id"], "acme", "inference", made["created_at"][:19], made["expires_at"][:19]]
    assert keys(root, "revoke", made["id"]) == 0
    assert capsys.readouterr().out == f"revoked {made['id']}\n"
    assert keys(root, "list", "--tenant", "acme") == 0
    assert capsys.readouterr().out.split() == head


def test_revoking_an_absent_key_fails(root: Path, capsys: Output) -> None:
    assert keys(root, "revoke", "0" * 12, "--json") == 1
    assert "there is no key" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_whole_key_is_revoked_by_its_id_and_its_secret_not_shown(root: Path, capsys: Output) -> None:
    assert keys(root, "create", "--tenant", "acme", "--role", "inference", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert keys(root, "revoke", made["key"]) == 0
    assert capsys.readouterr().out == f"revoked {made['id']}\n"
    secret = made["key"].rpartition("_")[2]
    assert keys(root, "revoke", secret) == 1
    assert secret[:8] not in capsys.readouterr().err


@pytest.mark.parametrize(
    "args",
    [
        ["--tenant", "acme"],
        ["--role", "admin"],
        ["--tenant", "acme", "--role", "root"],
        ["--tenant", "a/b", "--role", "admin"],
        ["--tenant", "acme", "--role", "admin", "--expires-in", "soon"],
        ["--tenant", "acme", "--role", "admin", "--expires-in", "0d"],
        ["--tenant", "acme", "--role", "admin", "--expires-in", "9999999d"],
    ],
    ids=" ".join,
)
def test_wrong_arguments_end_with_2_and_make_no_key(root: Path, capsys: Output, args: list[str]) -> None:
    assert keys(root, "create", *args) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert KeyStore(root).records() == {}
