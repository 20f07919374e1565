"""A web server on uvloop in the tests' process, and a client that sends bytes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from server.connections import Connections
from server.fairness import FairBudget
from server.metrics.metrics import FrontendMetrics
from server.processes import listen
from server.tenants.loop_ledger import NOBODY, Headers, LoopLedger, Turns
from server.web_server import WebServer, run_event_loop
from tests.server.helpers.live_server import WAIT_S
from tests.server.helpers.web_program import hello

App = Callable[..., Awaitable[None]]
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Web:
    """A running web server and the bound of its connections."""

    connections: Connections
    address: tuple[str, int]

    async def connect(self, first: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(first)
        await writer.drain()
        return reader, writer

    async def ask(self, first: bytes = GET) -> tuple[int, bytes]:
        """Send bytes on a new connection; return the status and the body of the reply."""
        reader, writer = await self.connect(first)
        try:
            return await answer(reader)
        finally:
            writer.close()

    def sweep(self, later_s: float) -> None:
        """Close what is late at a time in the future."""
        self.connections.sweep(asyncio.get_running_loop().time() + later_s)


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
    return int(head.split()[1]), await reader.readexactly(int(fields["content-length"]))


def code_of(reply: tuple[int, bytes]) -> tuple[int, str]:
    return reply[0], json.loads(reply[1])["error"]["code"]


def make_turns(owner_of: Callable[[Headers], str], clock: Callable[[], float] = time.monotonic) -> Turns:
    return Turns(LoopLedger(FrontendMetrics().tenant_seconds_total, clock), owner_of)


@asynccontextmanager
async def serving(
    app: App,
    max_connections: int,
    max_unsent: int = 1 << 30,
    *,
    has_keys: bool = False,
    turns: Turns | None = None,
) -> AsyncIterator[Web]:
    with listen("127.0.0.1", 0) as listening:
        unsent = FairBudget(max_unsent, "unsent bytes")
        turns = turns or make_turns(lambda _: NOBODY if has_keys else "default")
        connections = Connections(max_connections, unsent, turns, has_keys=has_keys)
        server = WebServer(app, connections, lifespan=False)
        running = asyncio.create_task(server.serve([listening]))
        try:
            yield Web(connections, listening.getsockname())
        finally:
            server.should_exit = server.force_exit = True
            await running


def talk(
    what: Callable[[Web], Coroutine[Any, Any, None]],
    app: App = hello,
    max_connections: int = 100,
    *,
    has_keys: bool = False,
    turns: Turns | None = None,
) -> None:
    """Run `what` with a web server, both on uvloop."""

    async def main() -> None:
        async with (
            asyncio.timeout(WAIT_S),
            serving(app, max_connections, has_keys=has_keys, turns=turns) as web,
        ):
            await what(web)

    run_event_loop(main())
