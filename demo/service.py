"""A running `peraxis serve` and the calls that the demo makes to it. Knows HTTP and nothing of models."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from deltastore.errors import PeraxisError

START_S = 120.0
CALL_S = 120.0


class ServiceFailed(PeraxisError):
    """The demo's own server did not start, or answered what it should not."""


class ServerClient:
    """The calls of a client."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = httpx.Client(base_url=url, timeout=CALL_S)

    def upload(self, name: str, artifact: Path) -> dict[str, Any]:
        """`POST /variants`, streamed from disk."""
        with artifact.open("rb") as body:
            headers = {"Content-Type": "application/octet-stream"}
            return self._json("POST", "/variants", params={"name": name}, content=body, headers=headers)

    def generate(self, variant: str | None, body: Mapping[str, Any]) -> dict[str, Any]:
        """`POST /generate?variant=`; the base without a variant."""
        params = {} if variant is None else {"variant": variant}
        return self._json("POST", "/generate", params=params, json=dict(body))

    def unload(self, variant: str) -> None:
        """Free the variant's slot, and wait until it is free."""
        self._json("POST", f"/variants/{variant}/unload")
        deadline = time.monotonic() + CALL_S
        while any(v["level"] == "device" for v in self._json("GET", f"/variants/{variant}")["versions"]):
            if time.monotonic() > deadline:
                raise ServiceFailed(f"variant {variant!r} stays in its slot")
            time.sleep(0.002)

    def close(self) -> None:
        self._client.close()

    def _json(self, method: str, path: str, **call: Any) -> dict[str, Any]:
        reply = self._client.request(method, path, **call)
        if reply.is_error:
            raise ServiceFailed(f"{method} {path}: {reply.status_code} {reply.text}")
        return dict(reply.json())


@contextmanager
def running(base: Path, registry: Path, log: Path) -> Iterator[ServerClient]:
    """Start `peraxis serve` on a free port, wait until it is ready, and end it afterwards."""
    command = [
        sys.executable,
        "-m",
        "peraxis",
        "serve",
        "--base",
        str(base),
        "--registry",
        str(registry),
        "--port",
        "0",
    ]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, text=True)
    try:
        service = ServerClient(_address(process, log))
        try:
            yield service
        finally:
            service.close()
    finally:
        process.terminate()
        process.wait(timeout=START_S)


def _address(process: subprocess.Popen[str], log: Path) -> str:
    """The address in the line that the server prints when it is ready."""
    assert process.stdout is not None
    for line in process.stdout:
        address = next((word for word in line.split() if word.startswith("http://")), None)
        if address is not None:
            return address.rstrip(".,/")
    raise ServiceFailed(f"the server ended before it was ready; its last words are in {log}")
