"""An HTTP server on loopback that answers each request as a test says, well or badly, and remembers it."""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WAIT_S = 240.0


@dataclass(frozen=True, slots=True)
class Received:
    """A request as it came, its body as far as the server has read it."""

    call: str  # method and path with the query
    headers: Mapping[str, str]
    body: bytes


@dataclass(slots=True)
class ScriptedServer:
    """The answers that are left, and the requests that came; one request more than answers gets status 599."""

    reactions: list[Reaction]
    url: str = ""
    begun: list[Future[Received]] = field(default_factory=list)

    @property
    def received(self) -> list[Received]:
        """The requests that were read, in the order in which they came, after the ends of those under way."""
        wait(self.begun, WAIT_S)
        return [each.result(0) for each in self.begun if each.exception(0) is None]

    @property
    def calls(self) -> list[str]:
        return [each.call for each in self.received]


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = WAIT_S
    script: ScriptedServer

    def react(self) -> None:
        reaction = self.script.reactions.pop(0) if self.script.reactions else answer(599)
        begun: Future[Received] = Future()
        self.script.begun.append(begun)
        try:
            body = reaction(self)
        except BaseException as error:
            begun.set_exception(error)
            raise
        begun.set_result(Received(f"{self.command} {self.path}", dict(self.headers), body))

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = react

    def read_body(self, num_bytes: int | None = None) -> bytes:
        length = int(self.headers.get("content-length", 0))
        return self.rfile.read(length if num_bytes is None else min(length, num_bytes))

    def reset(self) -> None:
        """Close the connection as a machine does that has lost it."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class QuietServer(ThreadingHTTPServer):
    """A server that prints nothing about clients that leave before their answer."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


# Answers one request, and returns what it has read of its body.
Reaction = Callable[[Handler], bytes]


def answer(status: int, document: Any = None, **headers: str) -> Reaction:
    """Read the body, and answer with a JSON document, or with bytes as they are; `_` in a header's name is ``-``."""

    def react(handler: Handler) -> bytes:
        body = handler.read_body()
        content = document if isinstance(document, bytes) else json.dumps(document).encode()
        if status in (204, 304):
            content = b""
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)
        return body

    return react


def refuse(status: int, code: str, message: str = "the call failed: try another", **headers: str) -> Reaction:
    """Answer with an error as Peraxis writes it."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return answer(status, {"error": error}, **headers)


def break_off(after_bytes: int | None = None) -> Reaction:
    """Read so many bytes of the body, all by default, and close the connection without an answer."""

    def react(handler: Handler) -> bytes:
        body = handler.read_body(after_bytes)
        handler.reset()
        return body

    return react


def hang_after(document: Any) -> Reaction:
    """Answer with one server-sent event and no more until the client has left."""

    def react(handler: Handler) -> bytes:
        body = handler.read_body()
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(b"data: " + json.dumps(document).encode() + b"\n\n")
        handler.rfile.read(1)
        return body

    return react


def stop(handler: Handler) -> bytes:
    """Close the connection without an answer, and take no others."""
    body = handler.read_body(0)
    handler.server.shutdown()
    handler.server.server_close()
    handler.reset()
    return body


def events(*documents: Any, is_whole: bool = True, **headers: str) -> Reaction:
    """Answer with server-sent events and, if it `is_whole`, OpenAI's last one."""
    lines = [json.dumps(document, ensure_ascii=False).encode() for document in documents]
    lines += [b"[DONE]"] if is_whole else []
    content = b"".join(b"data: " + line + b"\n\n" for line in lines)
    return answer(200, content, Content_Type="text/event-stream", **headers)


@contextmanager
def scripted_server(*reactions: Reaction) -> Iterator[ScriptedServer]:
    """Run a server on a free port; its requests get these reactions in order."""
    script = ScriptedServer(list(reactions))
    handler = type("ScriptedHandler", (Handler,), {"script": script})
    server = QuietServer(("127.0.0.1", 0), handler)
    script.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield script
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
