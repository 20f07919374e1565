"""Prove an image: `python docker/prove_image.py localhost/peraxis:cpu`. Prints a line for each property that it saw.

The container runs as docs/deploy/container.md says: as user 10001, without capabilities, on a read-only root file
system. A tiny base is made here, and the delta by the image itself. With `--backend vllm` the image's native engine
must give the tokens that vLLM gave. Needs root and podman; listens on loopback only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from transformers.utils.logging import disable_progress_bar

from tests.helpers.tiny_models import make_pair

USER = 10001
START_S = 600.0
CALL_S = 120.0
PROMPT = {"prompt": "The quick brown fox", "max_new_tokens": 16, "temperature": 0}
# More tokens than a server generates before SIGTERM reaches it.
LONG = {"prompt": "a", "max_new_tokens": 240, "temperature": 0, "stream": True}
# Words of expressions of `find`, which runs without a shell that would expand them.
COMPILERS = (
    "-type f -perm /111 ( -name *gcc* -o -name *g++* -o -name cc -o -name c++ -o -name clang* -o -name ld )"
)
CACHES = "( -name *.deb -o -path */.cache/* -o -path /var/lib/apt/lists/*_Packages* -o -path */pip/http* )"
COMPILED = "( -path */compiled/* -o -name *.so )"
# vLLM's attention on the CPU has no heads of fewer dimensions; the other model keeps odd sizes.
SIZES: dict[str, dict[str, Any]] = {"native": {}, "vllm": {"hidden_size": 128, "head_dim": 32}}
OPTIONS = [
    *("--network", "host", "--read-only", "--cap-drop", "all", "--security-opt", "no-new-privileges"),
    # Explicit, because podman's own are above those of a machine that may not raise them.
    *("--ulimit", "nofile=16384:16384", "--ulimit", "nproc=4096:4096"),
    "--shm-size=64k",
    # Podman runs health checks by systemd, which may be missing; the command itself is run below.
    "--no-healthcheck",
]


class ProofFailed(Exception):
    """The image does not do what it must."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("image")
    parser.add_argument("--backend", default="native", choices=SIZES, help="engine in the image (native)")
    arguments = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("podman") is None:
        parser.error("run this as root, with Debian's packages podman and runc")
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="peraxis-proof-") as directory:
        Proof(arguments.image, arguments.backend, Path(directory)).run()


