"""The commands of registered variants, against a running server."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from peraxis.cli import run
from tests.client.helpers.scripted_server import answer, scripted_server
from tests.client.helpers.terminal import on_terminal
from tests.server.helpers.live_server import Artifacts, LiveServer, eventually

NUMBERS = itertools.count()
Output = pytest.CaptureFixture[str]


def command(server: LiveServer, *args: str) -> int:
    return run([*args, "--url", server.url])


def document(server: LiveServer, capsys: Output, *args: str) -> Any:
    """Run a command with --json; return its one document."""
    assert command(server, *args, "--json") == 0
    return json.loads(capsys.readouterr().out)


def table(capsys: Output) -> tuple[list[str], list[dict[str, str]]]:
    """Return the titles of a table, and its rows by title; no cell holds a space."""
    titles, *rows = fields(capsys)
    return titles, [dict(zip(titles, row, strict=True)) for row in rows]


def fields(capsys: Output) -> list[list[str]]:
    """Return the lines of a table, each split at spaces."""
    return [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def two_versions(server: LiveServer, artifacts: Artifacts) -> str:
    """A variant of the test's own with two versions, the second active."""
    name = f"two-versions-{next(NUMBERS)}"
    for artifact in (artifacts.plain, artifacts.third):
        assert server.upload(name, artifact).status_code == 201
    return name


def test_ls_has_a_line_per_variant(server: LiveServer, two_versions: str, capsys: Output) -> None:
    assert command(server, "ls") == 0
    _, rows = table(capsys)
    (row,) = [row for row in rows if row["NAME"] == two_versions]
    assert (row["OWNER"], row["ACTIVE"], row["VERSIONS"]) == ("default", "2", "2")
    assert row["VISIBILITY"] == "private"


def test_ls_and_registry_ls_show_the_same_things_in_the_same_columns(
    server: LiveServer, two_versions: str, capsys: Output
) -> None:
    assert command(server, "ls") == 0
    titles, rows = table(capsys)
    assert run(["registry", "ls", "--registry", str(server.registry)]) == 0
    titles_on_disk, rows_on_disk = table(capsys)
    shared = [title for title in titles if title in titles_on_disk]
    assert shared == [title for title in titles_on_disk if title in titles]
    assert {"NAME", "OWNER", "SIZE", "VISIBILITY", "DIGEST", "CREATED"} < {*shared}
    (row,) = [row for row in rows if row["NAME"] == two_versions]
    (on_disk,) = [each for each in rows_on_disk if (each["NAME"], each["ACTIVE"]) == (two_versions, "active")]
    assert row["ACTIVE"] == on_disk["VERSION"]
    assert [row[title] for title in shared if title != "ACTIVE"] == [
        on_disk[title] for title in shared if title != "ACTIVE"
    ]


def test_ls_gives_the_servers_document_as_json(server: LiveServer, capsys: Output) -> None:
    names = [variant["name"] for variant in document(server, capsys, "ls")["variants"]]
    assert {"plain", "chatty", "third"} <= set(names)


@pytest.mark.parametrize("command", ["ls", "ps"])
def test_an_empty_list_is_told_on_stderr(command: str, capsys: Output) -> None:
    with scripted_server(answer(200, {"variants": []})) as server:
        assert run([command, "--tenant", "acme", "--url", server.url]) == 0
    assert capsys.readouterr().err == "no variants of tenant acme\n"


def test_show_has_a_line_per_version_and_the_fidelity(
    server: LiveServer, two_versions: str, capsys: Output
) -> None:
    assert command(server, "show", two_versions) == 0
    head, first, second, *fidelity = fields(capsys)
    assert head[:2] == ["ACTIVE", "VERSION"]
    assert (first[:2], second[:2]) == (["-", "1"], ["active", "2"])
    assert ["fidelity", "weight_error:"] in [line[:2] for line in fidelity]


