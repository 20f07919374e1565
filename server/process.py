"""The server's process: signals and exit code. Runs ASGI applications and knows no route."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import Callable, Mapping
from typing import Any

from server.api.service import Service
from server.errors import EngineFailed
from server.frontend.web_server import WebServer, make_connections, run_event_loop

INTERRUPTED = 130


def run(apps: Mapping[socket.socket, Any], service: Service, on_ready: Callable[[], None]) -> int:
    """Serve until SIGTERM or SIGINT, let the requests in flight end, and return the exit code.

    Args:
        apps: the ASGI application of each listening socket; the first one starts the service.
        service: the service of the applications.
        on_ready: called when the base is loaded.

    Raises:
        PeraxisError: the base could not be loaded, or the device was lost.
    """
    return run_event_loop(_serve(apps, service, on_ready))


def freeze_startup_objects() -> None:
    """Exempt existing objects from garbage collection, whose pass over the model takes longer than several steps."""
    gc.collect()
    gc.freeze()


async def _serve(apps: Mapping[socket.socket, Any], service: Service, on_ready: Callable[[], None]) -> int:
    stopped = _first_signal()
    connections = make_connections(service.settings.max_connections)
    servers = [WebServer(app, connections, lifespan=i == 0) for i, app in enumerate(apps.values())]
    serving = [
        asyncio.create_task(server.serve([listening]))
        for server, listening in zip(servers, apps, strict=True)
    ]
    try:
        return await _watch(service, servers[0], stopped, on_ready)
    finally:
        # While requests end, the ports still answer: /ready and new requests get 503 `draining`.
        await service.close()
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*serving)


async def _watch(
    service: Service, server: WebServer, stopped: asyncio.Future[int], on_ready: Callable[[], None]
) -> int:
    """Wait for the end of the service. Return the exit code, or raise if loading failed or the device was lost."""
    while not server.started:
        await asyncio.sleep(0.01)
    assert service.loading is not None
    await _first_of(service.loading, stopped)
    if service.loading.done():
        service.loading.result()
        freeze_startup_objects()
        on_ready()
        lost = asyncio.create_task(service.lost.wait())
        await _first_of(lost, stopped)
        if lost.done():
            raise EngineFailed("the device is lost: see the log, then start the server again")
    return await stopped


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _first_signal() -> asyncio.Future[int]:
    """Return a future of the first SIGTERM's or SIGINT's exit code. A second signal has its default effect."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()

    def on_signal(code: int) -> None:
        stopped.set_result(code)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    loop.add_signal_handler(signal.SIGTERM, on_signal, 0)
    loop.add_signal_handler(signal.SIGINT, on_signal, INTERRUPTED)
    return stopped
