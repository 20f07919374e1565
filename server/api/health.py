"""`/health`, `/ready` and `/metrics`. All three also answer while the server loads or drains."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from deltastore.errors import PeraxisError
from server.api.service import AnyService, Service
from server.metrics.exposition import CONTENT_TYPE

router = APIRouter()
metrics_router = APIRouter()


@router.get("/health")
async def health(service: AnyService) -> dict[str, str]:
    """Answer 200 if the engine's thread runs its loop or the base still loads; otherwise restart the server."""
    service.check_alive()
    return {"status": "alive"}


@router.get("/ready")
async def ready(service: AnyService) -> dict[str, str]:
    """Answer 200 if requests for tokens are admitted: the base is loaded and the server is not shutting down."""
    service.check_ready()
    return {"status": "ready"}


@metrics_router.get("/metrics")
async def metrics(service: AnyService) -> Response:
    """Return every metric in Prometheus' text format."""
    scrape = partial(service.local_metrics.scrape, service.registry, is_ready=_is_ready(service))
    return Response(await run_in_threadpool(scrape), media_type=CONTENT_TYPE)


def _is_ready(service: Service) -> bool:
    try:
        service.check_ready()
    except PeraxisError:
        return False
    return True
