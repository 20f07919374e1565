"""The ingress deployment: the web application of every server, whose engines are replicas of Ray Serve."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

from ray import serve
from ray.serve.handle import DeploymentHandle

# Before anything that imports transformers.
import server.text.without_torch  # noqa: F401

# isort: split
from server.api.service import Service
from server.app import create_app
from server.log import configure_logging
from server.metrics.metrics import FrontendMetrics
from server.registry_calls import open_registry
from server.scale.replica_link import WATCH_S, ReplicaLink
from server.scale.shared import RayStateLink
from server.settings import Settings
from server.shared_state import SharedState
from server.tenants.limits import with_default_limits

log = logging.getLogger(__name__)


@serve.ingress()
class Ingress:
    """One HTTP process.

    Args:
        engines: a handle of the engine deployment.
        shared: a handle of the deployment of `SharedReplica`.
    """

    def __init__(
        self, settings: Settings, engines: DeploymentHandle[Any], shared: DeploymentHandle[Any]
    ) -> None:
        configure_logging("ingress", settings)
        name = serve.get_replica_context().replica_id.to_full_id_str()
        metrics = FrontendMetrics(process=True)
        self._engines = ReplicaLink(name, engines)
        link = RayStateLink(name, shared, metrics)
        registry = open_registry(settings)
        state = cast(SharedState, link.state)
        self._service = Service(with_default_limits(settings), registry, metrics, self._engines, state)
        self._tasks = [
            asyncio.create_task(work) for work in (self._engines.watch(), link.report(), self._start())
        ]

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application; Serve calls this when the replica has been made."""
        return create_app(self._service)

    async def _start(self) -> None:
        """Start the service when the first engine has loaded the base; /ready answers 503 until then."""
        while not self._engines.has_facts:
            await asyncio.sleep(WATCH_S / 4)
        await self._service.start(self._engines.facts.base)

    async def check_health(self) -> None:
        """Raise the error of a background task that has failed; Serve then replaces the replica."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def __del__(self) -> None:
        """Let the requests in flight end and close the service."""
        await self._service.close()
        for task in self._tasks:
            task.cancel()
