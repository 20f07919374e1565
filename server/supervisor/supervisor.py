"""The life of a server: listen, start the engine and the HTTP processes, serve until a signal, drain, exit.

Parses no tenant's byte, so that nothing that a tenant sends can end it. Imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial
from pathlib import Path

from server.http.listen import listening_sockets, urls_of
from server.settings import Settings
from server.supervisor.engine_keeper import EngineKeeper
from server.supervisor.http_keeper import HttpKeeper
from server.supervisor.runtime_directory import runtime_directory, scratch_directory
from server.supervisor.signals import first_of, first_signal
from server.tenants.keys import warn_without_keys
from server.tenants.limits.default_limits import with_default_limits
from server.tenants.limits.directory import LimitsDirectory
from server.volume.calls import RegistryCalls
from server.volume.opening import open_registry
from server.volume.probe import probe

log = logging.getLogger(__name__)

# How much longer than `shutdown_timeout` HTTP processes may take to send their last bytes.
LAST_BYTES_S = 5.0


def supervise(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT, let the requests in flight end, and return the exit code.

    Raises:
        PeraxisError: a port is taken, the base cannot be loaded, or processes die one after the other.
    """
    with (
        listening_sockets(settings) as sockets,
        runtime_directory() as runtime,
        scratch_directory() as scratch,
    ):
        log.info("listening at %s: requests get 503 until the base is loaded", urls_of(sockets))
        # Not after the base has loaded, which may take minutes.
        if settings.auth == "keys":
            warn_without_keys(settings.registry)
        return asyncio.run(_supervise(settings, sockets, runtime, scratch))


async def _supervise(settings: Settings, sockets: list[socket.socket], runtime: Path, scratch: Path) -> int:
    stopped = first_signal()
    supervisor = Supervisor(settings, sockets, runtime, scratch)
    running = asyncio.create_task(supervisor.run())
    try:
        await first_of(running, stopped)
        if running.done():
            running.result()
        log.info("shutting down: running requests have %g s to end", settings.shutdown_timeout)
        return await stopped
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await supervisor.close()


class Supervisor:
    """Connects the keepers of the engine and of the HTTP processes."""

    def __init__(
        self, settings: Settings, sockets: list[socket.socket], runtime: Path, scratch: Path
    ) -> None:
        registry = open_registry(settings)
        self._settings = settings = with_default_limits(settings)
        self._urls = urls_of(sockets)
        self._is_announced = False
        calls = RegistryCalls(settings.registry, partial(probe, registry))
        self._engine = EngineKeeper(settings, registry, calls, runtime, self._on_engine)
        limits = LimitsDirectory(settings.registry, settings.default_limits, calls)
        self._http = HttpKeeper(settings, sockets, scratch, self._engine.client, limits.of, self._on_serving)
        self._watching = [asyncio.create_task(calls.watch())]
        if settings.auth == "keys":
            self._watching.append(asyncio.create_task(limits.watch()))
        self._tasks = [asyncio.create_task(keeper.run()) for keeper in (self._engine, self._http)]

    async def run(self) -> None:
        """Wait until a keeper gives up, and raise its error."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def close(self) -> None:
        """Let the HTTP processes end their requests for `shutdown_timeout`, then end all processes."""
        engine, http = self._tasks
        for task in self._watching:
            task.cancel()
        self._http.drain()
        await asyncio.wait({http}, timeout=self._settings.shutdown_timeout + LAST_BYTES_S)
        for task in (http, engine):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _on_engine(self, address: str | None) -> None:
        """Take note of a new engine's address, or of an engine's end."""
        self._http.announce_engine(address)

    def _on_serving(self) -> None:
        # The engine may have welcomed the HTTP processes and not yet the supervisor.
        self._engine.client.welcomed.add_done_callback(lambda _: self._announce())

    def _announce(self) -> None:
        """Print one line when every HTTP process serves for the first time."""
        client, num_serving = self._engine.client, self._http.num_serving
        if not self._is_announced and client.has_facts and num_serving == self._settings.http_workers:
            self._is_announced = True
            print(f"{client.facts.base.id} is served at {self._urls}", flush=True)
