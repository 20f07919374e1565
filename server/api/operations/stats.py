"""`GET /stats`: the state of the whole server as JSON, or every second as server-sent events."""

from __future__ import annotations

import sys
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from server.api.json_replies import JsonReply, server_sent_event
from server.api.service import AnyService, Service
from server.errors import QueueFull
from server.frontend.feed import Feed

EVENT_STREAM = "text/event-stream"
INTERVAL_S = 1.0
# Listeners of one HTTP process.
MAX_LISTENERS = 64
# Packages whose versions tell how a server behaves.
PACKAGES = ("peraxis", "torch", "transformers", "fastapi", "uvicorn", "huggingface-hub")

router = APIRouter()


def install(app: FastAPI, service: Service) -> None:
    """Give the application's listeners one feed."""
    app.state.stats_feed = Feed(partial(_event, service), lambda: service.draining, INTERVAL_S)


@router.get("/stats")
async def stats(request: Request, service: AnyService) -> Response:
    """Show queues, slots, the deltas in memory with their rates, uploads and versions of the whole server."""
    if EVENT_STREAM not in request.headers.get("accept", ""):
        return JsonReply(await _document(service))
    service.check_admitting()
    feed: Feed = request.app.state.stats_feed
    if feed.num_listeners >= MAX_LISTENERS:
        raise QueueFull(f"{MAX_LISTENERS} clients listen to this process's statistics: poll /stats instead")
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(feed.listen(), headers=headers, media_type=EVENT_STREAM)


async def _event(service: Service) -> bytes:
    return server_sent_event("stats", await _document(service))


async def _document(service: Service) -> dict[str, Any]:
    whole = await service.whole.stats()
    return {"server": _server(service), **msgspec.to_builtins(whole)}


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
