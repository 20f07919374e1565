"""Fixtures that many tests share: tiny artifacts, a small disk, and servers that run once per session."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Both set variables that torch and Triton read once, when they are imported.
import tests.helpers.threads
import tests.helpers.triton_interpreter  # noqa: F401
from server.tenants.changes import AuditLog, Auditor
from server.tenants.keys import KeyStore
from tests.helpers.forked_reader import forked_readers
from tests.helpers.s3_server import Bucket, S3Server, running_s3_server
from tests.server.helpers.live_server import Artifacts, LiveServer, live_server, make_artifacts

# A shell starts jobs in the background with Ctrl-C ignored, and what tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Mounts a file system of a given size in bytes and returns its directory.
SmallDisk = Callable[[int], Path]


def pytest_collection_finish() -> None:
    """Exempt what imports made from garbage collection, each of which takes 0.2 s otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """Return a function that mounts a small file system; skip the test without root."""
    directory = tmp_path / "disk"

    def mount(num_bytes: int) -> Path:
        directory.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", str(directory)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("mounting a small file system needs root")
        return directory

    yield mount
    if directory.is_mount():
        subprocess.run(["umount", str(directory)], check=True)


@pytest.fixture(scope="session", autouse=True)
def readers_are_forked() -> Iterator[None]:
    with forked_readers():
        yield


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    return make_artifacts(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture(scope="session")
def server(artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Run one server for all tests. Each test uses variant names of its own."""
    registry = tmp_path_factory.mktemp("served") / "registry"
    with live_server(artifacts.base, registry, "--max-gpu-deltas", 4, "--max-upload-gb", 1) as running:
        for name in ("plain", "chatty", "third"):
            assert running.upload(name, getattr(artifacts, name)).status_code == 201
        yield running


@pytest.fixture(scope="session")
def guarded_server(
    artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LiveServer, Path]]:
    """Run one server that asks for keys for all tests, and give the file with the key of an administrator.

    Each test file uses names of tenants of its own. The administrator belongs to the tenant `ops`.
    """
    directory = tmp_path_factory.mktemp("guarded")
    registry, admin = directory / "registry", directory / "admin.key"
    admin.write_text(KeyStore(registry).create(Auditor(AuditLog(registry)), "ops", ["admin"]).text + "\n")
    with live_server(artifacts.base, registry, "--auth", "keys", "--max-gpu-deltas", 2) as running:
        yield running, admin


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """Run one S3 server for all tests; a test that kills it runs one of its own."""
    with running_s3_server() as running:
        yield running


@pytest.fixture
def bucket(s3_server: S3Server) -> Bucket:
    """Make a bucket that no other test uses."""
    return s3_server.make_bucket()


@pytest.fixture
def other_bucket(s3_server: S3Server) -> Bucket:
    return s3_server.make_bucket()
