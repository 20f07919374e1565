"""A `peraxis serve` subprocess and an HTTP client of its routes. Must not know models."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from deltastore.errors import PeraxisError

START_S = 120.0
# A long answer of a large model on a CPU takes minutes.
CALL_S = 600.0
POLL_S = 0.002
LINE_INTERVAL_S = 5.0


class ServerFailed(PeraxisError):
    """The demo's server did not start, or answered a call with an error."""


class ServerClient:
    """An HTTP client of one server. Every call raises ServerFailed if the server answers with an error."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = httpx.Client(base_url=url, timeout=CALL_S)

    def upload(self, name: str, artifact: Path) -> dict[str, Any]:
        """`POST /variants`, streamed from disk."""
        with artifact.open("rb") as body:
            headers = {"Content-Type": "application/octet-stream"}
            return self._json("POST", "/variants", params={"name": name}, content=body, headers=headers)

    def generate(self, variant: str | None, body: Mapping[str, Any]) -> dict[str, Any]:
        """`POST /generate?variant=`; None asks the base."""
        params = {} if variant is None else {"variant": variant}
        return self._json("POST", "/generate", params=params, json=dict(body))

    def activate(self, variant: str, version: int) -> None:
        """`PATCH /variants/{name}`: promote or roll back."""
        self._json("PATCH", f"/variants/{variant}", json={"active": version})

    def unload(self, variant: str) -> None:
        """`POST /variants/{name}/unload`, and wait until the active version has left its slot."""
        self._json("POST", f"/variants/{variant}/unload")
        deadline = time.monotonic() + CALL_S
        while self._is_active_on_device(variant):
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"variant {variant!r} is still in its slot after {CALL_S:.0f} s: read the log"
                )
            time.sleep(POLL_S)

    def _is_active_on_device(self, variant: str) -> bool:
        found = self._json("GET", f"/variants/{variant}")
        return any(v["level"] == "device" and v["version"] == found["active"] for v in found["versions"])

    def close(self) -> None:
        self._client.close()

    def _json(self, method: str, path: str, **call: Any) -> dict[str, Any]:
        reply = self._client.request(method, path, **call)
        if reply.is_error:
            raise ServerFailed(f"{method} {path}: {reply.status_code} {reply.text}")
        return dict(reply.json())


@contextmanager
def running(
    base: Path,
    registry: Path,
    log: Path,
    progress: Callable[[str], object] = lambda line: None,
    options: Sequence[str] = (),
) -> Iterator[ServerClient]:
    """Run `peraxis serve` on a free port inside the block, from the moment it is ready.

    Args:
        base: The base's directory.
        registry: The registry's directory.
        log: The file for the server's stderr.
        progress: Gets a line every few seconds until the server is ready.
        options: More options of `peraxis serve`.

    Raises:
        ServerFailed: The server ended before it was ready.
    """
    command = [sys.executable, "-P", "-m", "peraxis", "serve", "--port", "0"]
    command += ["--base", str(base), "--registry", str(registry), *options]
    # The user's own settings are for another server: keys or a second port would be in the demo's way.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PERAXIS_")}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, text=True, env=environment)
    try:
        client = ServerClient(_address(process, log, progress))
        try:
            yield client
        finally:
            client.close()
    finally:
        process.terminate()
        try:
            process.wait(timeout=START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _address(process: subprocess.Popen[str], log: Path, progress: Callable[[str], object]) -> str:
    """Return the address in the line that the server prints when it is ready."""
    began = time.monotonic()
    progress("starting peraxis serve")
    assert process.stdout is not None
    while not select.select([process.stdout], [], [], LINE_INTERVAL_S)[0]:
        progress(f"starting peraxis serve: not ready after {time.monotonic() - began:.0f} s")
    for line in process.stdout:
        address = next((word for word in line.split() if word.startswith("http://")), None)
        if address is not None:
            return address.rstrip(".,/")
    text = log.read_text().strip()
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    raise ServerFailed(f"the server ended before it was ready: {errors[-1] if errors else text}")
