"""A server of two engine replicas on a local Ray, in processes that end with the test."""

from __future__ import annotations

import json
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.process import free_port
from bench.ray_cluster import haproxy_environment
from server.tenants.changes import AuditLog, Auditor
from server.tenants.keys import KeyStore
from tests.server.helpers.live_server import (
    ROOT,
    WAIT_S,
    LiveServer,
    clean_environment,
    eventually,
)

START_S = 400.0
# Ray's addresses are its machine's otherwise.
ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    # Ray's processes have a niceness of 15 by default, so that on a busy machine they hardly run, and Serve kills a
    # proxy that is not ready after 5 s.
    "RAY_worker_niceness": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
}
NUM_SEQS, NUM_SLOTS = 4, 2  # of each engine
ARGUMENTS: dict[str, object] = {
    "device": "cpu",
    "dtype": "float32",
    "max_gpu_deltas": NUM_SLOTS,
    "max_host_cache_gb": 0.01,
    "max_num_seqs": NUM_SEQS,
    "shutdown_timeout": 20,
    "auth": "keys",
    "num_replicas": 2,
}


@dataclass(slots=True)
class RayServer(LiveServer):
    """A running server, as an administrator's client reaches it. `process` is the program that started Ray."""

    def replicas(self, deployment: str) -> list[psutil.Process]:
        """Return the processes of a deployment's replicas."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if _is_replica(child, deployment)]

    def key(self, tenant: str) -> str:
        """Return a new key of a tenant that may generate."""
        return KeyStore(self.registry).create(Auditor(AuditLog(self.registry)), tenant, ["inference"]).text


@contextmanager
def ray_server(base: Path, registry: Path, has_haproxy: bool = False) -> Iterator[RayServer]:
    """Start Ray and the application; at the end stop them, and check that no process is left."""
    # Ray's sockets lie below, and the path of a socket is short.
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    args = {"base": str(base), "registry": str(registry), **ARGUMENTS}
    given = json.dumps({**args, "port": free_port(), "ray_directory": directory})
    log = registry.parent / "ray.log"
    made = KeyStore(registry).create(
        Auditor(AuditLog(registry)), "default", ["inference", "publish", "admin"]
    )
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.scale.helpers.ray_program", given],
            cwd=ROOT, env={**clean_environment(), **ENVIRONMENT, **haproxy_environment(Path(directory), has_haproxy)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdin is not None
        assert select.select([process.stdout], [], [], START_S)[0], log.read_text()
        url = process.stdout.readline().strip()
        assert url.startswith("http://"), log.read_text()
        server = RayServer(process, url, log, registry)
        server.client.headers["Authorization"] = f"Bearer {made.text}"
        with server.client:
            assert eventually(lambda: server.client.get("/ready").status_code == 200), log.read_text()
            yield server
        children = psutil.Process(process.pid).children(recursive=True)
        process.stdin.close()
        assert process.wait(WAIT_S) == 0, log.read_text()
        assert not psutil.wait_procs(children, WAIT_S)[1]
    finally:
        _kill(process)
        shutil.rmtree(directory, ignore_errors=True)


def _is_replica(process: psutil.Process, deployment: str) -> bool:
    try:
        is_replica = process.name().startswith("ray::ServeRepl")
        return is_replica and process.cmdline()[0].startswith(f"ray::ServeReplica:peraxis:{deployment}")
    except (psutil.Error, IndexError):
        return False


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill the program and all that it started, if they run."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None and not stream.closed:
            stream.close()


def wait_until_ready(server: RayServer, num_engines: int) -> None:
    """Wait until so many engines answer."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.client.get("/stats").json()["engine"]["slots"] == num_engines * NUM_SLOTS:
            return
        time.sleep(0.2)
    raise AssertionError(server.log.read_text())
