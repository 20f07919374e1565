"""`/health`, `/ready` and `/metrics`. All three also answer while the server loads or drains."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool

from server.api.service import AnyService, Service
from server.metrics import OTHER

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
    text = await run_in_threadpool(_exposition, service)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def _exposition(service: Service) -> bytes:
    """Read the registry's state anew, because other servers change it too, then render every metric."""
    metrics = service.metrics
    labels = metrics.variant_labels()
    usage, variants = service.registry.usage(), service.registry.variants()
    metrics.registry_objects.set(usage.num_objects)
    metrics.registry_bytes.set(usage.num_bytes)
    metrics.registry_free_bytes.set(usage.free_bytes)
    metrics.registry_quarantined.set(usage.num_quarantined)
    metrics.variant_active_version.clear()
    for variant in variants:
        label = metrics.variant_label(variant.tenant, variant.name)
        if variant.active is not None and label != OTHER:
            metrics.variant_active_version.labels(variant=label).set(variant.active)
    live = {(variant.tenant, variant.name) for variant in variants}
    # `labels` is older than `variants`, so that a variant registered in between keeps its series.
    for tenant, name in labels - live:
        metrics.forget_variant(tenant, name)
    return generate_latest(metrics.registry)
