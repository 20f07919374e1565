"""What surrounds every request: its id, the count of those in flight, and the metrics of the reply."""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.service import Service

REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
UNMATCHED = "other"  # the route label of paths that are none, of which callers can invent any number


class RequestMiddleware:
    """Names each request and counts it. A client's own id is taken over when it is short and printable."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        status = 500  # what a reply that never begins amounts to

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
            if tenant is not None:
                metrics.tenant_requests_total.labels(tenant=tenant, code=str(status)).inc()
