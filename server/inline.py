"""`--engine inline`: the engine on a thread of the only HTTP process, for debugging. A failed engine ends the server.

Messages pass through ZeroMQ as between processes, without a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial

from deltastore.errors import PeraxisError
from server.api.service import Service
from server.app import serve
from server.engine.main import serve_engine
from server.errors import EngineFailed
from server.metrics.aggregator import Aggregator
from server.metrics.metrics import EngineMetrics, FrontendMetrics
from server.processes import first_of, first_signal, listening_sockets, urls_of
from server.protocol.engine_client import EngineClient
from server.protocol.messages import Resident
from server.registry_calls import RegistryCalls, open_registry, probe
from server.settings import Settings
from server.shared_state import COLLECT_S, SharedState
from server.tenants.keys import warn_without_keys
from server.tenants.limits import LimitsDirectory, with_default_limits
from server.tenants.tenant import TenantLimits
from server.web_server import run_event_loop

log = logging.getLogger(__name__)

ADDRESS = "inproc://engine"
# Sources of metrics.
ENGINE, HTTP = "engine", "http"


def run_inline(settings: Settings) -> int:
    """Serve in one process until a signal. Return the exit code.

    Raises:
        PeraxisError: a port is taken, the base cannot be loaded, or the engine has failed.
    """
    with listening_sockets(settings) as sockets:
        log.info("listening at %s: requests get 503 until the base is loaded", urls_of(sockets))
        if settings.auth == "keys":
            warn_without_keys(settings.registry)
        return run_event_loop(_serve(settings, sockets))


class LocalMetrics:
    """The metrics of a server whose engine and HTTP run in one process.

    Args:
        client: of the engine.
    """

    def __init__(self, client: EngineClient) -> None:
        self.engine = EngineMetrics()
        self.frontend = FrontendMetrics(process=True)
        self._client = client

    def shared_state(self, limits_of: Callable[[str], TenantLimits]) -> SharedState:
        """Return the shared state of the server."""
        shared = SharedState(self, limits_of)
        for source in (ENGINE, HTTP):
            shared.aggregator.started(source)
        return shared

    async def collect(self, aggregator: Aggregator) -> None:
        """Give the aggregator new snapshots."""
        aggregator.received(ENGINE, self.engine.snapshot())
        aggregator.received(HTTP, self.frontend.snapshot())

    async def residents(self) -> Sequence[Resident]:
        """Return the deltas in memory; without a ready engine, none."""
        with contextlib.suppress(PeraxisError, TimeoutError):
            return await asyncio.wait_for(self._client.residents(), COLLECT_S)
        return ()

    async def forget_variants(self, labels: tuple[str, ...]) -> None:
        """Have the engine forget deleted variants."""
        self.engine.forget_variants(labels)


async def _serve(settings: Settings, sockets: list[socket.socket]) -> int:
    signalled, stopped, stopping = first_signal(), asyncio.Event(), threading.Event()
    registry, client = open_registry(settings), EngineClient("http")
    metrics = LocalMetrics(client)
    settings = with_default_limits(settings)
    calls = RegistryCalls(settings.registry, partial(probe, registry))
    limits = LimitsDirectory(settings.registry, settings.default_limits, calls)
    watching = [asyncio.create_task(calls.watch())]
    if settings.auth == "keys":
        watching.append(asyncio.create_task(limits.watch()))
    shared = metrics.shared_state(limits.of)
    service = Service(settings, registry, metrics.frontend, client, shared)
    engine = asyncio.create_task(asyncio.to_thread(serve_engine, settings, ADDRESS, metrics.engine, stopping))
    client.connect(ADDRESS)
    serving = asyncio.create_task(serve(service, sockets, stopped))
    starting = asyncio.create_task(_start(service, client, urls_of(sockets)))
    await first_of(signalled, engine, starting)
    error = starting.exception() if starting.done() else None
    if error is None:
        await first_of(signalled, engine)
    if signalled.done():
        log.info("shutting down: running requests have %g s to end", settings.shutdown_timeout)
    starting.cancel()
    for task in watching:
        task.cancel()
    stopped.set()
    await serving
    stopping.set()
    code = await engine
    if error is not None:
        raise error
    if not signalled.done():
        raise EngineFailed(f"the engine has ended with code {code}: see the log")
    return signalled.result()


async def _start(service: Service, client: EngineClient, urls: str) -> None:
    """Wait until the service can serve, and print one line."""
    facts = await client.welcomed
    await service.start(facts.base)
    print(f"{facts.base.id} is served at {urls}", flush=True)
