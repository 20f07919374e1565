"""A server whose registry's volume vanishes, hangs or cannot be written while it serves."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from deltastore.registry import Registry
from tests.deltastore.helpers.stored import publish_file
from tests.server.helpers.live_server import (
    ROOT,
    WAIT_S,
    Artifacts,
    LiveServer,
    clean_environment,
    eventually,
    live_server,
    serve_command,
)


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("volume")


@pytest.fixture(scope="module")
def server(artifacts: Artifacts, volume: Path) -> Iterator[LiveServer]:
    """Start a server with two slots, in which `resident` is pinned, and which has never read `cold`."""
    (volume / "first").mkdir()
    (volume / "registry").symlink_to("first")
    with live_server(artifacts.base, volume / "registry", "--max-gpu-deltas", 2) as running:
        assert running.upload("resident", artifacts.chatty).status_code == 201
        assert running.upload("cold", artifacts.third).status_code == 201
        assert running.client.post("/variants/resident/pin").status_code == 202
        yield running


@contextlib.contextmanager
def gone(registry: Path, way: str) -> Iterator[None]:
    """Take the registry's directory away inside the block, as an unmount does."""
    away = registry.with_name("away")
    registry.rename(away)
    if way == "empty":
        registry.mkdir()
    try:
        yield
    finally:
        if way == "empty":
            # Nothing was written below the mount point.
            assert not list(registry.iterdir())
            registry.rmdir()
        away.rename(registry)


def registry_of(server: LiveServer) -> str:
    reply = server.client.get("/ready")
    assert reply.status_code == 200, reply.text
    said: str = reply.json()["registry"]
    return said


def check_unavailable(reply: httpx.Response, way_out: str) -> None:
    assert reply.status_code == 503, reply.text
    error = reply.json()["error"]
    assert error["code"] == "registry_unavailable"
    assert way_out in error["message"]
    assert "Retry-After" in reply.headers


@pytest.mark.parametrize("way", ["moved", "empty"])
def test_a_volume_that_vanishes_leaves_residents_served_and_everything_else_a_clear_error(
    artifacts: Artifacts, server: LiveServer, way: str
) -> None:
    expected, base = server.token_ids("resident"), server.token_ids()
    assert server.token_ids("resident@1") == expected
    server.generate("cold", max_new_tokens=1)
    server.client.post("/variants/cold/unload")
    with gone(server.registry, way):
        for name in ("resident", "resident@1"):
            assert server.token_ids(name) == expected
        assert server.token_ids() == base
        assert eventually(lambda: "mount it again" in registry_of(server))
        assert server.metric("registry_up") == 0
        for call in (
            server.generate("never-asked"),
            server.upload("new", artifacts.third),
            server.client.patch("/variants/resident", json={"active": 1}),
            server.client.delete("/variants/cold"),
            server.client.get("/variants"),
            server.client.get("/v1/models"),
        ):
            assert call.status_code == 503, call.text
            assert call.json()["error"]["code"] == "registry_unavailable"
        check_unavailable(server.client.get("/variants"), "mount it again")
        assert server.client.get("/health").status_code == 200
        assert server.token_ids("resident") == expected
    assert eventually(lambda: registry_of(server) == "ok")
    assert server.token_ids("resident") == expected
    assert server.metric("registry_up") == 1
    assert server.generate("cold", max_new_tokens=1).status_code == 200
    assert [each["name"] for each in server.client.get("/variants").json()["variants"]] == [
        "cold",
        "resident",
    ]
    assert server.client.get("/variants/resident").json()["versions"][0]["pinned"] is True


