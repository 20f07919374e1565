"""A TCP proxy on loopback that cuts its first connections in the middle and passes the others on."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

WAIT_S = 240.0


@dataclass(slots=True)
class CuttingProxy:
    """The address to call instead of the server's, and the bytes that each connection sent before its end."""

    url: str
    target: tuple[str, int]
    # Bytes after which the next connections are cut; the ones behind them are not.
    cuts: list[int]
    sent: list[int] = field(default_factory=list)

    def pass_on(self, client: socket.socket) -> None:
        limit = self.cuts.pop(0) if self.cuts else None
        self.sent.append(0)
        number = len(self.sent) - 1
        with client, socket.create_connection(self.target, WAIT_S) as server:
            back = threading.Thread(target=_copy, args=(server, client))
            back.start()
            with suppress(OSError):
                while data := client.recv(65536):
                    if limit is not None:
                        # The server never has the whole body.
                        data = data[: limit - self.sent[number]]
                    self.sent[number] += len(data)
                    server.sendall(data)
                    if limit is not None and self.sent[number] >= limit:
                        # Both ends see a connection that was reset.
                        for end in (client, server):
                            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        break
            for end in (client, server):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)


@contextmanager
def cutting_proxy(host: str, port: int, *cuts: int) -> Iterator[CuttingProxy]:
    """Run a proxy to a server; its first connections are cut after so many bytes each."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        proxy = CuttingProxy(f"http://127.0.0.1:{listening.getsockname()[1]}", (host, port), list(cuts))
        threads: list[threading.Thread] = []

        def accept() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listening.accept()
                    client.settimeout(WAIT_S)
                    threads.append(threading.Thread(target=proxy.pass_on, args=(client,)))
                    threads[-1].start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        yield proxy
        listening.shutdown(socket.SHUT_RDWR)
        accepting.join()
        for thread in threads:
            thread.join()