def test_the_fidelity_is_shown_without_brackets_and_bounded(capsys: Output) -> None:
    version = {
        "version": 1, "digest": "sha256:00", "size_bytes": 1, "device_bytes": 1, "method": "both",
        "created_at": "2026-01-01", "level": "disk", "pinned": False, "num_requests": 0,
        "fidelity": {"held_out": {"kl": 0.5, "text": "a" * 1000}, "many": dict.fromkeys(map(str, range(99)), 1)},
    }  # fmt: skip
    with scripted_server(answer(200, {"name": "a", "active": 1, "versions": [version]})) as server:
        assert run(["show", "a", "--url", server.url]) == 0
    held_out, many = capsys.readouterr().out.splitlines()[2:]
    assert held_out.startswith("fidelity held_out: kl 0.5, text 'aaaa")
    assert max(len(held_out), len(many)) < 200


def test_a_variant_is_loaded_pinned_and_unloaded(
    server: LiveServer, two_versions: str, capsys: Output
) -> None:
    assert document(server, capsys, "load", f"{two_versions}@1")["version"] == 1

    def resident() -> dict[str, Any]:
        found = document(server, capsys, "ps")["resident"]
        return next((each for each in found if each["name"] == two_versions), {})

    assert eventually(lambda: resident().get("level") == "device")
    assert document(server, capsys, "pin", f"{two_versions}@1")["pinned"] is True
    assert command(server, "ps") == 0
    (row,) = [row for row in table(capsys)[1] if row["NAME"] == f"{two_versions}@1"]
    assert (row["LEVEL"], row["PINNED"], row["REQUESTS"]) == ("device", "pinned", "0")
    assert document(server, capsys, "unpin", f"{two_versions}@1")["pinned"] is False
    assert command(server, "unload", f"{two_versions}@1") == 0
    assert capsys.readouterr().out.startswith(f"{two_versions}@1: now on level ")
    assert eventually(lambda: resident().get("level") != "device")


def test_promote_and_rollback_choose_the_active_version(
    server: LiveServer, two_versions: str, capsys: Output
) -> None:
    assert document(server, capsys, "rollback", two_versions)["active"] == 1
    assert command(server, "promote", two_versions, "2") == 0
    assert capsys.readouterr().out == f"{two_versions}: version 2 is active\n"


def test_share_and_unshare_change_who_may_use_a_variant(
    server: LiveServer, two_versions: str, capsys: Output
) -> None:
    assert command(server, "share", two_versions) == 0
    assert capsys.readouterr().out == f"{two_versions} is public: every tenant may use it\n"
    assert server.client.get(f"/variants/{two_versions}").json()["visibility"] == "public"
    assert document(server, capsys, "unshare", two_versions)["visibility"] == "private"
    assert command(server, "unshare", two_versions) == 0
    assert capsys.readouterr().out == f"{two_versions} is private: only tenant default may use it\n"


def test_rollback_returns_to_the_version_that_was_active_before_not_to_the_one_below(
    server: LiveServer, two_versions: str, artifacts: Artifacts, capsys: Output
) -> None:
    assert command(server, "promote", two_versions, "1") == 0
    assert server.upload(two_versions, artifacts.chatty).status_code == 201
    capsys.readouterr()
    assert document(server, capsys, "show", two_versions)["previous"] == 1
    assert document(server, capsys, "rollback", two_versions)["active"] == 1
    assert document(server, capsys, "rollback", two_versions)["active"] == 3


def test_the_only_version_cannot_be_rolled_back(
    server: LiveServer, artifacts: Artifacts, capsys: Output
) -> None:
    assert server.upload("only-version", artifacts.plain).status_code == 201
    assert command(server, "rollback", "only-version") == 1
    assert "no version is known that was active before 1 and still exists" in capsys.readouterr().err


def test_without_an_active_version_rollback_names_promote(capsys: Output) -> None:
    with scripted_server(answer(200, {"name": "a", "active": None, "versions": []})) as server:
        assert run(["rollback", "a", "--url", server.url]) == 1
    assert "has no active version: promote one" in capsys.readouterr().err


def test_off_a_terminal_rm_deletes_without_a_question(
    server: LiveServer, two_versions: str, capsys: Output
) -> None:
    assert command(server, "rm", f"{two_versions}@1") == 0
    assert capsys.readouterr().out == f"deleted {two_versions}: version 1\n"
    assert document(server, capsys, "rm", two_versions)["deleted"] == [2]
    assert command(server, "show", two_versions, "--json") == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "model_not_found"


