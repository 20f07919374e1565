"""A relay between a client and a server, which keeps the requests that pass as they are sent."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx

# So small that a client which reads no more soon holds up the server.
BUFFER_BYTES = 16 << 10
HOST = b"127.0.0.1:8000"
LENGTH = re.compile(rb"(?im)^(content-length: *)(\d+)")
# Ids of tool calls, which a client sends back; a server draws them at random.
CALL_ID = re.compile(rb'("(?:id|tool_call_id)" ?: ?)"([^"]+)"')


class Relay:
    """Connections from a port of its own to a server's, each in both directions."""

    def __init__(self, url: str) -> None:
        self._server = httpx.URL(url)
        self._listener = socket.create_server(("127.0.0.1", 0))
        # What clients sent, by connection in the order of their first bytes; only `taken` removes.
        self._sent: dict[int, bytes] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def taken(self) -> list[bytes]:
        """Return the requests that have been sent since the last call, all of which are whole, scrubbed."""
        with self._lock:
            sent, self._sent = self._sent, {}
        return [scrubbed(request) for stream in sent.values() for request in requests_in(stream)]

    def close(self) -> None:
        # `close` alone would leave `accept` waiting.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        number = 0
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
                server = socket.socket()
                server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
                server.connect((self._server.host, self._server.port))
                number += 1
                for one, other, connection in ((client, server, number), (server, client, None)):
                    threading.Thread(target=self._pass_on, args=(one, other, connection), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, connection: int | None) -> None:
        """Send on what comes from `source`, and keep it under a connection's number; end both with it."""
        with suppress(OSError):
            while data := source.recv(BUFFER_BYTES):
                if connection is not None:
                    with self._lock:
                        self._sent[connection] = self._sent.get(connection, b"") + data
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        target.close()


@contextmanager
def relay_to(url: str) -> Iterator[Relay]:
    relay = Relay(url)
    try:
        yield relay
    finally:
        relay.close()


def requests_in(stream: bytes) -> Iterator[bytes]:
    """Yield the requests that one connection carried; their bodies have lengths."""
    while stream:
        head = stream.partition(b"\r\n\r\n")[0]
        if b"\ntransfer-encoding:" in head.lower():
            raise ValueError(f"a request without a length cannot be recorded: {head.decode()}")
        length = LENGTH.search(head)
        size = len(head) + 4 + (int(length[2]) if length else 0)
        yield stream[:size]
        stream = stream[size:]


def scrubbed(request: bytes) -> bytes:
    """Return a request with one port and with ids of tool calls that are numbered."""
    head, _, body = request.partition(b"\r\n\r\n")
    numbers: dict[bytes, bytes] = {}
    for match in CALL_ID.finditer(body):
        numbers.setdefault(match[2], b"call_%d" % (len(numbers) + 1))
    body = CALL_ID.sub(lambda match: b'%b"%b"' % (match[1], numbers[match[2]]), body)
    head = re.sub(rb"(?im)^(host: *)[^\r]*", rb"\g<1>" + HOST, head)
    head = LENGTH.sub(rb"\g<1>%d" % len(body), head)
    return head + b"\r\n\r\n" + body