class Proof:
    """The directories that the containers mount, and what is asked of them."""

    def __init__(self, image: str, backend: str, directory: Path) -> None:
        self._image = image
        self._backend = backend
        self._directory = directory
        self._cache = f"peraxis-proof-{os.getpid()}"
        self._port, self._admin_port = free_ports(2)

    def run(self) -> None:
        try:
            self._make_directories()
            self._check_image()
            key = self._prepare()
            with self._serving() as container, self._client(key) as client:
                self._check_confinement(container)
                self._publish(client)
                answer = self._generate(client)
                compiled = self._compiled(container)
                self._drain(container, client)
            with self._serving() as container, self._client(key) as client:
                require(self._generate(client) == answer, "after a restart the variant answers otherwise")
                require(
                    self._compiled(container) == compiled != "", "the second start compiled kernels again"
                )
                proved("a second container on the same volumes gives the same answer and compiles nothing")
            if self._backend != "native":
                with self._serving(BACKEND="native") as container, self._client(key) as client:
                    require(self._generate(client) == answer, "the native engine answers otherwise")
                    proved(f"the image's native engine gives the tokens that {self._backend} gave")
        finally:
            podman("volume", "rm", "--force", self._cache)

    def _check_image(self) -> None:
        facts = json.loads(podman("image", "inspect", self._image))[0]
        require(facts["Config"]["User"].split(":")[0] == str(USER), "the image's user is not a number")
        require(facts.get("Healthcheck") is not None, "there is no health check")
        environment = dict(entry.split("=", 1) for entry in facts["Config"]["Env"])
        require(
            environment.get("PERAXIS_BACKEND", "native") == self._backend,
            f"the image's engine is not {self._backend}",
        )
        lacks = {"compilers": COMPILERS, "caches": CACHES}
        if self._backend == "vllm":
            # torch.compile uses it.
            del lacks["compilers"]
        for what, expression in lacks.items():
            # Root can enter every directory.
            found = self._once(["/", "-xdev", *expression.split()], "--user=0", "--entrypoint=find")
            require(found == "", f"the image contains {what}:\n{found}")
        proved(f"{self._image} has {facts['Size'] / 1e6:.0f} MB, without {' and '.join(lacks)}")

    def _make_directories(self) -> None:
        os.chmod(self._directory, 0o755)
        make_pair("llama", self._directory, **SIZES[self._backend])
        # safetensors creates files that the owner alone can read.
        for path in self._directory.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        for name in ("registry", "out"):
            (self._directory / name).mkdir()
            os.chown(self._directory / name, USER, USER)

    def _prepare(self) -> str:
        """Make a delta and a key with the image; return the key."""
        self._once(
            ["compress", "--base", "/work/base", "--finetune", "/work/finetune-0", "--out", "/work/out/delta"]
        )
        proved("peraxis compress made a delta in the image")
        return self._once(
            ["keys", "create", "--tenant", "proof", "--role", "admin", "--registry", "/var/lib/peraxis"]
        )

    @contextmanager
    def _serving(self, **settings: str) -> Iterator[str]:
        addresses = {"HOST": "127.0.0.1", "PORT": self._port, "ADMIN_PORT": self._admin_port}
        environment = {**addresses, "DTYPE": "float32", **settings}
        variables = [f"--env=PERAXIS_{name}={value}" for name, value in environment.items()]
        container = podman("run", "--detach", *OPTIONS, *self._mounts(), *variables, self._image)
        try:
            deadline = time.monotonic() + START_S
            while not self._is_ready():
                running = podman("inspect", "--format", "{{.State.Running}}", container) == "true"
                if not running or time.monotonic() > deadline:
                    raise ProofFailed(f"the server is not ready:\n{podman('logs', container)}")
                time.sleep(0.2)
            yield container
        finally:
            podman("rm", "--force", "--time", "5", container)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self._port}/ready").is_success
        except httpx.TransportError:
            return False

    @contextmanager
    def _client(self, key: str) -> Iterator[httpx.Client]:
        headers = {"Authorization": f"Bearer {key}"}
        with httpx.Client(
            base_url=f"http://127.0.0.1:{self._port}", headers=headers, timeout=CALL_S
        ) as client:
            yield client

    def _check_confinement(self, container: str) -> None:
        status = podman("exec", container, "cat", "/proc/self/status", "/proc/1/status")
        fields = [line.split() for line in status.splitlines()]
        require(all(int(row[1]) == USER for row in fields if row[0] == "Uid:"), "a process has another user")
        require(
            all(int(row[1], 16) == 0 for row in fields if row[0] == "CapEff:"), "a process has capabilities"
        )
        write = ["podman", "exec", container, "touch", "/opt/peraxis/written"]
        require(
            subprocess.run(write, capture_output=True).returncode != 0, "the root file system can be written"
        )
        proved(f"the server runs as user {USER}, without capabilities, on a read-only root file system")
        check = json.loads(podman("image", "inspect", "--format", "{{json .HealthCheck}}", self._image))
        podman("exec", container, *check["Test"][1:])
        proved("the health check passes")

    def _publish(self, client: httpx.Client) -> None:
        artifact = (self._directory / "out/delta").read_bytes()
        headers = {"Content-Type": "application/octet-stream"}
        admin = client.build_request(
            "POST", "/variants", params={"name": "proof"}, content=artifact, headers=headers
        )
        # Publishing is the admin port's alone.
        admin.url = admin.url.copy_with(port=self._admin_port)
        client.send(admin).raise_for_status()
        proved(f"an artifact of {len(artifact)} bytes was uploaded")
        metrics = client.get(f"http://127.0.0.1:{self._admin_port}/metrics").raise_for_status().text
        require(
            "peraxis_ready 1.0" in metrics.splitlines(), "the metrics do not say that the server is ready"
        )
        proved("the admin port gives metrics to the key")

    def _generate(self, client: httpx.Client) -> list[int]:
        ids = []
        for query in ("?variant=proof", ""):
            reply = client.post(f"/generate{query}", json=PROMPT).raise_for_status().json()
            ids.append(list[int](reply["outputs"][0]["token_ids"]))
        require(ids[0] != ids[1] and len(ids[0]) > 0, "the variant answers as the base does")
        proved(f"the variant generated {len(ids[0])} tokens, other ones than the base")
        return ids[0]

    def _compiled(self, container: str) -> str:
        """Return names, sizes and times of what was compiled."""
        words = ["/var/cache/peraxis", "-type", "f", *COMPILED.split(), "-printf", "%p %s %T@\\n"]
        return "\n".join(sorted(podman("exec", container, "find", *words).splitlines()))

    def _drain(self, container: str, client: httpx.Client) -> None:
        with client.stream("POST", "/generate?variant=proof", json=LONG) as reply:
            lines = reply.iter_lines()
            next(lines)
            podman("kill", "--signal", signal.SIGTERM.name, container)
            events = [line for line in lines if line.startswith("event:")]
        require(events[-1:] == ["event: done"], f"SIGTERM cut a stream: it ended with {events[-1:]}")
        code = podman("wait", container)
        require(code == "0", f"SIGTERM ended the server with exit code {code}:\n{podman('logs', container)}")
        proved("after SIGTERM a running stream was completed, and the server ended with exit code 0")

    def _mounts(self) -> list[str]:
        volumes = {
            str(self._directory / "base"): "/models/base:ro",
            str(self._directory / "registry"): "/var/lib/peraxis",
            str(self._directory): "/work:ro",
            str(self._directory / "out"): "/work/out",
            self._cache: "/var/cache/peraxis",
        }
        return [f"--volume={source}:{target}" for source, target in volumes.items()]

    def _once(self, command: Sequence[str], *options: str) -> str:
        """Run a command in a container of its own and return its output."""
        return podman("run", "--rm", *OPTIONS, *self._mounts(), *options, self._image, *command)


def podman(*arguments: Any) -> str:
    """Run podman and return its standard output.

    Raises:
        ProofFailed: it failed; the message has its standard error.
    """
    # Without systemd, podman makes control groups itself.
    manager = [] if Path("/run/systemd/system").is_dir() else ["--cgroup-manager", "cgroupfs"]
    done = subprocess.run(["podman", *manager, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise ProofFailed(
            f"podman {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        )
    # `podman logs` repeats each stream of the container on its own.
    return (done.stdout + (done.stderr if arguments[0] == "logs" else "")).strip()


def free_ports(count: int) -> list[int]:
    """Return free ports of the loopback interface."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def require(is_true: bool, message: str) -> None:
    if not is_true:
        raise ProofFailed(message)


def proved(line: str) -> None:
    print(f"proved: {line}", flush=True)


if __name__ == "__main__":
    main()
