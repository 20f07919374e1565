"""Processes of a running server are killed or stopped: what its clients see, and what is left of it."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deltastore.registry import Registry
from server.tenants.tenant import DEFAULT_TENANT
from tests.server.helpers.live_server import (
    MAX_MODEL_LEN,
    Artifacts,
    LiveServer,
    connection,
    error_of,
    eventually,
    json_request,
    live_server,
)

ENGINE, HTTP, WORKER = "server.engine.main", "server.http_process", "server.workers.worker_main"
# Runs until the client disconnects.
LONG: dict[str, Any] = {"max_new_tokens": MAX_MODEL_LEN - 10, "n": 16, "temperature": 2.0, "seed": 1}


def processes(server: LiveServer, module: str = "") -> list[psutil.Process]:
    """Return the server's processes of one kind, or all below its supervisor."""
    found = []
    for process in psutil.Process(server.process.pid).children(recursive=True):
        try:
            if module in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def is_ready(server: LiveServer) -> bool:
    """Ask over many connections, so that every HTTP process is asked."""
    try:
        return all(httpx.get(f"{server.url}/ready", timeout=240).status_code == 200 for _ in range(8))
    except httpx.TransportError:
        return False


def all_serve(server: LiveServer) -> bool:
    """Return whether both HTTP processes have loaded the tokenizer, right behind which each starts its workers.

    One that listens already answers 503 until then, and connections may all go to the other.
    """
    found = processes(server, HTTP)
    try:
        begun = [any(WORKER in " ".join(child.cmdline()) for child in each.children()) for each in found]
    except psutil.NoSuchProcess:
        return False
    return len(found) == 2 and all(begun) and is_ready(server)


def all_gone(alive: list[psutil.Process]) -> bool:
    return all(map(is_gone, alive))


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_pinned(server: LiveServer, name: str) -> bool:
    reply = server.client.get(f"/variants/{name}")
    # Refused by a process that has not heard of a new engine yet.
    return reply.is_success and bool(reply.json()["versions"][0]["pinned"])


def kill_engine(server: LiveServer) -> None:
    """Kill the engine, and wait until another one has been started."""
    [engine] = processes(server, ENGINE)
    engine.kill()
    assert eventually(lambda: [each for each in processes(server, ENGINE) if each != engine])


@pytest.fixture(scope="module")
def running(artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    registry = tmp_path_factory.mktemp("faults") / "registry"
    options = ("--http-workers", 2, "--max-restarts", 1000, "--step-timeout", 10, "--shutdown-timeout", 1)
    with live_server(artifacts.base, registry, *options) as server:
        for name in ("plain", "chatty"):
            assert server.upload(name, getattr(artifacts, name)).status_code == 201
        yield server


@pytest.fixture
def server(running: LiveServer) -> LiveServer:
    assert eventually(lambda: all_serve(running))
    return running


def test_an_engine_that_is_killed_is_started_again_with_its_pins_and_its_requests(
    server: LiveServer, artifacts: Artifacts
) -> None:
    tokens = server.token_ids("plain", max_new_tokens=8)
    assert server.client.post("/variants/plain/pin").is_success
    assert eventually(lambda: is_pinned(server, "plain"))
    [engine] = processes(server, ENGINE)
    with server.streaming("plain", **LONG) as stream:
        next(stream)
        engine.kill()
        assert eventually(lambda: server.client.get("/ready").status_code == 503)
        for refusal in (server.client.get("/ready"), server.generate("plain")):
            assert (refusal.status_code, error_of(refusal)["code"]) == (503, "engine_restarted")
        assert server.client.get("/health").status_code == 200
        assert eventually(lambda: is_ready(server))
        assert next(stream)[0] == "token"
    assert eventually(lambda: is_pinned(server, "plain"))
    assert server.token_ids("plain", max_new_tokens=8) == tokens


def test_an_upload_goes_on_while_the_engine_starts_again(server: LiveServer, artifacts: Artifacts) -> None:
    content = artifacts.third.read_bytes()

    def slowly() -> Iterator[bytes]:
        yield content[:4096]
        kill_engine(server)
        assert eventually(lambda: is_ready(server))
        yield content[4096:]

    headers = {"Content-Type": "application/octet-stream", "Content-Length": str(len(content))}
    with httpx.Client(base_url=server.url, timeout=240) as client:
        reply = client.post("/variants?name=slow", content=slowly(), headers=headers)
    assert reply.status_code == 201, reply.text


def test_a_step_that_hangs_restarts_the_engine(server: LiveServer) -> None:
    [engine] = processes(server, ENGINE)
    engine.suspend()
    assert eventually(lambda: [each for each in processes(server, ENGINE) if each != engine])
    assert eventually(lambda: is_ready(server))
    assert "step has not ended" in server.log.read_text()
    assert server.token_ids(max_new_tokens=4)


def test_an_http_process_that_is_killed_frees_its_seats_and_its_files_and_is_replaced(
    server: LiveServer,
) -> None:
    server.token_ids(max_new_tokens=4)
    before = server.metric("generation_tokens_total")
    assert before > 0
    killed = processes(server, HTTP)
    scratch = [Path(process.environ()["TMPDIR"]) for process in killed]
    with connection(server.url) as first, connection(server.url) as second:
        for each in (first, second):
            each.sendall(json_request("/generate", {"prompt": "hello", "stream": True, **LONG}))
            assert each.recv(1000).startswith(b"HTTP/1.1 200")
        for process in killed:
            process.kill()
        assert eventually(lambda: has_ended(first) and has_ended(second))
    assert eventually(lambda: is_ready(server) and len(processes(server, HTTP)) == 2)
    assert eventually(lambda: server.metric("num_requests_running") == 0)
    assert server.metric("generation_tokens_total") >= before
    assert eventually(lambda: not any(directory.exists() for directory in scratch))


def has_ended(stream: socket.socket) -> bool:
    """Read a stream to its end."""
    try:
        while stream.recv(1 << 20):
            pass
    except ConnectionError:
        pass
    return True


def test_two_http_processes_count_as_one_server(server: LiveServer) -> None:
    def count() -> float:
        return server.metric("http_requests_total", code="200", route="/tokenize")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: tokenize(server.url), range(32)))
    # A process that answers late is counted with its last figures.
    assert eventually(lambda: count() >= 32)
    assert count() == 32