def test_what_others_changed_meanwhile_is_served_when_the_volume_is_back(
    artifacts: Artifacts, server: LiveServer
) -> None:
    assert server.upload("moving", artifacts.plain).status_code == 201
    assert server.upload("ending", artifacts.plain).status_code == 201
    for name in ("moving", "ending"):
        assert server.generate(name, max_new_tokens=1).headers["X-Peraxis-Version"] == "1"
    with live_server(artifacts.base, server.registry) as other:
        with gone(server.registry, "moved"):
            assert server.generate("moving", max_new_tokens=1).headers["X-Peraxis-Version"] == "1"
        assert other.upload("moving", artifacts.third).status_code == 201
        assert other.client.delete("/variants/ending").status_code == 200
    assert server.generate("moving", max_new_tokens=1).headers["X-Peraxis-Version"] == "2"
    assert server.generate("ending").status_code == 404
    assert server.client.delete("/variants/moving").status_code == 200


@contextlib.contextmanager
def pipes(*files: Path) -> Iterator[None]:
    """Make every reading of some files hang: pipes without a writer stand in their places."""
    asides = {file: file.with_suffix(".aside") for file in files}
    for file, aside in asides.items():
        with contextlib.suppress(FileNotFoundError):
            file.rename(aside)
        os.mkfifo(file)
    try:
        yield
    finally:
        for file, aside in asides.items():
            pipe = file.with_suffix(".pipe")
            if aside.exists():
                os.link(file, pipe)
                aside.replace(file)
            else:
                file.rename(pipe)
            # A reader that waits gets an end of file.
            with contextlib.suppress(OSError):
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
            pipe.unlink()


def newest_entry(registry: Path, name: str) -> Path:
    """Return the path of an entry that every reading of a variant looks at."""
    (variant,) = registry.glob(f"variants/*/{name}")
    return variant / "state-999999.json"


def test_a_public_variant_that_cannot_be_read_is_its_own_matter_alone(
    artifacts: Artifacts, server: LiveServer
) -> None:
    assert server.upload("probe", artifacts.plain).status_code == 201
    assert server.client.patch("/variants/probe", json={"visibility": "public"}).is_success
    artifact, late = artifacts.third.read_bytes(), threading.Event()

    def body() -> Iterator[bytes]:
        yield artifact[:4096]
        assert late.wait(WAIT_S)
        yield artifact[4096:]

    def upload() -> httpx.Response:
        return httpx.post(f"{server.url}/variants", params={"name": "slow"}, content=body(), timeout=WAIT_S)

    with pipes(newest_entry(server.registry, "probe")), ThreadPoolExecutor() as threads:
        uploading = threads.submit(upload)
        try:
            assert eventually(lambda: any((server.registry / "uploads").iterdir()))
            # Names of their own, so that each is asked for.
            for name in ("probe", "probe@1", "probe@2"):
                check_unavailable(server.generate(name), "not answer")
                assert registry_of(server) == "ok"
                assert server.token_ids("cold@1", max_new_tokens=1)
        finally:
            late.set()
        assert uploading.result().status_code == 201
    for name in ("slow", "probe"):
        assert server.client.delete(f"/variants/{name}").status_code == 200


def test_a_volume_that_hangs_delays_the_first_requests_and_holds_nothing_that_others_need(
    artifacts: Artifacts, server: LiveServer
) -> None:
    expected, base = server.token_ids("resident"), server.token_ids()
    prompt = "hello " * 500
    with pipes(server.registry / "format.json", newest_entry(server.registry, "resident")):
        # More at once than the threads that requests share.
        asked = [threading.Thread(target=server.generate, args=("resident",)) for _ in range(60)]
        for thread in asked:
            thread.start()
        assert server.token_ids() == base
        assert server.generate(prompt=prompt, max_new_tokens=1).status_code == 200
        for thread in asked:
            thread.join()
        assert server.token_ids("resident") == expected
        assert eventually(lambda: "does not answer" in registry_of(server))
        check_unavailable(server.upload("new", artifacts.third), "does not answer")
        check_unavailable(server.generate("cold@7"), "does not answer")
        check_unavailable(server.client.delete("/variants/cold"), "does not answer")
        assert server.metric("registry_up") == 0
        assert server.client.get("/docs").status_code == 200
    assert eventually(lambda: registry_of(server) == "ok")
    assert server.token_ids("resident") == expected
    assert server.upload("new", artifacts.third).status_code == 201
    assert server.client.delete("/variants/new").status_code == 200


