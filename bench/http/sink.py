"""A trivial HTTP server that writes each body into one file: `python -m bench.http.sink FILE`. It checks nothing.

It bounds what any server can reach that takes an upload: one process receives, writes and makes the bytes durable.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

BUFFER_BYTES = 1 << 20


def main() -> None:
    target = Path(sys.argv[1])
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
    main()
