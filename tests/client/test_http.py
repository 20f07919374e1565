"""The connection to a server: addresses, keys, and failed calls as errors and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from client.http import ServerAddress
from peraxis.cli import run
from tests.client.helpers.scripted_server import answer, break_off, refuse, scripted_server

Output = pytest.CaptureFixture[str]
NO_VARIANTS = answer(200, {"variants": []})


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PERAXIS_URL", "PERAXIS_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_the_url_comes_from_the_option_or_else_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    with scripted_server(NO_VARIANTS, NO_VARIANTS) as server:
        monkeypatch.setenv("PERAXIS_URL", server.url)
        assert run(["ls"]) == 0
        monkeypatch.setenv("PERAXIS_URL", "http://127.0.0.1:1")
        assert run(["ls", "--url", f"{server.url}/"]) == 0
    assert server.calls == ["GET /variants", "GET /variants"]


def test_a_path_before_the_routes_is_kept() -> None:
    with scripted_server(NO_VARIANTS) as server:
        assert run(["ls", "--url", f"{server.url}/llm"]) == 0
    assert server.calls == ["GET /llm/variants"]


def test_a_key_file_wins_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("pxk_file\n")
    monkeypatch.setenv("PERAXIS_API_KEY", "pxk_environment")
    with scripted_server(NO_VARIANTS, NO_VARIANTS) as server:
        assert run(["ps", "--json", "--url", server.url]) == 0
        assert run(["ps", "--json", "--url", server.url, "--key-file", str(tmp_path / "key")]) == 0
    keys = [each.headers.get("Authorization") for each in server.received]
    assert keys == ["Bearer pxk_environment", "Bearer pxk_file"]


def test_with_a_tenant_every_call_names_it() -> None:
    with scripted_server(NO_VARIANTS, answer(200, {"name": "a", "deleted": [1]})) as server:
        assert run(["ls", "--tenant", "acme", "--url", server.url]) == 0
        assert run(["rm", "a@1", "--tenant", "acme", "--url", server.url]) == 0
    assert server.calls == ["GET /variants?tenant=acme", "DELETE /variants/a?tenant=acme&version=1"]


def test_without_a_key_none_is_sent() -> None:
    with scripted_server(NO_VARIANTS) as server:
        assert run(["ls", "--url", server.url]) == 0
    assert "Authorization" not in server.received[0].headers


@pytest.mark.parametrize("content", [b"", b" \n", b"two words", b"\xff\xfe", b"a" * 5000, b"a\nb"])
def test_a_file_without_a_key_is_refused_and_its_content_not_shown(
    content: bytes, tmp_path: Path, capsys: Output
) -> None:
    (tmp_path / "key").write_bytes(content)
    with scripted_server() as server:
        assert run(["ls", "--url", server.url, "--key-file", str(tmp_path / "key")]) == 2
    line = capsys.readouterr().err
    assert str(tmp_path / "key") in line
    assert "two words" not in line
    assert server.calls == []


def test_a_key_file_that_does_not_exist_ends_with_2(tmp_path: Path, capsys: Output) -> None:
    assert run(["ls", "--key-file", str(tmp_path / "gone")]) == 2
    assert f"{tmp_path / 'gone'}: no such file" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://host:8000/v1", "http://host/llm/v1/"])
def test_the_path_of_openais_routes_is_refused_with_the_way_out(url: str, capsys: Output) -> None:
    assert run(["ls", "--url", url]) == 2
    assert "leave /v1 out" in capsys.readouterr().err


def test_an_address_does_not_show_its_key() -> None:
    assert "pxk_secret" not in repr(ServerAddress("http://host", "pxk_secret"))


@pytest.mark.parametrize(
    "url",
    ["ftp://host", "host:8000", "http://", "http://host?a=b", "http://user:pw@host", "http://host:port", ""],
)
def test_a_wrong_url_ends_with_2(url: str, capsys: Output) -> None:
    assert run(["ls", "--url", url]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: --url")
    assert "pw" not in line


@pytest.mark.parametrize(("status", "code"), [(401, "invalid_api_key"), (403, "forbidden")])
def test_authentication_ends_with_4(status: int, code: str, capsys: Output) -> None:
    with scripted_server(refuse(status, code)) as server:
        assert run(["ls", "--url", server.url, "--json"]) == 4
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["type"], error["code"]) == ("AuthenticationFailed", code)


def test_a_missing_key_is_told_with_the_places_for_one(capsys: Output) -> None:
    with scripted_server(refuse(401, "invalid_api_key")) as server:
        assert run(["ls", "--url", server.url]) == 4
    assert capsys.readouterr().err == (
        f"error: {server.url} asks for an API key: set PERAXIS_API_KEY or give --key-file\n"
    )


def test_a_refused_key_is_not_shown(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setenv("PERAXIS_API_KEY", "pxk_abc_secret")
    with scripted_server(refuse(401, "invalid_api_key", "the key has expired")) as server:
        assert run(["ls", "--url", server.url]) == 4
    line = capsys.readouterr().err
    assert "does not accept the API key (the key has expired)" in line
    assert "pxk_abc_secret" not in line


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (answer(200, b"<html>welcome</html>"), "is not a Peraxis server's"),
        (answer(200, {"variants": [{"name": 1}]}), "is not a Peraxis server's"),
        (answer(200, b'{"variants": "\xff"}'), "is not a Peraxis server's"),
        (answer(302, b"", Location="https://elsewhere.example/"), "leads to https://elsewhere.example/"),
        (answer(418, b"tea"), "answered 418"),
        (break_off(), "broke off"),
    ],
)  # fmt: skip
def test_an_answer_that_is_not_the_servers_is_one_line(reply: object, message: str, capsys: Output) -> None:
    with scripted_server(reply) as server:  # type: ignore[arg-type]
        assert run(["ls", "--url", server.url]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)


def test_a_servers_message_cannot_command_the_terminal(capsys: Output) -> None:
    with scripted_server(refuse(400, "invalid_request", "a\x1b[2Jb\nc")) as server:
        assert run(["ls", "--url", server.url]) == 1
    assert capsys.readouterr().err == "error: a[2Jb c\n"
