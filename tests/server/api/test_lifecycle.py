"""Overload, shutdown, kill -9 and a full disk, over HTTP."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.server.helpers.live_server import (
    ARTIFACT_PREFIX,
    MAX_MODEL_LEN,
    WAIT_S,
    Artifacts,
    LiveServer,
    connection,
    error_of,
    eventually,
    json_request,
    live_server,
)

# A request that runs until the client disconnects. With this seed, its first sequence is a long one.
LONG = {"max_new_tokens": MAX_MODEL_LEN - 10, "n": 100, "temperature": 2.0, "seed": 1}
OCTETS = {"Content-Type": "application/octet-stream"}


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Mount a file system of 8 MB; without the right to mount, use a plain directory."""
    directory = tmp_path_factory.mktemp("small")
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(directory)]
    is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    yield directory
    if is_mounted:
        # Processes of a killed server, whose log is there, may still be ending.
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.fixture(scope="module")
def small(artifacts: Artifacts, small_disk: Path) -> Iterator[LiveServer]:
    """Run a server with two slots, one running and one waiting request, half a second per load and a small disk."""
    registry = small_disk / "registry"
    limits = ("--max-num-seqs", 1, "--max-queue", 1, "--load-timeout", 0.5, "--shutdown-timeout", 600)
    with live_server(artifacts.base, registry, *limits, "--max-gpu-deltas", 2) as running:
        for name in ("plain", "chatty", "third"):
            assert running.upload(name, getattr(artifacts, name)).status_code == 201
        yield running


def refused(reply: httpx.Response, code: str) -> bool:
    """Return whether a reply is a 503 with this code and a Retry-After."""
    return (reply.status_code, error_of(reply)["code"]) == (503, code) and int(
        reply.headers["Retry-After"]
    ) > 0


def in_use(server: LiveServer, name: str) -> int:
    count: int = server.client.get(f"/variants/{name}").json()["versions"][0]["num_requests"]
    return count


def put_in_slot(server: LiveServer, name: str) -> None:
    """Ask until a load was quick enough: half a second may be too short on a busy machine."""
    assert eventually(lambda: server.generate(name, max_new_tokens=1).status_code == 200)


def pin(server: LiveServer, name: str) -> None:
    """Pin until a load was quick enough."""

    def is_pinned() -> bool:
        server.client.post(f"/variants/{name}/pin")
        return bool(server.client.get(f"/variants/{name}").json()["versions"][0]["pinned"])

    assert eventually(is_pinned)


def test_a_full_queue_is_refused_at_once(small: LiveServer) -> None:
    put_in_slot(small, "third")
    waiting = json_request("/generate?variant=third", {"prompt": "hello"})
    with small.streaming("third", **LONG) as stream, connection(small.url) as second:
        next(stream)
        second.sendall(waiting)
        assert eventually(lambda: in_use(small, "third") == 2)
        assert refused(small.generate("plain"), "overloaded")
    assert eventually(lambda: small.generate("plain", max_new_tokens=1).status_code == 200)


@pytest.mark.parametrize("stream", [False, True])
def test_a_variant_without_a_slot_in_time_is_a_load_timeout(small: LiveServer, stream: bool) -> None:
    pin(small, "plain")
    put_in_slot(small, "third")
    with small.streaming("third", **LONG) as running:
        next(running)
        assert refused(small.generate("chatty", stream=stream), "load_timeout")
    small.client.post("/variants/plain/unpin")
    assert eventually(lambda: small.generate("chatty", max_new_tokens=1).status_code == 200)


def test_a_full_disk_refuses_the_upload_and_nothing_else(
    small: LiveServer, small_disk: Path, artifacts: Artifacts
) -> None:
    if not os.path.ismount(small_disk):
        pytest.skip("this user may not mount a small disk to fill")
    before = small.client.get("/variants").json()
    content = ARTIFACT_PREFIX + bytes(12 << 20)
    reply = small.client.post("/variants?name=large", content=content, headers=OCTETS)
    assert (reply.status_code, error_of(reply)["code"]) == (507, "insufficient_storage")
    assert str(small_disk) not in reply.text
    assert small.client.get("/variants").json() == before
    put_in_slot(small, "plain")
    assert small.upload("after", artifacts.spare[0]).status_code == 201


def test_a_variant_is_deleted_with_no_byte_free_on_the_disk(
    small: LiveServer, small_disk: Path, artifacts: Artifacts
) -> None:
    if not os.path.ismount(small_disk):
        pytest.skip("this user may not mount a small disk to fill")
    assert small.upload("unwanted", artifacts.spare[1]).status_code == 201
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    refused_upload = small.upload("refused", artifacts.spare[2])
    assert (refused_upload.status_code, error_of(refused_upload)["code"]) == (507, "insufficient_storage")
    assert str(small_disk) not in refused_upload.text
    assert small.client.delete("/variants/unwanted").json() == {"name": "unwanted", "deleted": [1]}
    assert small.client.get("/variants/unwanted").status_code == 404
    filler.unlink()


def test_after_sigterm_running_requests_end_and_new_ones_are_refused(
    small: LiveServer, artifacts: Artifacts
) -> None:
    put_in_slot(small, "plain")
    with small.streaming("plain", max_new_tokens=MAX_MODEL_LEN - 10, n=6) as stream:
        events = [next(stream)]
        small.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: small.client.get("/ready").status_code == 503)
        assert refused(small.client.get("/ready"), "draining")
        assert refused(small.generate("plain"), "draining")
        assert refused(small.upload("late", artifacts.third), "draining")
        assert small.client.get("/health").status_code == 200
        events += stream
    names = [name for name, _ in events]
    assert (names.count("finish"), names[-1]) == (6, "done")
    assert small.process.wait(WAIT_S) == 0
    assert "Traceback" not in small.log.read_text()


@pytest.fixture(scope="module")
def restarted(artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Run a server on the registry of a server that was killed right after it acknowledged an upload."""
    registry = tmp_path_factory.mktemp("killed") / "registry"
    with live_server(artifacts.base, registry) as first:
        assert first.upload("survivor", artifacts.plain).status_code == 201
        assert first.upload("survivor", artifacts.third, activate="false").status_code == 201
        assert first.stop(signal.SIGKILL) == -signal.SIGKILL
    with live_server(artifacts.base, registry, "--shutdown-timeout", 1) as second:
        yield second


def test_an_acknowledged_upload_survives_kill_9(restarted: LiveServer, server: LiveServer) -> None:
    listed = restarted.client.get("/variants").json()["variants"]
    assert [(entry["name"], entry["active"], len(entry["versions"])) for entry in listed] == [
        ("survivor", 1, 2)
    ]
    answer = restarted.token_ids("survivor", max_new_tokens=8)
    assert answer == server.token_ids("plain", max_new_tokens=8)


def test_a_request_that_outlasts_the_shutdown_timeout_gets_an_error_and_the_exit_is_clean(
    restarted: LiveServer,
) -> None:
    with restarted.streaming("survivor", **LONG) as stream:
        next(stream)
        restarted.process.send_signal(signal.SIGTERM)
        name, data = list(stream)[-1]
    assert (name, data["error"]["code"]) == ("error", "draining")
    assert restarted.process.wait(WAIT_S) == 0