def tokenize(url: str) -> None:
    """Call a route that no other test of this file calls, over a connection of its own."""
    with httpx.Client(base_url=url, timeout=240) as client:
        assert client.post("/tokenize", json={"model": "base", "prompt": "hello"}).status_code == 200


def test_a_storm_of_cancelled_requests_leaves_none_open(server: LiveServer) -> None:
    raw = json_request("/generate", {"prompt": "hello", "stream": True, **LONG, "n": 1})
    for _ in range(6):
        streams = [connection(server.url) for _ in range(50)]
        for stream in streams:
            stream.sendall(raw)
        time.sleep(0.1)
        for stream in streams:
            stream.close()
    assert eventually(
        lambda: server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0
    )
    assert server.token_ids(max_new_tokens=4)


def test_a_version_that_another_server_deletes_is_unpinned(server: LiveServer) -> None:
    assert server.client.post("/variants/chatty/pin").is_success
    assert eventually(lambda: is_pinned(server, "chatty"))
    before = server.metric("slots_pinned")
    Registry(server.registry).delete(DEFAULT_TENANT.name, "chatty")
    assert eventually(lambda: server.metric("slots_pinned") == before - 1)


@pytest.mark.parametrize(
    ("signal_number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_no_process_outlives_its_server(
    artifacts: Artifacts, tmp_path: Path, signal_number: int, code: int
) -> None:
    with live_server(artifacts.base, tmp_path / "registry", "--shutdown-timeout", 1) as server:

        def tied_workers() -> list[psutil.Process]:
            """Return the workers that have lowered their priority, which they do once they end with their parent."""
            return [worker for worker in processes(server, WORKER) if worker.nice() > os.nice(0)]

        # They start after the server is ready.
        assert eventually(tied_workers)
        alive, workers = processes(server), tied_workers()
        # As busy with a tenant's input: these read no pipe and handle no signal.
        for worker in workers:
            worker.suspend()
        assert server.stop(signal_number) == code
        assert eventually(lambda: all_gone(alive))


def test_too_many_deaths_of_the_engine_end_the_server(artifacts: Artifacts, tmp_path: Path) -> None:
    with live_server(
        artifacts.base, tmp_path / "registry", "--max-restarts", 0, "--shutdown-timeout", 1
    ) as server:
        alive = processes(server)
        processes(server, ENGINE)[0].kill()
        assert server.process.wait(60) == 1
        assert eventually(lambda: all_gone(alive))
        errors = [line for line in server.log.read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "the engine has ended 1 times in a row, at last with signal 9" in errors[0]
