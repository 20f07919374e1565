"""A server in a process of its own, reached over HTTP, and the tiny artifacts that tests upload."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from compressor.config import CompressConfig
from compressor.pipeline import compress
from tests.helpers.tiny_models import CHAT_TEMPLATE, Change, make_pair
from tests.server.api.helpers.described import check_described

ROOT = Path(__file__).resolve().parents[3]
START_S = 240.0  # vLLM's takes a minute
WAIT_S = 240.0
MAX_MODEL_LEN = 4096
# The first bytes of what may be an artifact; the rest decides.
ARTIFACT_PREFIX = (4088).to_bytes(8, "little") + b"{"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Artifacts:
    """A base, and artifacts of fine-tunes that each give other tokens."""

    base: Path
    plain: Path
    chatty: Path  # with its own chat template, two added tokens and 5 new tokens by default
    third: Path
    foreign: Path  # made from another base
    oversized: Path  # its embeddings whole, so that no slot holds it
    spare: tuple[Path, ...]  # of the first three, by another method: for tests that need bytes of their own


def make_artifacts(directory: Path) -> Artifacts:
    """Make tiny models and compress them; takes seconds."""
    chatty = Change(
        added_tokens=2, chat_template=CHAT_TEMPLATE, generation={"max_new_tokens": 5, "do_sample": False}
    )
    models = make_pair(
        "llama",
        directory / "models",
        changes=(Change(), chatty, Change()),
        max_position_embeddings=MAX_MODEL_LEN,
    )
    other = make_pair("llama", directory / "others", 1, max_position_embeddings=MAX_MODEL_LEN)
    plain, chatty_delta, third, foreign = paths = [
        directory / f"{name}.safetensors" for name in ("plain", "chatty", "third", "foreign")
    ]
    bases = [models.base] * 3 + [other.base]
    for base, finetune, out in zip(bases, [*models.finetunes, *other.finetunes], paths, strict=True):
        compress(CompressConfig(str(base), str(finetune), out, method="scalar"))
    spare = tuple(directory / f"spare-{number}.safetensors" for number in range(3))
    for finetune, out in zip(models.finetunes, spare, strict=True):
        compress(CompressConfig(str(models.base), str(finetune), out, method="both"))
    oversized = directory / "oversized.safetensors"
    compress(CompressConfig(str(models.base), str(models.finetunes[0]), oversized, embeddings="whole"))
    return Artifacts(models.base, plain, chatty_delta, third, foreign, oversized, spare)


@dataclass(slots=True)
class LiveServer:
    """A running server. Its standard error goes to a file, to be read when a test fails."""

    process: subprocess.Popen[str]
    url: str
    log: Path
    registry: Path
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        hooks = {"response": [check_described]}
        self.client = httpx.Client(base_url=self.url, timeout=WAIT_S, event_hooks=hooks)

    def upload(self, name: str, artifact: Path, **query: str) -> httpx.Response:
        headers = {"Content-Type": "application/octet-stream"}
        return self.client.post(
            "/variants", params={"name": name, **query}, content=artifact.read_bytes(), headers=headers
        )

    def generate(self, variant: str | None = None, **body: Any) -> httpx.Response:
        """Generate greedily from a short prompt; `body` overrides."""
        if "messages" not in body:
            body = {"prompt": "hello", **body}
        params = {} if variant is None else {"variant": variant}
        return self.client.post("/generate", params=params, json={"temperature": 0, **body})

    def token_ids(self, variant: str | None = None, **body: Any) -> list[int]:
        reply = self.generate(variant, **body)
        assert reply.status_code == 200, reply.text
        ids: list[int] = reply.json()["outputs"][0]["token_ids"]
        return ids

    @contextmanager
    def streaming(self, variant: str | None = None, **body: Any) -> Iterator[Iterator[tuple[str, Any]]]:
        """Yield server-sent events as they arrive, each a name and its document; leaving the block disconnects."""
        params = {} if variant is None else {"variant": variant}
        body = {"prompt": "hello", "temperature": 0, "stream": True, **body}
        with self.client.stream("POST", "/generate", params=params, json=body) as reply:
            assert reply.status_code == 200, reply.read()
            yield _events(reply)

    def unload_all(self) -> None:
        """Unload every version that was used."""

        def used() -> list[tuple[str, int]]:
            return [
                (variant["name"], version["version"])
                for variant in self.client.get("/variants").json()["variants"]
                for version in variant["versions"]
                if version["level"] != "disk"
            ]

        for name, number in used():
            self.client.post(f"/variants/{name}/unload", params={"version": number})
        assert eventually(lambda: not used())

    def metric(self, name: str, **labels: str) -> float:
        """Return one value of /metrics; 0 if there is no such series."""
        series = f"peraxis_{name}"
        if labels:
            series += "{" + ",".join(f'{key}="{value}"' for key, value in sorted(labels.items())) + "}"
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(f"{series} "):
                return float(line.rpartition(" ")[2])
        return 0.0

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS"))

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        """Send a signal, wait, and return the exit code."""
        self.process.send_signal(signal_number)
        return self.process.wait(WAIT_S)


def serve_command(*args: object) -> list[str]:
    """Return the installed command, which imports nothing from the working directory."""
    return [str(Path(sys.executable).with_name("peraxis")), "serve", *map(str, args)]


def clean_environment() -> dict[str, str]:
    """Return the environment without PERAXIS_ settings, and with one thread: tiny products gain nothing by more."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PERAXIS_")}
    return {**inherited, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}


@contextmanager
def live_server(
    base: Path,
    registry: Path,
    *args: object,
    working_directory: Path = ROOT,
    environment: Mapping[str, str] | None = None,
) -> Iterator[LiveServer]:
    """Start a server on a free port, wait until it is ready, and kill it at the end of the block."""
    log = registry.parent / f"{registry.name}.{time.monotonic_ns()}.log"
    command = serve_command("--base", base, "--registry", registry, "--port", 0, "--dtype", "float32", *args)
    variables = {**clean_environment(), **(environment or {})}
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, cwd=working_directory, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], START_S)[0], log.read_text()
        line = process.stdout.readline()
        assert " is served at http://" in line, log.read_text()
        server = LiveServer(process, address_in(line), log, registry)
        with server.client:
            yield server
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def address_in(line: str) -> str:
    """Return the public address in the line that a server prints when it is ready."""
    return next(word for word in line.split() if word.startswith("http://")).rstrip(",")


def eventually(probe: Callable[[], T]) -> T:
    """Call `probe` until it returns a true value, for up to `WAIT_S`; return its last value."""
    deadline = time.monotonic() + WAIT_S
    while not (answer := probe()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return answer


def connection(url: str) -> socket.socket:
    """Open a socket, for requests that an HTTP client would not send."""
    address = httpx.URL(url)
    return socket.create_connection((address.host, address.port), timeout=WAIT_S)


def json_request(target: str, body: dict[str, Any]) -> bytes:
    """Return the bytes of a POST."""
    content = json.dumps(body).encode()
    head = f"POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def error_of(reply: httpx.Response) -> dict[str, Any]:
    """Return the error of a reply, after checking its shape."""
    document = reply.json()
    assert list(document) == ["error"], document
    assert list(document["error"]) == ["message", "type", "param", "code"]
    assert document["error"]["message"]
    error: dict[str, Any] = document["error"]
    return error


def _events(reply: httpx.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in reply.iter_lines():
        key, _, value = line.partition(": ")
        if key == "event":
            name = value
        elif key == "data":
            yield name, json.loads(value)
