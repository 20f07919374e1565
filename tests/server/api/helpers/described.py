"""Holds replies against `/openapi.json`: a status or media type that it does not tell of fails the test that got it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import httpx
from fastapi import FastAPI

from server.api import lora_adapters
from server.api.openapi import openapi_document
from server.app import ADMIN_ROUTERS, PUBLIC_ROUTERS


def check_described(reply: httpx.Response) -> None:
    """Check a reply; usable as a hook of httpx's clients. A path or method that is no call is not described.

    A HEAD has the head of what GET answers.
    """
    request = reply.request
    responses = responses_of("GET" if request.method == "HEAD" else request.method, request.url.path)
    if responses is None:
        assert reply.status_code in (307, 404, 405, 413, 431), (
            f"{request.method} {request.url}: {reply.status_code}"
        )
        return
    status, what = str(reply.status_code), f"{request.method} {request.url.path} answers {reply.status_code}"
    assert status in responses, f"{what}, which /openapi.json does not tell"
    media_type = reply.headers.get("content-type", "").partition(";")[0]
    described = {*responses[status].get("content", {"": None})}
    assert media_type in described, f"{what} with {media_type!r}, and /openapi.json tells {described}"


def responses_of(method: str, path: str) -> Mapping[str, Any] | None:
    """Return the described replies of a call; None for a path or method that is none."""
    for pattern, methods in _paths():
        if pattern.fullmatch(path) is not None:
            operation = methods.get(method.lower())
            return None if operation is None else operation["responses"]
    return None


@cache
def document() -> dict[str, Any]:
    """Return the description of all calls of all ports, also of those that need a flag."""
    app = FastAPI(openapi_url=None)
    for router in (*PUBLIC_ROUTERS, lora_adapters.router, *ADMIN_ROUTERS):
        app.include_router(router)
    return openapi_document(app, has_keys=True)


@cache
def _paths() -> list[tuple[re.Pattern[str], dict[str, Any]]]:
    """Return a pattern and the calls of each path; one that begins with fewer parameters comes first."""
    paths: dict[str, dict[str, Any]] = document()["paths"]
    return [
        (re.compile(re.sub(r"\{\w+\}", "[^/]+", path)), methods)
        for path, methods in sorted(paths.items(), key=lambda item: item[0].count("{"))
    ]
