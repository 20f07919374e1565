"""The application: connect settings, registry, metrics, engine and routes.

It serves while the engine is still loading, so `/health` answers at once. This file holds no route and no state.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from deltastore.registry import Registry
from server.api import bodies, errors, generate, health, models, variants
from server.api.json_replies import JsonReply
from server.api.middleware import RequestMiddleware
from server.api.service import Backend, BuildBackend, Service
from server.engine.build import build_engine
from server.frontend.listen import listen, raise_descriptor_limit, url_of
from server.metrics.engine import EngineMetrics
from server.metrics.local import LocalMetrics
from server.process import run
from server.settings import Settings


def build_backend(
    settings: Settings,
    registry: Registry,
    metrics: EngineMetrics,
    stopping: threading.Event,
    on_lost: Callable[[], None],
) -> Backend:
    """Load the base and start its engine; arguments and errors are those of `build_engine`."""
    return Backend(*build_engine(settings, registry, metrics, stopping, on_lost))


def create_app(settings: Settings, build: BuildBackend = build_backend) -> FastAPI:
    """Return the server's application; its `state.service` is the service.

    Args:
        settings: the settings of `peraxis serve`.
        build: loads the backend; called on a thread once the application has started.

    Raises:
        RegistryError, StorageFull: the registry's directory cannot be used.
    """
    service = Service(settings, Registry(settings.registry), LocalMetrics(), build)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.close()

    app = _application(service, lifespan)
    for module in (generate, variants, models, health):
        app.include_router(module.router)
    if settings.admin_port is None:
        app.include_router(health.metrics_router)
    return app


def create_admin_app(service: Service) -> FastAPI:
    """Return the application of the admin port, which serves only `/metrics`."""
    app = _application(service, None)
    app.include_router(health.metrics_router)
    return app


def _application(
    service: Service, lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None
) -> FastAPI:
    # A redirect to a path without its last slash would make a client send an upload twice.
    # FastAPI's documentation pages load their assets from a CDN.
    app = FastAPI(
        title="Peraxis",
        version=version("peraxis"),
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None,
        default_response_class=JsonReply,
    )
    app.state.service = service
    app.add_middleware(RequestMiddleware, service=service)
    errors.install(app)
    bodies.install(app)
    return app


def run_server(settings: Settings) -> int:
    """Serve until a signal arrives. Print one line when the base is loaded, and return the exit code."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("server").setLevel(logging.INFO)
    raise_descriptor_limit()
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
            sockets,
            service,
            lambda: print(f"{service.backend.engine.base.id} is served at {url}", flush=True),
        )
