"""The image's health check against real HTTP servers."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docker/healthcheck.py"


class Health(BaseHTTPRequestHandler):
    """Answers `/health` with the status of its server."""

    def do_GET(self) -> None:
        assert isinstance(self.server, StatusServer)
        self.send_response(self.server.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""


class StatusServer(ThreadingHTTPServer):
    """An HTTP server whose health is one status."""

    status: int


@contextmanager
def serving(status: int) -> Iterator[int]:
    """Serve inside the block; yield the port."""
    with StatusServer(("127.0.0.1", 0), Health) as server:
        server.status = status
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def checked(host: str, port: int) -> subprocess.CompletedProcess[str]:
    environment = {"PERAXIS_HOST": host, "PERAXIS_PORT": str(port)}
    return subprocess.run([sys.executable, "-I", SCRIPT], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_a_server_that_answers_is_healthy(host: str) -> None:
    with serving(200) as port:
        assert checked(host, port).returncode == 0


def test_a_server_that_answers_with_an_error_is_unhealthy() -> None:
    with serving(503) as port:
        check = checked("0.0.0.0", port)

    assert check.returncode == 1
    assert "/health answers 503" in check.stderr


def test_a_server_that_does_not_listen_is_unhealthy() -> None:
    with serving(200) as port:
        pass

    check = checked("0.0.0.0", port)

    assert check.returncode == 1
    assert f"no answer from 0.0.0.0 port {port}" in check.stderr
