"""Middleware of every request: assign its id, count it while it is in flight, count its reply."""

from __future__ import annotations

import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.service import Service
from server.request_context import RequestContext, current_request

log = logging.getLogger(__name__)

REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
# The route label of unknown paths; one label each would let clients create any number of series.
UNMATCHED = "other"
# Routes that orchestrators and scrapers call all the time.
UNLOGGED = ("/health", "/ready", "/metrics")


class RequestMiddleware:
    """ASGI middleware. It keeps a client's `X-Request-Id` that matches `REQUEST_ID` and generates one otherwise."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        # Each request has a task of its own, with a context of its own.
        current_request.set(RequestContext.of(request_id, headers.get("traceparent")))
        began = time.monotonic()
        # The status that is counted when no reply starts.
        status = 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        self.service.num_in_flight += 1
        try:
            await self.app(scope, receive, send_with_id)
        finally:
            self.service.num_in_flight -= 1
            route = getattr(scope.get("route"), "path", UNMATCHED)
            metrics, tenant = self.service.metrics, scope["state"].get("tenant")
            metrics.http_requests_total.labels(route=route, code=str(status)).inc()
            if route not in UNLOGGED:
                _log_reply(scope["method"], route, status, time.monotonic() - began, tenant)
            if tenant is not None:
                metrics.tenant_requests_total.labels(tenant=tenant, code=str(status)).inc()


def _log_reply(method: str, route: str, status: int, seconds: float, tenant: str | None) -> None:
    """Log one line per request, without its query, which is the client's text."""
    fields = {
        "method": method,
        "route": route,
        "status": status,
        "duration_s": round(seconds, 6),
        "tenant": tenant,
    }
    log.info("%s %s %d in %.3f s", method, route, status, seconds, extra={"fields": fields})
