"""The application of an HTTP process in the tests' process, asked without a socket, with or without an engine."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import tests.helpers.short_idle  # noqa: F401
from server.api.service import Service
from server.app import create_app
from server.engine.main import serve_engine
from server.inline import LocalMetrics
from server.protocol.engine_client import EngineClient
from server.registry_calls import open_registry
from server.settings import Settings
from server.tenants.limits import LimitsDirectory

WAIT_S = 240.0
_numbers = itertools.count()


def make_service(
    settings: Settings, metrics: LocalMetrics | None = None, client: EngineClient | None = None
) -> Service:
    """Make a service whose engine is not connected; needs a running event loop."""
    registry, engine = open_registry(settings), client or EngineClient("test")
    local = metrics or LocalMetrics(engine)
    limits = LimitsDirectory(settings.registry, settings.default_limits)
    return Service(settings, registry, local.frontend, engine, local.shared_state(limits.of))


@dataclass(slots=True)
class HttpApp:
    """A running application."""

    service: Service
    client: httpx.AsyncClient
    metrics: LocalMetrics
    settings: Settings
    engine_client: EngineClient
    is_started: bool = False

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[None]:
        """Run an engine on a thread, connected to the service."""
        address, stopping = f"inproc://app-{next(_numbers)}", threading.Event()
        serving = asyncio.create_task(
            asyncio.to_thread(
                serve_engine, self.settings, address, self.metrics.engine, stopping, on_built=lambda: None
            )
        )
        self.engine_client.connect(address)
        try:
            facts = await self.engine_client.welcomed
            # Once, as an HTTP process does, whatever the number of engines.
            if not self.is_started:
                await self.service.start(facts.base)
                self.is_started = True
            yield
        finally:
            self.engine_client.disconnect()
            stopping.set()
            await serving


@asynccontextmanager
async def running_app(settings: Settings) -> AsyncIterator[HttpApp]:
    """Serve the public application, without an engine at first."""
    engine = EngineClient("test")
    metrics = LocalMetrics(engine)
    service = make_service(settings, metrics, engine)
    transport = httpx.ASGITransport(create_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        try:
            yield HttpApp(service, client, metrics, settings, engine)
        finally:
            await service.close()


def settings_of(base: Any, registry: Any, **given: Any) -> Settings:
    """Return settings of a small server on `base`."""
    small = {
        "device": "cpu", "dtype": "float32", "max_gpu_deltas": 2, "max_host_cache_gb": 0, "max_num_seqs": 4,
        "max_model_len": 256, "shutdown_timeout": 5,
    }  # fmt: skip
    return Settings(base=base, registry=registry, **{**small, **given})


def with_engine(
    base: Path, registry: Path, talk: Callable[[HttpApp], Awaitable[None]], **options: object
) -> None:
    """Run an application with an engine and settings, and let `talk` send requests to it."""

    async def main() -> None:
        async with running_app(settings_of(base, registry, **options)) as app, app.engine():
            await asyncio.wait_for(talk(app), WAIT_S)

    asyncio.run(main())
