"""A trivial HTTP server that reads each request and answers `{}`: `python -m bench.hostile.sink`. It checks nothing.

An attack's client that sends here as often as to the server under test shows what it takes of the processors.
"""

from __future__ import annotations

import asyncio
import signal
from typing import cast

import httptools
import uvloop

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


if __name__ == "__main__":
    uvloop.run(_serve())