def test_on_a_terminal_rm_asks_and_keeps_what_is_not_confirmed(server: LiveServer, two_versions: str) -> None:
    question = f"Delete {two_versions} with all its versions from {server.url}? [y/N]"
    refused = on_terminal("rm", two_versions, "--url", server.url, typed=((question, b"\n"),))
    assert (refused.code, "aborted" in refused.screen) == (1, True)
    assert server.client.get(f"/variants/{two_versions}").status_code == 200
    done = on_terminal("rm", two_versions, "--url", server.url, typed=((question, b"y\n"),))
    assert (done.code, "deleted" in done.screen) == (0, True)


def test_on_a_terminal_rm_with_yes_does_not_ask(server: LiveServer, two_versions: str) -> None:
    done = on_terminal("rm", f"{two_versions}@1", "--yes", "--url", server.url)
    assert (done.code, "[y/N]" in done.screen) == (0, False)


@pytest.mark.parametrize(
    "args",
    [
        ["load", "a@x"],
        ["rm", "a@"],
        ["show", ".."],
        ["show", "a@1"],
        ["share", "a@1"],
        ["promote", "a", "0"],
        ["pin", "a@1234567890"],
    ],
)
def test_a_wrong_name_or_version_ends_with_2_before_any_call(args: list[str], capsys: Output) -> None:
    with scripted_server() as server:
        assert run([*args, "--url", server.url]) == 2
    assert server.calls == []
    assert capsys.readouterr().err.count("\n") == 1


def test_a_name_cannot_reach_another_route(capsys: Output) -> None:
    with scripted_server(answer(404, {})) as server:
        assert run(["show", "../v1/models?x", "--url", server.url]) == 1
    assert server.calls == ["GET /variants/..%2Fv1%2Fmodels%3Fx"]


def test_colours_appear_on_a_terminal_and_not_with_no_color(server: LiveServer) -> None:
    coloured = on_terminal("ls", "--url", server.url)
    plain = on_terminal("ls", "--url", server.url, NO_COLOR="1")
    assert "\x1b[1m" in coloured.screen
    assert "\x1b[3" not in plain.screen
    assert "plain" in plain.screen


def test_names_of_a_server_cannot_command_the_terminal(tmp_path: Path, capsys: Output) -> None:
    variant: dict[str, Any] = {"name": "a\x1b]0;owned\x07\nb", "active": None, "versions": []}
    with scripted_server(answer(200, {"variants": [variant]})) as server:
        assert run(["ls", "--url", server.url]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "a]0;owned b" in out


def test_every_page_of_a_list_is_read(capsys: Output) -> None:
    def variant(name: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "active": 2, "versions": [version(2)], **more}

    def version(number: int, level: str = "disk") -> dict[str, Any]:
        return {
            "version": number, "digest": "sha256:00", "size_bytes": 1, "device_bytes": 1, "method": "both",
            "created_at": "2026-01-01", "level": level, "pinned": False, "num_requests": 0,
        }  # fmt: skip

    pages = [
        {"variants": [variant("a")], "has_more": True, "last_id": "a"},
        {"variants": [variant("b", num_versions=2)], "has_more": False, "last_id": "b"},
    ]
    with scripted_server(*(answer(200, page) for page in pages)) as server:
        assert run(["ls", "--json", "--url", server.url]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in shown["variants"]] == ["a", "b"]
    assert "has_more" not in shown
    assert server.calls == ["GET /variants", "GET /variants?after=a"]
    # An older version in memory stands in no list of variants.
    versions = [
        {**variant("b"), "versions": [version(1, "device")], "has_more": True, "last_id": "1"},
        {**variant("b"), "versions": [version(2)], "has_more": False, "last_id": "2"},
    ]
    with scripted_server(*(answer(200, page) for page in (*pages, *versions))) as server:
        assert run(["ps", "--json", "--url", server.url]) == 0
    assert [each["version"] for each in json.loads(capsys.readouterr().out)["resident"]] == [1]
    assert server.calls[2:] == ["GET /variants/b", "GET /variants/b?after=1"]


def test_a_list_that_never_ends_is_an_error(capsys: Output) -> None:
    page = answer(200, {"variants": [], "has_more": True, "last_id": "a"})
    with scripted_server(page, page) as server:
        assert run(["ls", "--url", server.url]) == 1
    assert "begins where this one began" in capsys.readouterr().err
