"""`--engine inline`: the engine on a thread of the only HTTP process, for debugging. A failed engine ends the server.

Messages pass through ZeroMQ as between processes, without a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Collection
from functools import partial

from deltastore.errors import PeraxisError
from server.api.service import Service
from server.app import serve
from server.engine.main import serve_engine
from server.errors import EngineFailed
from server.frontend.engine_client import EngineClient
from server.frontend.listen import listening_sockets, url_of
from server.frontend.web_server import run_event_loop
from server.log import configure_logging
from server.metrics.local import LocalMetrics
from server.metrics.snapshot import Snapshot
from server.protocol.adapters import AdapterChange, LoadedAdapter, LoadedAdapters
from server.protocol.messages import Resident
from server.protocol.source_job import SourceJob
from server.protocol.stats import ServerStats
from server.settings import Settings
from server.sources.board import SourceBoard
from server.supervisor.signals import first_of, first_signal
from server.tenants.keys import warn_without_keys
from server.tenants.limits.default_limits import with_default_limits
from server.tenants.limits.directory import LimitsDirectory
from server.tenants.limits.ledger import Ledger
from server.tenants.limits.local_link import LocalLink
from server.volume.calls import RegistryCalls
from server.volume.opening import open_registry
from server.volume.probe import probe

log = logging.getLogger(__name__)

ADDRESS = "inproc://engine"


def run_inline(settings: Settings) -> int:
    """Serve in one process until a signal. Return the exit code.

    Raises:
        PeraxisError: a port is taken, the base cannot be loaded, or the engine has failed.
    """
    configure_logging("inline", settings)
    with listening_sockets(settings) as sockets:
        if settings.auth == "keys":
            warn_without_keys(settings.registry)
        return run_event_loop(_serve(settings, sockets))


class OneProcess(LocalLink):
    """A whole server in one process, as its only service asks about it."""

    def __init__(self, metrics: LocalMetrics, engine: EngineClient, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._metrics = metrics
        self._engine = engine
        self._adapters = LoadedAdapters()
        self._board = SourceBoard()

    async def metrics(self) -> Snapshot:
        """Return the metrics."""
        return self._metrics.merged()

    async def forget_variants(self, labels: Collection[str]) -> None:
        """Remove deleted variants from the metrics."""
        self._metrics.forget_variants(labels)

    async def stats(self) -> ServerStats:
        """Return the statistics; without a ready engine no delta is in memory."""
        residents: tuple[Resident, ...] = ()
        with contextlib.suppress(PeraxisError):
            residents = await self._engine.residents()
        return self._metrics.stats(residents)

    async def put_source_job(self, job: SourceJob) -> bool:
        """Keep a state of a job; False for a new one of a tenant that may have no more."""
        return self._board.put(None, job)

    async def find_source_job(self, tenant: str, name: str, job_id: str) -> SourceJob | None:
        """Return the last state of a tenant's job; None if there is none."""
        return self._board.find(tenant, name, job_id)

    async def adapters(self, change: AdapterChange) -> tuple[LoadedAdapter, ...]:
        """Change the record of loaded adapters, and return it."""
        return self._adapters.apply(change)


async def _serve(settings: Settings, sockets: list[socket.socket]) -> int:
    signalled, stopped, stopping = first_signal(), asyncio.Event(), threading.Event()
    registry, metrics, client = open_registry(settings), LocalMetrics(), EngineClient("http")
    settings = with_default_limits(settings)
    calls = RegistryCalls(settings.registry, partial(probe, registry))
    limits = LimitsDirectory(settings.registry, settings.default_limits, calls)
    watching = [asyncio.create_task(calls.watch())]
    if settings.auth == "keys":
        watching.append(asyncio.create_task(limits.watch()))
    whole = OneProcess(metrics, client, Ledger(limits.of))
    service = Service(settings, registry, metrics.frontend, client, whole)
    engine = asyncio.create_task(asyncio.to_thread(serve_engine, settings, ADDRESS, metrics.engine, stopping))
    client.connect(ADDRESS)
    serving = asyncio.create_task(serve(service, sockets, stopped))
    starting = asyncio.create_task(_start(service, client, url_of(sockets[0])))
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


async def _start(service: Service, client: EngineClient, url: str) -> None:
    """Wait until the service can serve, and print one line."""
    facts = await client.welcomed
    await service.start(facts.base)
    print(f"{facts.base.id} is served at {url}", flush=True)
