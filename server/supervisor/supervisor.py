"""The life of a server: listen, keep an engine and HTTP processes running until a signal, drain, exit.

Parses no tenant's byte, so that nothing that a tenant sends can end it. Imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from deltastore.errors import PeraxisError, RegistryUnavailable
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from server.errors import EngineFailed
from server.processes import (
    ChildProcess,
    Restarts,
    exit_of,
    first_of,
    first_signal,
    listening_sockets,
    runtime_directory,
    scratch_directory,
    urls_of,
    with_backend,
)
from server.protocol.control import EngineConfig, EngineLost, EngineStarted, code_digest
from server.protocol.engine_client import EngineClient
from server.protocol.step_page import Record, Suspect, read_record
from server.registry_calls import RegistryCalls, open_registry, probe
from server.settings import Settings
from server.supervisor.http_keeper import HttpKeeper
from server.tenants.keys import warn_without_keys
from server.tenants.limits import LimitsDirectory, with_default_limits

log = logging.getLogger(__name__)

# Between two looks at the engine's signs of life, and at whether pinned versions still exist.
WATCH_S = 1.0
PINS_S = 5.0


# Engines that may die in a row, each after all suspects of the one before were tried and none was at fault.
MAX_UNEXPLAINED = 3
# After as many engines that a version's requests have ended, it is not served any more.
MAX_ENDED_BY_VERSION = 2
# A tenant that has ended as many engines within this time has its suspects tried alone at once.
MAX_ENDED_BY_TENANT, TENANT_WINDOW_S = 2, 600.0


@dataclass(slots=True)
class Suspicion:
    """Finds the requests at which engines die: suspected together, then tried in small groups, then alone.

    Attributes:
        suspects: those that the next engine is to try.
        quarantined: labels of versions whose requests have ended `MAX_ENDED_BY_VERSION` engines.
        num_unexplained: engines that died with several requests since one was found at fault or any has finished.
    """

    suspects: dict[str, Suspect] = field(default_factory=dict)  # by request id
    quarantined: set[str] = field(default_factory=set)
    num_unexplained: int = 0
    _by_version: Counter[str] = field(default_factory=Counter)
    _by_tenant: dict[str, deque[float]] = field(default_factory=dict)

    def engine_died(self, record: Record, now: float) -> tuple[frozenset[str], frozenset[str]]:
        """Take note of an engine's death.

        Args:
            record: the engine's. If it died in no step, nothing is known beyond what was known before.
            now: seconds on any clock.

        Returns:
            The ids of the requests that ended it, and of those that have been in too many steps that ended engines
            together and not in smaller groups.
        """
        step = record.step
        if record.num_finished:
            self.num_unexplained = 0
        if step is None:
            return frozenset(), frozenset()
        is_trial = bool(step.suspects)
        culprits = {each.request_id for each in step.requests if is_trial and len(step.requests) == 1}
        for request in step.requests:
            if request.request_id in culprits:
                self._ended_by(request.tenant, request.version, now)
        waiting = {id_: suspect for id_, suspect in self.suspects.items() if id_ in step.suspects}
        in_step = {request.request_id: Suspect(request, alone=is_trial) for request in step.requests}
        self.suspects = {
            id_: Suspect(suspect.request, suspect.alone or self._is_known(suspect.request.tenant, now))
            for id_, suspect in (waiting | in_step).items()
            if id_ not in culprits
        }
        self.num_unexplained = 0 if culprits else self.num_unexplained + (not is_trial)
        if self.num_unexplained <= MAX_UNEXPLAINED:
            return frozenset(culprits), frozenset()
        self.num_unexplained = 0
        given_up, self.suspects = frozenset(self.suspects), {}
        return frozenset(), given_up

    def _ended_by(self, tenant: str, version: str | None, now: float) -> None:
        self._by_tenant.setdefault(tenant, deque(maxlen=MAX_ENDED_BY_TENANT)).append(now)
        if version is not None:
            self._by_version[version] += 1
            if self._by_version[version] >= MAX_ENDED_BY_VERSION:
                self.quarantined.add(version)

    def _is_known(self, tenant: str, now: float) -> bool:
        """Return whether a tenant has ended several engines lately."""
        ended = self._by_tenant.get(tenant, deque())
        return len(ended) == MAX_ENDED_BY_TENANT and now - ended[0] <= TENANT_WINDOW_S


class EngineKeeper:
    """Runs one engine process after the other.

    Args:
        on_engine: called with the news of each new engine, which still loads its base, and of its death.
    """

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        calls: RegistryCalls,
        directory: Path,
        on_engine: Callable[[EngineStarted | EngineLost], None],
    ) -> None:
        self.client = EngineClient("supervisor")
        self._settings = settings
        self._registry = registry
        self._calls = calls
        self._directory = directory
        self._on_engine = on_engine
        self._restarts = Restarts("the engine", settings.max_restarts, math.inf)
        self._suspicion = Suspicion()
        self._num_started = 0
        # What a new engine is to pin, and whether the engine that runs has pinned all of it.
        self._pins: tuple[VersionRecord, ...] = ()
        self._has_pinned = False

    async def run(self) -> None:
        """Keep an engine running until cancelled; then end it.

        Raises:
            PeraxisError: the base cannot be loaded, or engines die one after the other.
        """
        while True:
            try:
                code = await self._run_one()
            finally:
                self._remember_pins()
                self._on_death()
                self.client.disconnect()
            if not self.client.has_facts:
                raise self._cannot_start(code)
            self._restarts.count_death(code)

    def _cannot_start(self, code: int) -> EngineFailed:
        """Return the error of a first engine that ended without a word."""
        python, hint = self._settings.engine_python, ""
        if python is not None:
            hint = f"; {python} must have vLLM, its plugin and this build of peraxis, or serve with --backend native"
        return EngineFailed(
            f"the engine has ended with {exit_of(code)} before it had loaded the base: its last lines say why{hint}"
        )

    def _on_death(self) -> None:
        """Find out at which requests an engine has died, and tell it."""
        record = read_record(self._page)
        self._page.unlink(missing_ok=True)
        culprits, given_up = self._suspicion.engine_died(record, time.monotonic())
        if record.num_finished or culprits:
            self._restarts.progressed()
        for culprit in culprits:
            log.error("request %s has ended the engine", culprit)
        self._on_engine(EngineLost(tuple(culprits), tuple(given_up), self._quarantined))

    @property
    def _quarantined(self) -> tuple[str, ...]:
        return tuple(self._suspicion.quarantined)

    @property
    def _page(self) -> Path:
        return self._directory / f"engine-{self._num_started}.step"

    async def _run_one(self) -> int:
        """Start an engine and return its exit code when it has ended; kill it when cancelled."""
        self._num_started += 1
        self._has_pinned = False
        address = f"ipc://{self._directory}/engine-{self._num_started}"
        suspects = tuple(self._suspicion.suspects.values())
        own = self._settings.engine_python if self._settings.backend == "vllm" else None
        config = EngineConfig(
            self._settings.model_dump_json(),
            address,
            os.getpid(),
            str(self._page),
            suspects,
            code=None if own is None else code_digest(),
        )
        python = sys.executable if own is None else str(own)
        process = await ChildProcess.start("server.engine.main", config, python=python)
        watching: asyncio.Task[None] | None = None
        try:
            self.client.connect(address)
            self._on_engine(EngineStarted(address, self._quarantined))
            ended = asyncio.ensure_future(process.wait())
            await first_of(ended, self.client.welcomed)
            if self.client.welcomed.done() and self._can_serve():
                watching = asyncio.create_task(self._watch(process))
            return await ended
        finally:
            if watching is not None:
                watching.cancel()
            await process.stop()
            # What it has started may hold the memory that the next one needs.
            process.kill_group()
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)

    def _can_serve(self) -> bool:
        """Return whether the engine has loaded the base; raise its error if the first one has not.

        A later engine may fail because the memory of the one before it is not free yet; its end counts as a death.
        """
        error = self.client.welcomed.exception()
        if error is not None and self._num_started == 1:
            raise error
        if error is not None:
            log.error("the engine cannot start: %s", error)
        return error is None

    async def _watch(self, process: ChildProcess) -> None:
        """Pin what was pinned, unpin what was deleted, and kill an engine whose step hangs."""
        pinning = [self.client.load("pin", record) for record in self._pins]
        for pin in pinning:
            pin.add_done_callback(_log_failure)
        pins_checked_at = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_S)
            # The engine tells its pins after it has answered the calls, so they are read one look later.
            self._remember_pins()
            self._has_pinned = all(pin.done() for pin in pinning)
            now = time.monotonic()
            if now - self.client.last_beat_at > self._settings.step_timeout:
                log.error(
                    "the engine's step has not ended for %g s: it is killed", self._settings.step_timeout
                )
                process.kill()
                return
            if now - pins_checked_at > PINS_S:
                pins_checked_at = now
                await self._unpin_deleted()

    def _remember_pins(self) -> None:
        if self._has_pinned:
            self._pins = self.client.pinned

    async def _unpin_deleted(self) -> None:
        """Unload, and so unpin, versions that were deleted, by this server or by another one on the same registry."""
        try:
            deleted = await self._calls.run(partial(_deleted, self._registry, self.client.pinned), None)
            # Again, because the volume may have vanished in the middle of the first look. Then the second one fails.
            deleted = await self._calls.run(partial(_deleted, self._registry, deleted), None)
        except RegistryUnavailable:
            # The calls' watch logs it. The pins stay.
            return
        except PeraxisError as error:
            log.warning("pinned versions are not checked: %s", error)
            return
        for record in deleted:
            self.client.load("unload", record).add_done_callback(_log_failure)


def _deleted(registry: Registry, records: Collection[VersionRecord]) -> list[VersionRecord]:
    return [record for record in records if not registry.is_live(record)]


def _log_failure(done: asyncio.Future[None]) -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None:
        log.warning("%s", error)


# How much longer than `shutdown_timeout` HTTP processes may take to send their last bytes.
LAST_BYTES_S = 5.0


def supervise(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT, let the requests in flight end, and return the exit code.

    Raises:
        PeraxisError: a port is taken, the base cannot be loaded, or processes die one after the other.
    """
    settings = with_backend(settings)
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

    def _on_engine(self, news: EngineStarted | EngineLost) -> None:
        """Take note of a new engine, or of an engine's end."""
        self._http.announce_engine(news)

    def _on_serving(self) -> None:
        # The engine may have welcomed the HTTP processes and not yet the supervisor.
        self._engine.client.welcomed.add_done_callback(lambda _: self._announce())

    def _announce(self) -> None:
        """Print one line when every HTTP process serves for the first time."""
        client, num_serving = self._engine.client, self._http.num_serving
        if not self._is_announced and client.has_facts and num_serving == self._settings.http_workers:
            self._is_announced = True
            print(f"{client.facts.base.id} is served at {self._urls}", flush=True)