@pytest.fixture
def read_only(volume: Path, server: LiveServer) -> Iterator[None]:
    """Mount the registry over itself, read-only; it skips where mounts are not allowed."""
    registry = server.registry
    made = subprocess.run(
        ["mount", "--bind", registry, registry], check=False, capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"a file system cannot be mounted here: {made.stderr.strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", registry], check=True)
        yield
    finally:
        # The server may be reading a file.
        subprocess.run(["umount", "--lazy", registry], check=True)


def test_a_volume_that_becomes_read_only_serves_all_requests_and_refuses_changes(
    artifacts: Artifacts, server: LiveServer, read_only: None
) -> None:
    assert server.generate("cold", max_new_tokens=1).status_code == 200
    for reply in (
        server.upload("new", artifacts.third),
        server.client.patch("/variants/resident", json={"visibility": "public"}),
        server.client.delete("/variants/cold"),
    ):
        check_unavailable(reply, "Read-only file system")
    assert eventually(lambda: registry_of(server).startswith("read-only: "))
    assert server.metric("registry_up") == 1


def test_a_volume_that_can_be_written_again_is_ok(server: LiveServer) -> None:
    assert eventually(lambda: registry_of(server) == "ok")


@contextlib.contextmanager
def replaced(registry: Path, other: Path, way: str) -> Iterator[None]:
    """Let another registry be at a registry's path inside the block."""
    away, link = registry.with_name("away"), registry.with_name("link")
    if way == "renamed":
        registry.rename(away)
        other.rename(registry)
    else:
        link.symlink_to(other)
        registry.rename(away)
        link.rename(registry)
    yield
    if way == "renamed":
        registry.rename(other)
    away.rename(registry)


@pytest.mark.parametrize("way", ["renamed", "linked"])
def test_another_registry_in_its_place_is_served_and_has_no_part_of_an_upload_that_began_before(
    artifacts: Artifacts, server: LiveServer, way: str
) -> None:
    expected = server.token_ids("resident")
    other = server.registry.with_name(f"other-{way}")
    publish_file(Registry(other), artifacts.third, "moved-in")
    artifact, is_replaced = artifacts.plain.read_bytes(), threading.Event()

    def body() -> Iterator[bytes]:
        yield artifact[:4096]
        assert is_replaced.wait(WAIT_S)
        yield artifact[4096:]

    def upload() -> httpx.Response:
        url = f"{server.url}/variants"
        return httpx.post(url, params={"name": "between"}, content=body(), timeout=WAIT_S)

    with ThreadPoolExecutor() as threads:
        before = set((server.registry / "uploads").iterdir())
        uploading = threads.submit(upload)
        assert eventually(lambda: set((server.registry / "uploads").iterdir()) - before)
        with replaced(server.registry, other, way):
            is_replaced.set()
            check_unavailable(uploading.result(), "nothing was acknowledged")
            assert server.generate("resident").status_code == 404
            assert server.generate("between").status_code == 404
            assert server.token_ids("moved-in")
            assert server.upload("new", artifacts.plain).status_code == 201
            assert eventually(lambda: registry_of(server) == "ok")
    assert server.token_ids("resident") == expected
    for name in ("between", "moved-in", "new"):
        assert server.generate(name).status_code == 404
    assert [variant.name for variant in Registry(other).variants()] == ["moved-in", "new"]
    for registry in (Registry(other), Registry(server.registry)):
        assert registry.check().is_clean


def test_a_server_does_not_start_on_a_registry_of_a_newer_format_and_says_so_in_one_line(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    (tmp_path / "registry/variants").mkdir(parents=True)
    (tmp_path / "registry/format.json").write_text('{"format": 9}')
    command = serve_command("--base", artifacts.base, "--registry", tmp_path / "registry", "--port", 0)
    ended = subprocess.run(
        command, cwd=ROOT, env=clean_environment(), check=False, capture_output=True, text=True, timeout=90
    )
    assert ended.returncode == 1
    assert "has format 9, written by a newer version of Peraxis" in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in ended.stderr
