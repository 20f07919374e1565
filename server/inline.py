"""`--engine inline`: the engine on a thread of the only HTTP process, for debugging. A failed engine ends the server.

Messages pass through ZeroMQ as between processes, without a file.
"""

from __future__ import annotations

import asyncio
import socket
import threading

from deltastore.registry import Registry
from server.api.service import Service
from server.app import serve
from server.engine.main import serve_engine
from server.errors import EngineFailed
from server.frontend.engine_client import EngineClient
from server.frontend.listen import listening_sockets, url_of
from server.frontend.web_server import run_event_loop
from server.log import configure_logging
from server.metrics.local import LocalMetrics
from server.protocol.adapters import AdapterChange, LoadedAdapter, LoadedAdapters
from server.settings import Settings
from server.supervisor.signals import first_of, first_signal

ADDRESS = "inproc://engine"


def run_inline(settings: Settings) -> int:
    """Serve in one process until a signal. Return the exit code.

    Raises:
        PeraxisError: a port is taken, the base cannot be loaded, or the engine has failed.
    """
    configure_logging("inline")
    with listening_sockets(settings) as sockets:
        return run_event_loop(_serve(settings, sockets))


async def _serve(settings: Settings, sockets: list[socket.socket]) -> int:
    signalled, stopped, stopping = first_signal(), asyncio.Event(), threading.Event()
    registry, metrics, client = Registry(settings.registry), LocalMetrics(), EngineClient("http")

    async def exposition(is_ready: bool) -> bytes:
        return await asyncio.to_thread(metrics.scrape, registry, is_ready=is_ready)

    loaded = LoadedAdapters()

    async def adapters(change: AdapterChange) -> tuple[LoadedAdapter, ...]:
        return loaded.apply(change)

    service = Service(settings, registry, metrics.frontend, client, exposition, adapters)
    engine = asyncio.create_task(asyncio.to_thread(serve_engine, settings, ADDRESS, metrics.engine, stopping))
    client.connect(ADDRESS)
    serving = asyncio.create_task(serve(service, sockets, stopped))
    starting = asyncio.create_task(_start(service, url_of(sockets[0])))
    await first_of(signalled, engine, starting)
    error = starting.exception() if starting.done() else None
    if error is None:
        await first_of(signalled, engine)
    starting.cancel()
    stopped.set()
    await serving
    stopping.set()
    code = await engine
    if error is not None:
        raise error
    if not signalled.done():
        raise EngineFailed(f"the engine has ended with code {code}: see the log")
    return signalled.result()


async def _start(service: Service, url: str) -> None:
    """Wait until the service can serve, and print one line."""
    facts = await service.engine.welcomed
    await service.start(facts.base)
    print(f"{facts.base.id} is served at {url}", flush=True)
