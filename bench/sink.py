"""Trivial HTTP servers to compare with, which check nothing: `python -m bench.sink FILE` or `python -m bench.sink`.

With a file, each body is written into it: that bounds what any server can reach that takes an upload, as one process
receives, writes and makes the bytes durable. Without, each request is read and answered `{}`: an attack's client that
sends here as often as to the server under test shows what it takes of the processors.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import cast

import httptools
import uvloop

BUFFER_BYTES = 1 << 20
REPLY = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


class Answering(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        if self._transport is not None:
            self._transport.write(REPLY)


async def _serve() -> None:
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, over.set)
    server = await loop.create_server(Answering, "127.0.0.1", 0)
    print(f"a sink is served at http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await over.wait()


def serve_file(target: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(f"a file is served at http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        while True:
            with listening.accept()[0] as connection:
                receive(connection, target)


def receive(connection: socket.socket, target: Path) -> None:
    """Write one request's body into `target`, call fsync, and answer 201."""
    head, _, body = _head_of(connection).partition(b"\r\n\r\n")
    (length,) = (
        line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
    )
    buffer, remaining = memoryview(bytearray(BUFFER_BYTES)), int(length) - len(body)
    with target.open("wb", buffering=0) as file:
        file.write(body)
        while remaining and (count := connection.recv_into(buffer)):
            file.write(buffer[:count])
            remaining -= count
        os.fsync(file.fileno())
    connection.sendall(b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n")


def _head_of(connection: socket.socket) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received and (data := connection.recv(BUFFER_BYTES)):
        received += data
    return received


if __name__ == "__main__":
    if sys.argv[1:]:
        serve_file(Path(sys.argv[1]))
    else:
        uvloop.run(_serve())
