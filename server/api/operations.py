"""`/health`, `/ready`, `/metrics`, `/stats` and `/changes`."""

from __future__ import annotations

import asyncio
import sys
from functools import cache, partial
from importlib.metadata import version
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from fastapi.responses import Response

from server.api.json_io import JsonReply, WholeReply
from server.api.schemas import ChangesQuery
from server.api.service import AnyService, Service
from server.metrics.exposition import CONTENT_TYPE, compose, variant_labels
from server.tenants.loop_ledger import timed_on_thread

router = APIRouter()
metrics_router = APIRouter()


@router.get("/health")
async def health(service: AnyService) -> dict[str, str]:
    """Answer 200. While the engine restarts, too: an orchestrator that ended the server would end its uploads."""
    return {"status": "alive"}


@router.get("/ready")
async def ready(service: AnyService) -> dict[str, str]:
    """Answer 200 if requests for tokens are admitted: the base is loaded and the server is not shutting down.

    A registry that cannot be read does not make it 503: all replicas would be taken out of service at once, although
    they serve what is in memory. The field `registry` says it, and whether the registry can only be read.
    """
    service.check_ready()
    failure = service.volume.failure or service.volume.unwritable
    return {"status": "ready", "registry": "ok" if failure is None else failure.public}


@metrics_router.get("/metrics")
async def metrics(service: AnyService) -> Response:
    """Return every metric of all processes in Prometheus' text format."""
    snapshot = await service.shared.metrics()
    # After the snapshot, so that a variant registered meanwhile keeps its series.
    state = await service.registry_scrapes.read(variant_labels(snapshot))
    text = await asyncio.to_thread(timed_on_thread(compose), snapshot, state, is_ready=service.is_ready())
    if state is not None and state.deleted:
        service.metrics.forget_variants(state.deleted)
        await service.shared.forget_variants(tuple(state.deleted))
    return WholeReply(text, media_type=CONTENT_TYPE)


# Packages whose versions tell how a server behaves.
PACKAGES = ("peraxis", "torch", "transformers", "fastapi", "uvicorn", "huggingface-hub")

stats_router = APIRouter()


@stats_router.get("/stats")
async def stats(service: AnyService) -> Response:
    """Show queues, slots, the deltas in memory, uploads and versions of the whole server; totals, and no rates."""
    found = await service.shared.stats()
    return JsonReply({"server": _server(service), **msgspec.to_builtins(found)})


@stats_router.get("/changes")
async def changes(query: Annotated[ChangesQuery, Query()], service: AnyService) -> Response:
    """List the last changes of variants, keys and limits on any server of the registry, newest first."""
    found = await service.volume.run_list(partial(service.audit_log.newest, query.limit), None)
    return JsonReply({"changes": msgspec.to_builtins(found)})


def _server(service: Service) -> dict[str, Any]:
    return {
        "base": service.engine.facts.base.id if service.engine.has_facts else None,
        "ready": service.is_ready(),
        "draining": service.draining,
        "started_at": service.started_at,
        "http_workers": service.settings.http_workers,
        "versions": _versions(),
    }


@cache
def _versions() -> dict[str, str]:
    python = ".".join(map(str, sys.version_info[:3]))
    return {"python": python, **{package: version(package) for package in PACKAGES}}
