"""A Ray node on loopback and Serve applications on it, each in processes that a bench starts, watches and ends.

Knows the application by its import path and the names of its deployments alone, and a router to compare with.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
import yaml
from ray import serve

from bench.process import free_port
from server.scale.request_router import VariantRequestRouter


def haproxy_environment(directory: Path, is_on: bool) -> dict[str, str]:
    """Return the variables of Ray Serve that turn HAProxy on or off, with all its files in a directory and free ports.

    By default a machine has one such directory and one port of each kind, and a replica of the ingress ends after 30 s
    without requests.
    """
    paths = {
        "CONFIG_FILE_LOC": "haproxy.cfg",
        "SOCKET_PATH": "admin.sock",
        "SERVER_STATE_BASE": ".",
        "SERVER_STATE_FILE": "server-state",
    }
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": str(int(is_on)),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        **{f"RAY_SERVE_HAPROXY_{name}": str(directory / path) for name, path in paths.items()},
        **{f"RAY_SERVE_HAPROXY_{name}_PORT": str(free_port()) for name in ("METRICS", "STATS")},
    }


APPLICATION, ENGINES = "peraxis", "Engine"
ROUTER = "server.scale.request_router.VariantRequestRouter"
RANDOM_ROUTER = "bench.ray_cluster.RandomRequestRouter"
REPORT_INTERVAL_S = 0.25
# Replicas wait for each other more than they compute, so Ray is told of more CPUs than there are.
NUM_CPUS = 32
START_S = 300.0
POLL_S = 0.1
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_SERVE_LOG_TO_STDERR": "0",
    # By default Ray's processes have a niceness of 15, and Serve kills a proxy that is not ready within 5 s.
    "RAY_worker_niceness": "0", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
}  # fmt: skip


class RandomRequestRouter(VariantRequestRouter):
    """Shuffles the replicas that have reported. Differs from the server's in the order alone: both obey pins."""

    def ranked(self, version: str | None) -> list[str]:
        names = super().ranked(version)
        random.shuffle(names)
        return names


@dataclass(frozen=True, slots=True)
class Node:
    """A running Ray node, to which this process is connected."""

    process: psutil.Process
    address: str

    def engine_processes(self) -> list[psutil.Process]:
        """Return the processes of the engines' replicas."""
        title = f"ray::ServeReplica:{APPLICATION}:{ENGINES}"
        return [each for each in self.process.children(recursive=True) if _command(each).startswith(title)]


@contextmanager
def ray_node(has_haproxy: bool = False) -> Iterator[Node]:
    """Start a node and connect this process to it.

    Args:
        has_haproxy: HAProxy sends requests to replicas of the ingress, in place of Ray Serve's proxy in Python.

    Raises:
        RuntimeError: it does not start.
    """
    # A short path: Ray's sockets lie below it.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray-") as name:
        directory = Path(name)
        os.environ.update({**ENVIRONMENT, **haproxy_environment(directory / "haproxy", has_haproxy)})
        address = f"127.0.0.1:{free_port()}"
        flags = {
            "--node-ip-address": "127.0.0.1",
            "--port": address.rpartition(":")[2],
            "--num-cpus": str(NUM_CPUS),
            "--object-store-memory": str(100 << 20),
            "--include-dashboard": "false",
            "--temp-dir": name,
        }
        words = [word for flag in flags.items() for word in flag]
        command = ["-m", "ray.scripts.scripts", "start", "--head", "--block", *words]
        with _process(command, directory / "node.log") as process:
            _until(lambda: _is_listening(address), process, directory / "node.log")
            ray.init(address, namespace="serve", log_to_driver=False, logging_level=logging.ERROR)
            try:
                yield Node(psutil.Process(process.pid), address)
            finally:
                ray.shutdown()


@contextmanager
def application(
    node: Node, directory: Path, args: Mapping[str, Any], num_replicas: int, router: str = ROUTER
) -> Iterator[str]:
    """Serve the application as `serve run FILE` does, and yield its URL when all replicas run.

    Raises:
        RuntimeError: it does not start.
    """
    port, file = free_port(), directory / "serve.yaml"
    file.write_text(yaml.safe_dump(serve_config(port, args, num_replicas, router)))
    command = ["-m", "ray.serve.scripts", "run", "--address", node.address, str(file)]
    with _process(command, directory / "serve.log") as process:
        url = f"http://127.0.0.1:{port}"
        try:
            _until(lambda: num_running() == num_replicas and _is_ready(url), process, directory / "serve.log")
            yield url
        finally:
            # Here, too: this process would ask the controller that has ended for the next application.
            serve.shutdown()  # type: ignore[no-untyped-call]


def serve_config(port: int, args: Mapping[str, Any], num_replicas: int, router: str) -> dict[str, Any]:
    """Return Serve's configuration file as a document."""
    engines = {
        "name": ENGINES,
        "num_replicas": num_replicas,
        "request_router_config": {
            "request_router_class": router,
            "request_routing_stats_period_s": REPORT_INTERVAL_S,
        },
    }
    described = {
        "name": APPLICATION,
        "import_path": "server.scale.app:app",
        "route_prefix": "/",
        "args": dict(args),
        "deployments": [engines],
    }
    return {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [described]}


def num_running() -> int:
    """Return the number of engine replicas that Serve counts as running."""
    found = serve.status().applications.get(APPLICATION)
    if found is None or ENGINES not in found.deployments:
        return 0
    states = found.deployments[ENGINES].replica_states
    return sum(count for state, count in states.items() if state == "RUNNING")


@contextmanager
def _process(arguments: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run Python with arguments, and end it as Ctrl-C does."""
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, *arguments], stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until(holds: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.perf_counter() + START_S
    while not holds():
        if process.poll() is not None or time.perf_counter() > end:
            raise RuntimeError(f"{process.args!r} does not serve: {log.read_text()[-4000:]}")
        time.sleep(POLL_S)


def _is_listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
