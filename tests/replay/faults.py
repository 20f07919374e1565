"""The errors that need a fault: slow clients, full queues, damaged objects, a lost engine, a registry that is gone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.replay.asking import OCTETS, Asker
from tests.replay.world import World
from tests.server.helpers.live_server import WAIT_S, connection, eventually

# Greedy sequences may end at once.
LONG: dict[str, Any] = {"prompt": "hello", "temperature": 2.0, "seed": 1, "n": 16, "max_new_tokens": 4000}
SHORT: dict[str, Any] = {"prompt": "hello", "temperature": 0, "max_new_tokens": 1}


def ask_faults(world: World, process: subprocess.Popen[str], asker: Asker, registry: Path) -> None:
    """Ask a server of one row, one place in the queue and two slots; it is shut down at the end.

    `plain`, `chatty` and `third` are published, and `limited` is the key of a tenant with one request a minute.
    """
    slow = _half_a_request(asker)

    def ask(title: str, variant: str = "plain", role: str = "inference", **options: Any) -> None:
        asker.ask(title, role, "POST", f"/generate?variant={variant}", json={**SHORT, **options})

    ask("within a limit", role="limited")
    ask("over a limit", role="limited")
    with _running(asker, "plain"):
        waiting = _request(asker, "/generate?variant=plain", json.dumps(LONG))
        wait(lambda: _version(asker, "plain")["num_requests"] == 2)
        ask("full queue")
        waiting.close()
    asker.send("publish", "POST", "/variants/plain/pin")
    wait(lambda: _version(asker, "plain")["pinned"])
    with _running(asker, "chatty"):
        ask("slots that stay taken", "third")
    asker.send("publish", "POST", "/variants/plain/unpin")
    _damage(asker, registry, "third")
    ask("damaged object", "third")
    asker.ask("damaged object", "publish", "GET", "/variants/third/artifact")
    asker.transcript.add("a head that came too slowly", slow())
    with _running(asker, "plain") as lines:
        next(lines)
        engine = next(
            child
            for child in psutil.Process(process.pid).children()
            if any("engine" in part for part in child.cmdline())
        )
        engine.kill()
        last = [line for line in lines if line][-2:]
        asker.transcript.add("end of a stream whose engine died", "\n".join(last))
    ask("the engine starts again")
    wait(lambda: asker.send("", "GET", "/ready").status_code == 200)
    ask("the engine is back")
    aside = registry.with_name("aside")
    registry.rename(aside)
    wait(lambda: asker.send("publish", "GET", "/variants").status_code == 503)
    asker.ask("registry gone", "publish", "GET", "/variants")
    asker.ask("registry gone", "", "GET", "/ready")
    ask("registry gone, in memory")
    ask("registry gone, not in memory", "nobody")
    late = world.inputs.artifacts.plain.read_bytes()
    asker.ask("registry gone", "publish", "POST", "/variants?name=late", OCTETS, content=late)
    aside.rename(registry)
    wait(lambda: asker.send("publish", "GET", "/variants").status_code == 200)
    with _running(asker, "plain") as lines:
        next(lines)
        process.send_signal(signal.SIGTERM)
        wait(lambda: asker.send("", "GET", "/ready").status_code == 503)
        asker.ask("shutting down", "", "GET", "/ready")
        ask("shutting down")
    asker.transcript.add("exit code", str(process.wait(WAIT_S)))


def ask_pages(asker: Asker) -> None:
    """Ask a server without keys as a page in a browser would."""
    for title, headers in (
        ("none", {}),
        ("another host", {"Host": "evil.example"}),
        ("allowed host", {"Host": "peraxis.example"}),
        ("localhost", {"Host": "localhost"}),
        ("another origin", {"Origin": "http://evil.example"}),
        ("another site", {"Sec-Fetch-Site": "cross-site"}),
        ("a link", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"}),
    ):
        asker.ask(f"page: {title}", "", "GET", "/v1/models", headers)
        asker.ask(f"page: {title}", "", "POST", "/variants?name=x", headers, content=b"hello, world, hello")
    asker.ask("no keys", "", "GET", "/me")
    asker.ask("no keys", "", "GET", "/keys")


def ask_full_disk(asker: Asker, content: bytes) -> None:
    """Upload to a registry whose disk is smaller than the file."""
    asker.ask("full disk", "", "POST", "/variants?name=x", OCTETS, content=content)


def wait(is_so: Callable[[], bool]) -> None:
    if not eventually(is_so):
        raise TimeoutError


@contextmanager
def _running(asker: Asker, variant: str) -> Iterator[Iterator[str]]:
    """Yield the lines of a stream that goes on until the block ends."""
    path, headers = f"/generate?variant={variant}", asker.headers("inference")
    with asker.client.stream("POST", path, headers=headers, json={**LONG, "stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        yield lines


def _request(asker: Asker, target: str, body: str) -> socket.socket:
    """Send a request on a connection of its own, whose reply is not read."""
    headers = {"Host": "localhost", "Content-Type": "application/json", **asker.headers("inference")}
    head = [f"POST {target} HTTP/1.1", *map(": ".join, headers.items())]
    client = connection(asker.url)
    client.sendall("\r\n".join([*head, f"Content-Length: {len(body)}", "", body]).encode())
    return client


def _half_a_request(asker: Asker) -> Callable[[], str]:
    """Send half a head; return how to read the answer to it."""
    client = connection(asker.url)
    client.sendall(b"GET /health HTTP/1.1\r\nHost: local")

    def answer() -> str:
        with client:
            head, _, body = client.makefile("rb").read().partition(b"\r\n\r\n")
        return f"{head.splitlines()[0].decode()}\n{body.decode()}"

    return answer


def _version(asker: Asker, name: str) -> dict[str, Any]:
    version: dict[str, Any] = asker.send("publish", "GET", f"/variants/{name}").json()["versions"][0]
    return version


def _damage(asker: Asker, registry: Path, name: str) -> None:
    path = registry / "objects" / _version(asker, name)["digest"].removeprefix("sha256:")
    os.chmod(path, 0o600)
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :])
