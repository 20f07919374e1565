"""The state that routes share: settings, registry, metrics, and the engine once the base is loaded.

Owns the life of a server: loading, ready, draining, closed. Defines no route.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ParamSpec, TypeVar

import anyio.to_thread
from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from deltastore.registry import Registry
from server.api.artifacts.checks import ArtifactChecks
from server.api.background import BackgroundThreads
from server.engine.engine import Engine
from server.errors import Draining, EngineFailed, QueueFull
from server.metrics.engine import EngineMetrics
from server.metrics.local import LocalMetrics
from server.settings import Settings
from server.tenants import DEFAULT_TENANT, Tenant
from server.text.tokenizer import Tokenizers

log = logging.getLogger(__name__)

POLL_S = 0.02
UPLOAD_THREADS = 8
DOWNLOAD_THREADS = 2
ENGINE_STUCK = "the engine does not answer: restart the server"

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, eq=False)
class Backend:
    """The parts that exist once the base is loaded."""

    engine: Engine
    tokenizers: Tokenizers


# Loads the base; its arguments are those of `build_engine`.
BuildBackend = Callable[[Settings, Registry, EngineMetrics, threading.Event, Callable[[], None]], Backend]


class Service:
    """State of one server: loading, then ready, then draining. Use it on the event loop only."""

    def __init__(
        self, settings: Settings, registry: Registry, metrics: LocalMetrics, build: BuildBackend
    ) -> None:
        self.settings = settings
        self.registry = registry
        self.local_metrics = metrics
        self.metrics = metrics.frontend
        self.started_at = time.time()  # seconds since 1970
        self.num_in_flight = 0  # HTTP requests
        self.num_uploads: Counter[str] = Counter()  # under way, by tenant
        self.artifact_checks = ArtifactChecks(settings.base)
        self.draining = False
        self.loading: asyncio.Task[None] | None = None
        # Set when the device is lost, and with it every request.
        self.lost = asyncio.Event()
        self._build = build
        self._stop_loading = threading.Event()
        self._backend: Backend | None = None
        self._closed = False
        self.downloads = BackgroundThreads(DOWNLOAD_THREADS, "download")
        self._background = BackgroundThreads(UPLOAD_THREADS, "upload")

    def start(self) -> None:
        """Start to load the backend on a thread; the task `loading` ends when it is loaded, or raises."""
        self.loading = asyncio.create_task(self._load())

    async def _load(self) -> None:
        loop = asyncio.get_running_loop()

        def on_lost() -> None:
            loop.call_soon_threadsafe(self.lost.set)

        metrics = self.local_metrics.engine
        build = partial(self._build, self.settings, self.registry, metrics, self._stop_loading, on_lost)
        self._backend = await anyio.to_thread.run_sync(build, abandon_on_cancel=True)
        if self.draining:
            self._backend.engine.drain()

    async def run_in_background(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a long computation on a low-priority thread. A cancelled caller still waits until it has ended."""
        return await self._background.run(function, *args, **kwargs)

    @property
    def backend(self) -> Backend:
        """The loaded backend; raises QueueFull while the base loads, or Draining."""
        if self._backend is None:
            self.check_admitting()
            raise QueueFull("the base is still loading: try again when /ready answers 200")
        return self._backend

    def check_admitting(self) -> None:
        """Raise Draining once shutdown has begun."""
        if self.draining:
            raise Draining("the server is shutting down: send the request to another replica")

    def check_ready(self) -> None:
        """Raise Draining, QueueFull or EngineFailed unless requests for tokens are admitted."""
        self.check_admitting()
        if not self.backend.engine.alive():
            raise EngineFailed(ENGINE_STUCK)

    def check_alive(self) -> None:
        """Raise EngineFailed if the engine's thread no longer runs its loop. A server that loads is alive."""
        if self._backend is not None and not self._backend.engine.alive():
            raise EngineFailed(ENGINE_STUCK)

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True
        self._stop_loading.set()
        if self._backend is not None:
            self._backend.engine.drain()

    async def close(self) -> None:
        """Drain, give requests `shutdown_timeout` seconds to end, then end the rest and stop the engine."""
        self.drain()
        timeout = self.settings.shutdown_timeout
        deadline = time.monotonic() + timeout
        if self.loading is not None:
            await asyncio.wait({self.loading}, timeout=timeout)
            _log_failed_loading(self.loading)
        if self._backend is not None and not self._closed:
            self._closed = True
            await run_in_threadpool(self._backend.engine.close, max(0.0, deadline - time.monotonic()))
            while self.num_in_flight and time.monotonic() < deadline:
                await asyncio.sleep(POLL_S)
            await run_in_threadpool(self._backend.tokenizers.close)
        await self.artifact_checks.close()


def _log_failed_loading(loading: asyncio.Task[None]) -> None:
    error = loading.exception() if loading.done() and not loading.cancelled() else None
    if error is not None and not isinstance(error, Draining):
        log.error("the base could not be loaded: %s", error)


async def service_of(request: Request) -> Service:
    """Return the service of the request's application."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


async def admitting_service(service: Annotated[Service, Depends(service_of)]) -> Service:
    """Return the service; raise Draining once shutdown has begun."""
    service.check_admitting()
    return service


async def tenant_of(request: Request) -> Tenant:
    """Return the tenant of a request. The middleware counts the reply under its name."""
    request.scope["state"]["tenant"] = DEFAULT_TENANT.name
    return DEFAULT_TENANT


# AnyService also serves requests during shutdown; ServiceDep refuses them with Draining.
AnyService = Annotated[Service, Depends(service_of)]
ServiceDep = Annotated[Service, Depends(admitting_service)]
TenantDep = Annotated[Tenant, Depends(tenant_of)]
