"""`peraxis keys`, on a server that asks for keys and in a registry; and what a key lets other commands do."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deltastore.registry import Registry
from peraxis.cli import run
from server.tenants.keys import KeyStore
from tests.client.helpers.scripted_server import answer, scripted_server
from tests.server.helpers.live_server import Artifacts, LiveServer, eventually

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


@pytest.fixture
def guarded(guarded_server: tuple[LiveServer, Path]) -> Guarded:
    return Guarded(*guarded_server)


@pytest.fixture(autouse=True)
def _no_key_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERAXIS_API_KEY", raising=False)


@dataclass(frozen=True, slots=True)
class Place:
    """One of the two places that `peraxis keys` works on."""

    options: tuple[str, ...]
    registry: Path

    def run(self, *args: str) -> int:
        return run(["keys", *args, *self.options])

    def document(self, capsys: Output, *args: str) -> Any:
        assert self.run(*args, "--json") == 0
        return json.loads(capsys.readouterr().out)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return Registry(tmp_path / "registry").root


@pytest.fixture(params=["server", "registry"])
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "registry":
        root: Path = request.getfixturevalue("root")
        return Place(("--registry", str(root)), root)
    guarded: Guarded = request.getfixturevalue("guarded")
    return Place(("--url", guarded.server.url, "--key-file", str(guarded.admin)), guarded.server.registry)


@pytest.mark.parametrize(
    ("options", "expiry"), [([], "does not expire"), (["--expires-in", "1d"], "expires at 20")]
)
def test_a_created_key_stands_alone_on_stdout_and_is_admitted(
    place: Place, capsys: Output, options: list[str], expiry: str
) -> None:
    assert place.run("create", "--tenant", "acme", "--role", "publish", "--role", "admin", *options) == 0
    captured = capsys.readouterr()
    key = captured.out.strip()
    caller = asyncio.run(KeyStore(place.registry).caller(key))
    assert caller.tenant.name == "acme"
    assert caller.roles == {"admin", "publish"}
    assert captured.err.startswith(f"key {caller.key_id} of tenant acme, roles admin, publish, {expiry}")
    assert captured.err.endswith("; it is not shown again\n")
    assert key not in captured.err


def test_keys_are_listed_without_their_text_and_revoked_by_id(place: Place, capsys: Output) -> None:
    made = place.document(capsys, "create", "--tenant", "short", "--role", "inference", "--expires-in", "30d")
    listed = place.document(capsys, "list", "--tenant", "short")["keys"]
    assert listed == [{name: value for name, value in made.items() if name != "key"}]
    assert place.run("list", "--tenant", "short") == 0
    head, line = map(str.split, capsys.readouterr().out.splitlines())
    assert head == ["ID", "TENANT", "ROLES", "CREATED", "EXPIRES"]
    assert line == [made["id"], "short", "inference", made["created_at"][:19], made["expires_at"][:19]]
    assert place.run("revoke", made["id"]) == 0
    assert capsys.readouterr().out == f"revoked {made['id']}\n"
    assert place.document(capsys, "list", "--tenant", "short") == {"keys": []}
    assert place.run("list", "--tenant", "short") == 0
    assert capsys.readouterr().out.split() == head


def test_a_key_is_revoked_by_its_whole_text(place: Place, capsys: Output) -> None:
    made = place.document(capsys, "create", "--tenant", "pasted", "--role", "inference")
    assert place.document(capsys, "revoke", made["key"]) == {"id": made["id"], "revoked": True}
    assert place.document(capsys, "list", "--tenant", "pasted") == {"keys": []}


def test_revoking_an_absent_key_fails(place: Place, capsys: Output) -> None:
    assert place.run("revoke", "0" * 12, "--json") == 1
    assert "there is no key" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_of_a_whole_key_the_id_alone_is_sent(capsys: Output) -> None:
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
def test_help_lists_the_options_of_both_places_and_requires_neither(command: str, capsys: Output) -> None:
    assert run(["keys", command, "--help"]) == 0
    page = capsys.readouterr().out
    assert "Without a server" in page
    places = [line for line in page.splitlines() if "--registry  " in line or "--url  " in line]
    assert {"--registry", "--url", "--key-file"} <= set(page.split())
    assert len(places) == 2
    assert not [line for line in places if "*" in line]


def test_a_new_directory_becomes_a_registry_with_the_first_key(tmp_path: Path, capsys: Output) -> None:
    new = tmp_path / "new"
    assert run(["keys", "create", "--registry", str(new), "--tenant", "ops", "--role", "admin"]) == 0
    assert "is a new registry" in capsys.readouterr().err
    assert Registry(new).check().is_clean


@pytest.mark.parametrize(
    "command", [["create", "--tenant", "a", "--role", "admin"], ["list"], ["revoke", "0" * 12]]
)
def test_a_directory_with_other_files_is_no_registry(
    tmp_path: Path, capsys: Output, command: list[str]
) -> None:
    (tmp_path / "notes.txt").write_text("")
    assert run(["keys", *command, "--registry", str(tmp_path)]) == 2
    assert f"{tmp_path} is not a registry" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_name_that_no_tenant_may_have_makes_no_key(root: Path, capsys: Output) -> None:
    assert run(["keys", "create", "--registry", str(root), "--tenant", "a/b", "--role", "admin"]) == 2
    assert "tenant name 'a/b' is not allowed" in capsys.readouterr().err
    assert KeyStore(root).records() == {}


@pytest.mark.parametrize("option", [["--url", "http://127.0.0.1:1"], ["--key-file", "no-such-file"]])
def test_a_registry_and_a_server_at_once_are_refused(root: Path, capsys: Output, option: list[str]) -> None:
    assert run(["keys", "list", "--registry", str(root), *option]) == 2
    assert "leave out --url and --key-file" in capsys.readouterr().err


def test_the_address_in_the_environment_does_not_matter_to_a_registry(
    root: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERAXIS_URL", "no address")
    monkeypatch.setenv("PERAXIS_API_KEY", "no key")
    assert run(["keys", "list", "--registry", str(root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"keys": []}


def test_a_role_that_does_not_exist_is_answered_with_those_that_do(capsys: Output) -> None:
    assert run(["keys", "create", "--tenant", "acme", "--role", "root"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: Invalid value for '--role': 'root' is not one of 'inference', 'publish', 'metrics', 'admin'"
    )


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
        ["create", "--tenant", "acme", "--role", "admin", "--expires-in", "9999999d"],
        ["create", "--tenant", "acme", "--role", "admin", "--expires-in", "999999999d"],
        ["revoke", ".."],
        ["revoke", "ab" * 32],
    ],
    ids=" ".join,
)
def test_wrong_arguments_end_with_2_before_any_call_or_change(
    args: list[str], capsys: Output, tmp_path: Path
) -> None:
    with scripted_server() as server:
        assert run(["keys", *args, "--url", server.url]) == 2
    assert server.calls == []
    assert (from_server := capsys.readouterr().err).count("\n") == 1
    assert run(["keys", *args, "--registry", str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err == from_server
    assert not (tmp_path / "new").exists()
