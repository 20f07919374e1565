"""The web applications of one process, and how they are served."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from importlib.metadata import version

from fastapi import APIRouter, Depends, FastAPI

from server.api import (
    access,
    console,
    errors,
    inference,
    json_io,
    lora_adapters,
    models,
    openapi,
    operations,
    tenants,
    variants,
)
from server.api.access import RequestMiddleware
from server.api.json_io import JsonReply
from server.api.service import Service
from server.tenants.loop_ledger import Turns
from server.web_server import WebServer, make_connections

# Routes for every client.
PUBLIC_ROUTERS: tuple[APIRouter, ...] = (
    inference.generate_router, inference.completions_router, inference.router, models.tokens_router, models.router,
    operations.router, openapi.router, openapi.docs_router, tenants.me_router,
)  # fmt: skip
# Routes that name all tenants' variants or change them. An admin port takes them off the public one.
ADMIN_ROUTERS = (
    variants.router,
    operations.metrics_router,
    operations.stats_router,
    tenants.keys_router,
    tenants.router,
    console.router,
)
# Routes of both ports: a command that is given either address asks if the server is well, who calls it and what it may
# use, and the console of the admin port tries variants.
SHARED_ROUTERS = (
    models.router, tenants.me_router, operations.router, openapi.router, openapi.docs_router,
    inference.completions_router, inference.router, models.tokens_router,
)  # fmt: skip


def create_app(service: Service) -> FastAPI:
    """Return the application of the public port, with the routes of administration unless they have their own port."""
    routers = PUBLIC_ROUTERS
    if service.settings.compat == "vllm-lora":
        # Whatever `admin_port` is: controllers of vLLM call the port that serves a pod's requests.
        routers = (*routers, lora_adapters.router)
    if service.settings.admin_port is None:
        routers = (*routers, *ADMIN_ROUTERS)
    return _application(service, routers)


def create_admin_app(service: Service) -> FastAPI:
    """Return the application of the admin port."""
    return _application(service, (*ADMIN_ROUTERS, *SHARED_ROUTERS))


async def serve(service: Service, listening: list[socket.socket], stopped: asyncio.Event) -> None:
    """Serve until `stopped`, then let the requests in flight end.

    Args:
        service: the state that both applications share.
        listening: the public socket, and the admin port's if there is one.
        stopped: set when the process is to end.
    """
    has_keys = service.settings.auth == "keys"
    turns = Turns(service.loop_ledger, partial(access.owner_of, service))
    connections = make_connections(service.settings.max_connections, service.unsent, turns, has_keys=has_keys)
    apps = (create_app(service), create_admin_app(service))
    ports = zip(apps, connections, listening, strict=False)
    servers = [WebServer(app, bounds, lifespan=False) for app, bounds, _ in ports]
    serving = [
        asyncio.create_task(server.serve([each])) for server, each in zip(servers, listening, strict=True)
    ]
    await stopped.wait()
    # While requests end, the ports still answer: /ready and new requests get 503 `draining`.
    await service.close()
    for server in servers:
        server.should_exit = True
    await asyncio.gather(*serving)


def _application(service: Service, routers: tuple[APIRouter, ...]) -> FastAPI:
    # FastAPI would redirect by a URL that it makes of the Host; `errors.py` names the path alone.
    # FastAPI's own documentation pages load their assets from a CDN.
    app = FastAPI(
        title="Peraxis",
        version=version("peraxis"),
        redirect_slashes=False,
        openapi_url=None,
        default_response_class=JsonReply,
        dependencies=[Depends(access.authorize)],
    )
    app.state.service = service
    errors.install(app)
    access.install_origins(app, service.settings)
    app.add_middleware(RequestMiddleware, service=service)
    json_io.install_bodies(app, service.parsing)
    json_io.install_replies(app, service.unsent)
    for router in routers:
        app.include_router(router)
    return app
