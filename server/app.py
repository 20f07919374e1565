"""The application: registry, metrics, engine and routes put together. While the engine is built, /health answers."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from deltastore.registry import Registry
from server.api import errors, generate, health, models, variants
from server.api.middleware import RequestMiddleware
from server.api.service import Backend, Service
from server.engine.build import BuildConfig, build_engine
from server.metrics import Metrics
from server.process import listen, run, url_of
from server.settings import Settings

Build = Callable[[Settings, Registry, Metrics, threading.Event], Backend]


def build_backend(
    settings: Settings, registry: Registry, metrics: Metrics, stopping: threading.Event
) -> Backend:
    """Load the base and start its engine; takes as long as reading the checkpoint. `stopping` ends it sooner."""
    config = BuildConfig(
        base_dir=settings.base,
        device=settings.device,
        dtype=settings.dtype,
        num_slots=settings.max_gpu_deltas,
        slot_headroom=settings.slot_headroom,
        host_cache_bytes=settings.max_host_cache_bytes,
        kv_cache_bytes=settings.kv_cache_bytes,
        max_num_seqs=settings.max_num_seqs,
        max_batch_tokens=settings.max_batch_tokens,
        max_queue=settings.max_queue,
        load_timeout_s=settings.load_timeout,
        max_model_len=settings.max_model_len,
        num_load_threads=settings.load_threads,
    )
    return Backend(*build_engine(config, registry, metrics, stopping))


def create_app(settings: Settings, build: Build = build_backend) -> FastAPI:
    """The server's application; its `state.service` is the service.

    Args:
        build: makes the backend on a thread, once the application has started.

    Raises:
        RegistryError, StorageFull: the registry's directory cannot be used.
    """
    metrics = Metrics(CollectorRegistry())
    service = Service(settings, Registry(settings.registry), metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start(lambda: build(settings, service.registry, metrics, service.stopping))
        yield
        await service.close()

    app = _application(service, lifespan)
    for module in (generate, variants, models, health):
        app.include_router(module.router)
    if settings.admin_port is None:
        app.include_router(health.metrics_router)
    return app


def create_admin_app(service: Service) -> FastAPI:
    """The application of the admin port: /metrics alone."""
    app = _application(service, None)
    app.include_router(health.metrics_router)
    return app


def _application(
    service: Service, lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None
) -> FastAPI:
    # No redirect to a path without its last slash: a client would send an upload twice. No pages from a CDN.
    app = FastAPI(
        title="Peraxis",
        version=version("peraxis"),
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None,
    )
    app.state.service = service
    app.add_middleware(RequestMiddleware, service=service)
    errors.install(app)
    return app


def run_server(settings: Settings) -> int:
    """Run until a signal ends it; prints one line when it is ready. Returns the exit code."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("server").setLevel(logging.INFO)
    app = create_app(settings)
    service = app.state.service
    with ExitStack() as stack:
        sockets = {stack.enter_context(listen(settings.host, settings.port)): app}
        if settings.admin_port is not None:
            sockets[stack.enter_context(listen(settings.host, settings.admin_port))] = create_admin_app(
                service
            )
        url = url_of(next(iter(sockets)))
        return run(
            sockets, service, lambda: print(f"{service.engine.base.id} is served at {url}", flush=True)
        )
