"""`peraxis push`: what it sends, when it sends it again, and when it sends nothing."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import constants

from client import waiting
from client.http import BlockingTransport, NoAnswer, NoServer, ServerAddress, ServerRefused
from client.options import print_line
from client.publishing import MAX_ATTEMPTS, ArtifactFile, Publishing, publish
from client.waiting import ServerWait
from deltastore import console
from deltastore.errors import ArtifactError
from peraxis.cli import run
from tests.client.helpers.cutting_proxy import cutting_proxy
from tests.client.helpers.scripted_server import (
    Reaction,
    ScriptedServer,
    answer,
    break_off,
    refuse,
    scripted_server,
    stop,
)
from tests.client.helpers.terminal import on_terminal
from tests.helpers.hub import FILE, Hub, asked_hub, commit, commit_of
from tests.server.helpers.live_server import ARTIFACT_PREFIX, Artifacts, LiveServer

Output = pytest.CaptureFixture[str]
ABSENT = refuse(404, "model_not_found")
CONTENT = ARTIFACT_PREFIX + bytes(range(256)) * 20_000
SHA256 = hashlib.sha256(CONTENT)
VERSION = {
    "version": 3, "digest": f"sha256:{SHA256.hexdigest()}", "size_bytes": len(CONTENT), "device_bytes": 1,
    "method": "both", "created_at": "2026-01-02T03:04:05+00:00", "level": "disk", "pinned": False,
    "num_requests": 0,
}  # fmt: skip
KNOWN = answer(
    200, {"name": "a", "active": 2, "versions": [{**VERSION, "version": 2, "digest": "sha256:0"}, VERSION]}
)
CREATED = answer(
    201, {"name": "a", "version": 1, "digest": VERSION["digest"], "size_bytes": len(CONTENT), "active": True}
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tuned.safetensors"
    path.write_bytes(CONTENT)
    return path


def pushed(file: Path | str, *reactions: Reaction, args: tuple[str, ...] = ()) -> tuple[int, ScriptedServer]:
    """Push the file to a scripted server; return the exit code and the server."""
    with scripted_server(*reactions) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "MAX_PAUSE_S", 0)
        code = run(["push", str(file), "--name", "a", "--url", server.url, "--no-progress", *args])
    return code, server


class PausedTransport(BlockingTransport):
    """A transport that notes its pauses and takes none."""

    def __init__(self, address: ServerAddress) -> None:
        super().__init__(address)
        self.pauses: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)


def pauses_of_push(file: Path, *reactions: Reaction) -> tuple[list[float], NoAnswer | ServerRefused | None]:
    """Push to a scripted server on a clock that only pauses move; return them, and the error that ended the push."""
    publishing = Publishing(ArtifactFile.read(file, lambda _: None), "a", True)
    with scripted_server(*reactions) as scripted:
        transport = PausedTransport(ServerAddress.of(scripted.url))
        wait = ServerWait(scripted.url, clock=lambda: sum(transport.pauses), tell=print_line)
        try:
            asyncio.run(publish(transport, publishing, False, wait, print_line))
        except (NoAnswer, ServerRefused) as error:
            return transport.pauses, error
        finally:
            asyncio.run(transport.close())
    return transport.pauses, None


def error_of(capsys: Output) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(capsys.readouterr().out)["error"]
    return error


def test_an_artifact_becomes_the_next_version(
    server: LiveServer, artifacts: Artifacts, capsys: Output
) -> None:
    arguments = ["push", str(artifacts.plain), "--name", "pushed", "--url", server.url, "--no-progress"]
    assert run([*arguments, "--json"]) == 0
    reply = json.loads(capsys.readouterr().out)
    digest = hashlib.sha256(artifacts.plain.read_bytes()).hexdigest()
    assert reply == {
        "name": "pushed", "version": 1, "digest": f"sha256:{digest}",
        "size_bytes": artifacts.plain.stat().st_size, "active": True,
    }  # fmt: skip
    assert server.client.get("/variants/pushed").json()["active"] == 1


@pytest.mark.parametrize("name", ["my model", "", "a/b", "..", "a" * 65])
def test_a_name_that_no_variant_can_have_ends_with_2(name: str, file: Path, capsys: Output) -> None:
    assert run(["push", str(file), "--name", name, "--url", "http://127.0.0.1:1"]) == 2
    assert "take 1 to 64 letters, digits, '.', '_' and '-'" in capsys.readouterr().err


def test_a_file_that_does_not_exist_ends_with_2(tmp_path: Path, capsys: Output) -> None:
    assert run(["push", str(tmp_path / "gone"), "--name", "a", "--url", "http://127.0.0.1:1"]) == 2
    assert f"{tmp_path / 'gone'}: no such file: give the artifact" in capsys.readouterr().err


def test_an_artifact_that_the_server_has_is_not_sent_again(
    server: LiveServer, artifacts: Artifacts, capsys: Output
) -> None:
    arguments = ["push", str(artifacts.third), "--name", "twice", "--url", server.url, "--json"]
    assert run(arguments) == 0
    first, received = capsys.readouterr().out, server.metric("upload_bytes_total")
    assert run(arguments) == 0
    assert capsys.readouterr().out == first
    assert server.metric("upload_bytes_total") == received


def test_a_push_over_connections_that_break_makes_one_version(
    server: LiveServer, artifacts: Artifacts, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "MAX_PAUSE_S", 0)
    address = httpx.URL(server.url)
    size = artifacts.spare[0].stat().st_size
    with cutting_proxy(address.host, address.port or 0, size // 2, size // 3) as proxy:
        assert (
            run(["push", str(artifacts.spare[0]), "--name", "cut", "--url", proxy.url, "--no-progress"]) == 0
        )
        assert len(proxy.sent) == 3
    assert capsys.readouterr().err.count("failed: the connection to") == 2
    (version,) = server.client.get("/variants/cut").json()["versions"]
    assert version["digest"] == f"sha256:{hashlib.sha256(artifacts.spare[0].read_bytes()).hexdigest()}"


def test_with_no_activate_the_version_before_stays_active(
    server: LiveServer, artifacts: Artifacts, capsys: Output
) -> None:
    for artifact, option in ((artifacts.plain, "--activate"), (artifacts.third, "--no-activate")):
        assert run(["push", str(artifact), "--name", "kept", "--url", server.url, option]) == 0
    assert "not active: `peraxis promote kept 2` changes that" in capsys.readouterr().out
    assert server.client.get("/variants/kept").json()["active"] == 1


def test_a_variant_is_made_public_by_its_push_or_by_another_of_the_same_bytes(
    server: LiveServer, artifacts: Artifacts
) -> None:
    def push(*args: str) -> object:
        arguments = ["push", str(artifacts.plain), "--name", "for-all", "--url", server.url, "--no-progress"]
        assert run([*arguments, *args]) == 0
        return server.client.get("/variants/for-all").json()["visibility"]

    assert push() == "private"
    assert push("--visibility", "public") == "public"
    assert push() == "public"
    server.client.delete("/variants/for-all")
    assert push("--visibility", "public") == "public"


def test_a_refused_artifact_is_one_line_with_the_servers_reason(
    server: LiveServer, artifacts: Artifacts, capsys: Output
) -> None:
    assert run(["push", str(artifacts.foreign), "--name", "foreign", "--url", server.url, "--json"]) == 1
    error = error_of(capsys)
    assert (error["type"], error["code"]) == ("ServerRefused", "base_mismatch")
    assert "compress the fine-tune against this base again" in error["message"]


def test_the_request_carries_the_digest_and_the_length(file: Path) -> None:
    code, server = pushed(file, ABSENT, CREATED)
    assert code == 0
    assert server.calls == ["GET /variants/a", "POST /variants?name=a&activate=true"]
    sent = server.received[1]
    assert sent.body == CONTENT
    assert sent.headers["Content-Length"] == str(len(CONTENT))
    assert sent.headers["Content-Digest"] == f"sha-256=:{base64.b64encode(SHA256.digest()).decode()}:"


@pytest.mark.parametrize(
    "failure",
    [
        break_off(after_bytes=1_000_000),
        break_off(),
        refuse(500, "internal_error"),
        answer(502, b"<html>bad gateway</html>"),
        refuse(429, "rate_limited", Retry_After="0"),
    ],
    ids=["broken off", "answer lost", "internal error", "proxy", "limited"],
)
def test_a_failure_that_may_pass_is_tried_again(file: Path, failure: Reaction, capsys: Output) -> None:
    code, server = pushed(file, ABSENT, failure, ABSENT, CREATED)
    assert code == 0
    assert server.received[3].body == CONTENT
    captured = capsys.readouterr()
    assert captured.out.startswith("a@1 ")
    assert captured.err.startswith("attempt 1 of 8 failed: ")
    assert captured.err.count("\n") == 1
    # Of library functions, which name arguments in backticks.
    assert "`" not in captured.err


def test_an_upload_whose_answer_was_lost_is_found_and_not_repeated(file: Path, capsys: Output) -> None:
    code, server = pushed(file, ABSENT, break_off(), KNOWN, answer(304), args=("--json",))
    assert code == 0
    assert server.calls[2:] == ["GET /variants/a", "GET /variants/a/artifact?version=3"]
    assert server.received[3].headers["If-None-Match"] == f'"{VERSION["digest"]}"'
    reply = json.loads(capsys.readouterr().out)
    assert (reply["version"], reply["active"]) == (3, False)


def test_a_version_that_is_quarantined_is_sent_again(file: Path) -> None:
    code, server = pushed(file, KNOWN, refuse(424, "variant_quarantined"), CREATED)
    assert code == 0
    assert server.received[2].body == CONTENT


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (507, "insufficient_storage"),
        (400, "invalid_artifact"),
        (413, "too_large"),
        (409, "base_mismatch"),
        # A limit of what is stored: waiting does not help, and the server says no time.
        (429, "rate_limited"),
    ],
)
def test_a_failure_that_does_not_pass_ends_the_push(
    file: Path, status: int, error: str, capsys: Output
) -> None:
    code, server = pushed(file, ABSENT, refuse(status, error), args=("--json",))
    assert (code, len(server.calls)) == (1, 2)
    assert error_of(capsys)["code"] == error


def test_a_server_that_asks_for_an_hour_is_not_waited_for(file: Path, capsys: Output) -> None:
    code, server = pushed(file, ABSENT, refuse(429, "rate_limited", Retry_After="3600"), args=("--json",))
    assert (code, len(server.calls)) == (1, 2)
    assert error_of(capsys)["code"] == "rate_limited"


def test_the_last_attempt_gives_the_error(file: Path, capsys: Output) -> None:
    reactions = [ABSENT, break_off(after_bytes=0)] * MAX_ATTEMPTS
    code, server = pushed(file, *reactions, args=("--json",))
    assert (code, len(server.calls)) == (1, 2 * MAX_ATTEMPTS)
    error = error_of(capsys)
    assert error["type"] == "NoAnswer"
    assert "broke off" in error["message"]


@pytest.mark.parametrize("before", [[], [ABSENT]], ids=["first call", "upload"])
def test_a_server_that_answers_503_is_waited_for_longer_than_it_asks(
    file: Path, before: list[Reaction], capsys: Output
) -> None:
    starting = refuse(503, "overloaded", "the base is still loading", Retry_After="1")
    pauses, error = pauses_of_push(file, *([*before, starting] * 8), ABSENT, CREATED)
    assert (pauses, error) == ([1, 1, 2, 4, 8, 16, 30, 30], None)
    (first, *others) = capsys.readouterr().err.splitlines()
    assert first.endswith(": the base is still loading")
    assert len(others) == 3


def test_a_push_to_a_server_that_stays_unavailable_ends_after_two_minutes(file: Path) -> None:
    pauses, error = pauses_of_push(file, *[refuse(503, "draining")] * 20)
    assert sum(pauses) == 120
    assert isinstance(error, ServerRefused)
    assert error.code == "draining"


def test_attempts_that_fail_wait_longer_each_time_and_as_long_as_the_server_asks(file: Path) -> None:
    limited = refuse(429, "rate_limited", Retry_After="20")
    failures = [
        break_off(),
        limited,
        refuse(500, "internal_error"),
        refuse(502, "internal_error"),
        limited,
    ]
    pauses, error = pauses_of_push(file, *failures, ABSENT, CREATED)
    assert (pauses, error) == ([1, 20, 4, 8, 20], None)


def test_a_server_that_never_answered_is_not_tried_again(file: Path, capsys: Output) -> None:
    with scripted_server() as server:
        url = server.url
    assert run(["push", str(file), "--name", "a", "--url", url, "--no-progress"]) == 1
    line = capsys.readouterr().err
    assert line.startswith(f"error: no server answers at {url} (")
    assert line.endswith(" or --wait S if it is starting\n")
    assert line.count("\n") == 1


def test_with_wait_a_server_that_never_answered_is_waited_for(file: Path, capsys: Output) -> None:
    with scripted_server() as server:
        url = server.url
    assert run(["push", str(file), "--name", "a", "--url", url, "--no-progress", "--wait", "1"]) == 1
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith(f"waiting up to 1 s for {url}: no server answers there")
    assert last.startswith(f"error: no server answers at {url} (")


def test_a_server_that_went_away_during_a_push_is_waited_for(file: Path, capsys: Output) -> None:
    pauses, error = pauses_of_push(file, ABSENT, stop)
    # An attempt whose connection broke, and the wait for the server after it.
    assert (pauses[0], sum(pauses[1:])) == (1, 120)
    assert isinstance(error, NoServer)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("attempt 1 of 8 failed: ")
    assert lines[1].startswith("waiting up to 120 s for ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04 a pickle of torch", "tuned.safetensors"),
    ],
)
def test_a_file_that_is_no_artifact_is_refused_before_any_call(
    file: Path, content: bytes, message: str, capsys: Output
) -> None:
    file.write_bytes(content)
    code, server = pushed(file)
    assert (code, server.calls) == (1, [])
    assert message in capsys.readouterr().err


def test_a_directory_is_a_wrong_argument(tmp_path: Path, capsys: Output) -> None:
    code, _ = pushed(tmp_path)
    assert code == 2
    assert "is no file: give the artifact" in capsys.readouterr().err


@pytest.mark.parametrize("change", [CONTENT + b"more", CONTENT[:-1]], ids=["longer", "shorter"])
def test_a_file_that_changes_while_it_is_sent_is_an_error(file: Path, change: bytes) -> None:
    artifact = ArtifactFile.read(file, lambda _: None)
    file.write_bytes(change)
    sent: list[int] = []
    with pytest.raises(ArtifactError, match="changed while it was sent"):
        sent.extend(map(len, artifact.blocks(lambda _: None)))
    assert sum(sent) <= len(CONTENT)


def test_off_a_terminal_progress_is_whole_lines(
    file: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "LINE_INTERVAL_S", 0)
    with scripted_server(ABSENT, CREATED) as server:
        assert run(["push", str(file), "--name", "a", "--url", server.url]) == 0
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert {line.partition(":")[0] for line in lines} == {
        "digest of tuned.safetensors",
        "sending tuned.safetensors",
    }
    assert "\r" not in captured.err
    assert captured.out.count("\n") == 1


def test_on_a_terminal_progress_is_a_bar(file: Path) -> None:
    with scripted_server(ABSENT, CREATED) as server:
        session = on_terminal("push", str(file), "--name", "a", "--url", server.url)
    assert session.code == 0
    assert re.search("\r.*sending tuned.safetensors.* 0%, 0B of ", session.screen)
    assert re.search("(^|\x1b\\[2K)a@1 ", session.screen.splitlines()[-1])


def test_without_progress_stderr_stays_empty(
    file: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "LINE_INTERVAL_S", 0)
    assert pushed(file, ABSENT, CREATED)[0] == 0
    assert capsys.readouterr().err == ""


def test_the_public_port_of_a_server_with_an_admin_port_is_told_from_one_without_the_variant(
    file: Path, capsys: Output
) -> None:
    code, server = pushed(file, refuse(404, "not_found", "there is no call GET /variants/a"))
    assert (code, server.calls) == (1, ["GET /variants/a"])
    assert "--admin-port" in capsys.readouterr().err


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with asked_hub(monkeypatch, tmp_path / "hub") as hub:
        yield hub


@pytest.mark.parametrize("reference", ["", "@main", f":{FILE}", f"@main:{FILE}"])
def test_a_hubs_artifact_is_fetched_and_published(reference: str, hub: Hub) -> None:
    hub.add("tuned", CONTENT)
    code, server = pushed(f"hf://acme/tuned{reference}", ABSENT, CREATED)
    assert (code, server.received[-1].body) == (0, CONTENT)
    # Again, from the cache.
    fetched = len(hub.requests)
    assert pushed(f"hf://acme/tuned{reference}", ABSENT, CREATED)[0] == 0
    assert not [way for way, path in hub.requests[fetched:] if way == "GET" and "/resolve/" in path]


def test_a_revision_gives_its_own_bytes(hub: Hub) -> None:
    moving = hub.add("moving", CONTENT)
    [pinned] = moving.commits
    moving.commits.update(commit(ARTIFACT_PREFIX + b"later"))
    assert pushed("hf://acme/moving", ABSENT, CREATED)[1].received[-1].body == ARTIFACT_PREFIX + b"later"
    assert pushed(f"hf://acme/moving@{pinned}", ABSENT, CREATED)[1].received[-1].body == CONTENT


def test_a_private_repository_is_asked_with_the_users_token(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    hub.add("own", CONTENT, token="hf_mine")
    assert pushed("hf://acme/own")[0] == 1
    assert "hf auth login" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    assert pushed("hf://acme/own", ABSENT, CREATED)[0] == 0


@pytest.mark.parametrize(
    ("source", "code", "message"),
    [
        ("hf://acme", 2, "names no file of a hub"),
        ("hf://acme/../x", 2, "names no file of a hub"),
        ("hf://acme/two", 2, "has 2 artifacts, such as delta.safetensors, second.safetensors: give hf://ORG"),
        ("hf://acme/two:third.safetensors", 2, "has no file third.safetensors"),
        ("hf://acme/two:*", 2, "has no file *"),
        ("hf://acme/absent", 1, "the hub does not give it"),
        ("hf://acme/two@absent", 1, "the hub does not give it"),
        ("hf://acme/broken", 1, "the hub does not give it"),
        ("hf://acme/text", 1, "or a damaged one"),
    ],
)
def test_what_a_hub_does_not_have_is_one_line(
    source: str, code: int, message: str, hub: Hub, capsys: Output
) -> None:
    hub.add("two", CONTENT).commits.update(commit_of({FILE: CONTENT, "second.safetensors": CONTENT}))
    hub.add("broken", CONTENT, status=500)
    hub.add("text", b"no artifact, whatever its name says")
    assert pushed(source)[0] == code
    line = capsys.readouterr().err
    assert message in line
    assert line.count("\n") == 1


def test_without_a_hub_the_line_says_so(hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert pushed("hf://acme/tuned")[0] == 1
    assert "the hub does not give it" in capsys.readouterr().err
