"""`GET /stats`: the state of the whole server as one JSON document."""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response

from server.api.json_replies import JsonReply
from server.api.service import AnyService, Service
from server.protocol.shared_calls import GetStats

# Packages whose versions tell how a server behaves.
PACKAGES = ("peraxis", "torch", "transformers", "fastapi", "uvicorn", "huggingface-hub")

router = APIRouter()


@router.get("/stats")
async def stats(service: AnyService) -> Response:
    """Show queues, slots, the deltas in memory, uploads and versions of the whole server; totals, and no rates."""
    found = await service.shared.ask(GetStats())
    return JsonReply({"server": _server(service), **msgspec.to_builtins(found)})


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
