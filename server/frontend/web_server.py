"""The web server of one process: uvicorn on uvloop and httptools, with bounded connections. Knows no route."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import uvicorn
import uvloop

from server.fair_budget import FairBudget
from server.frontend.connections import Connections
from server.frontend.http_connection import WebConfig

MAX_ADMIN_CONNECTIONS = 256
# uvicorn's ticks are 0.1 s apart.
TICKS_PER_SWEEP = 10

T = TypeVar("T")


def run_event_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new event loop of uvloop, and return its result."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def make_connections(max_connections: int, unsent: FairBudget) -> tuple[Connections, Connections]:
    """Return the bounds of this process' ports, the public one first, by its file descriptors, too.

    Args:
        max_connections: of the public port.
        unsent: bytes that clients have not read, of both ports.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    public, admin = min(max_connections, soft * 5 // 8), min(MAX_ADMIN_CONNECTIONS, soft // 16)
    return Connections(public, unsent), Connections(admin, unsent)


class WebServer(uvicorn.Server):
    """Serves one application on listening sockets until `should_exit` is set.

    It has no signal handlers: uvicorn's would stop listening before the requests have ended.
    """

    def __init__(self, app: Any, connections: Connections, *, lifespan: bool) -> None:
        """Make a server; `serve([socket])` runs it.

        Args:
            app: the ASGI application.
            connections: the bounds of its port.
            lifespan: run the application's lifespan.
        """
        super().__init__(WebConfig(app, connections, lifespan=lifespan))
        self._connections = connections

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_PER_SWEEP == 0:
            self._connections.sweep(asyncio.get_running_loop().time())
        return await super().on_tick(counter)
