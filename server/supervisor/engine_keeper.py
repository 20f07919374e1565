"""Keeps an engine process running: starts it, pins what was pinned, watches its steps, starts it again."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from deltastore.errors import PeraxisError, RegistryUnavailable
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from server.http.engine_client import EngineClient
from server.protocol.processes import EngineConfig
from server.settings import Settings
from server.supervisor.child_process import ChildProcess
from server.supervisor.restarts import Restarts
from server.supervisor.signals import first_of
from server.volume.calls import RegistryCalls

log = logging.getLogger(__name__)

# Between two looks at the engine's signs of life, and at whether pinned versions still exist.
WATCH_S = 1.0
PINS_S = 5.0


class EngineKeeper:
    """Runs one engine process after the other.

    Args:
        on_engine: called with the address of each new engine, which still loads its base, and with None when it dies.
    """

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        calls: RegistryCalls,
        directory: Path,
        on_engine: Callable[[str | None], None],
    ) -> None:
        self.client = EngineClient("supervisor")
        self._settings = settings
        self._registry = registry
        self._calls = calls
        self._directory = directory
        self._on_engine = on_engine
        self._restarts = Restarts("the engine", settings.max_restarts)
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
                self._on_engine(None)
                self.client.disconnect()
            self._restarts.count_death(code)

    async def _run_one(self) -> int:
        """Start an engine and return its exit code when it has ended; kill it when cancelled."""
        self._num_started += 1
        self._has_pinned = False
        address = f"ipc://{self._directory}/engine-{self._num_started}"
        config = EngineConfig(self._settings.model_dump_json(), address, os.getpid())
        process = await ChildProcess.start("server.engine.main", config)
        watching: asyncio.Task[None] | None = None
        try:
            self.client.connect(address)
            self._on_engine(address)
            ended = asyncio.ensure_future(process.wait())
            await first_of(ended, self.client.welcomed)
            if self.client.welcomed.done() and self._can_serve():
                watching = asyncio.create_task(self._watch(process))
            return await ended
        finally:
            if watching is not None:
                watching.cancel()
            await process.stop()
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
