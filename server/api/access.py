"""Steps that every HTTP request passes first: its id, the caller of its key, and the role that its route needs.

`authorize` is a dependency of every application, so it runs before a route reads its parameters or its body.

A browser sends what a page asks it to. With keys, a page sends the one that it has, if its origin is allowed, and no
cookies; without, a request is refused if a page of another site caused it (its `Origin` and `Sec-Fetch-Site`), or
one that reached this server under a name of its own, by DNS rebinding (its `Host`).
"""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltastore.errors import shown
from server.api.service import AnyService, Service
from server.errors import Forbidden, InvalidApiKey, InvalidRequest, QueueFull
from server.protocol.request import RequestContext, current_request
from server.settings import Settings
from server.tenants.loop_ledger import NOBODY
from server.tenants.tenant import UNAUTHENTICATED, Caller, Role

# "any": a key with any role of a tenant, so all but `metrics`. None: no key. A request for a route that is not listed
# fails.
ROLES: Mapping[tuple[str, str], Role | Literal["any"] | None] = {
    ("GET", "/health"): None,
    ("GET", "/ready"): None,
    ("GET", "/openapi.json"): None,
    ("GET", "/docs"): None,
    ("GET", "/"): None,
    ("GET", "/console/{asset}"): None,
    ("GET", "/docs/{asset}"): None,
    # Metrics and statistics show the names of all tenants and variants. Prometheus needs no statistics.
    ("GET", "/metrics"): "metrics",
    ("GET", "/stats"): "admin",
    ("GET", "/changes"): "admin",
    ("POST", "/generate"): "inference",
    ("POST", "/v1/completions"): "inference",
    ("POST", "/v1/chat/completions"): "inference",
    ("POST", "/tokenize"): "inference",
    ("POST", "/detokenize"): "inference",
    ("GET", "/v1/models"): "any",
    ("GET", "/v1/models/{model_id}"): "any",
    ("POST", "/variants"): "publish",
    ("GET", "/variants"): "any",
    ("GET", "/variants/{name}"): "any",
    ("PATCH", "/variants/{name}"): "publish",
    ("DELETE", "/variants/{name}"): "publish",
    ("POST", "/variants/{name}/load"): "publish",
    ("POST", "/variants/{name}/unload"): "publish",
    ("POST", "/variants/{name}/pin"): "publish",
    ("POST", "/variants/{name}/unpin"): "publish",
    # A key that an application uses for inference must not give away the weights.
    ("GET", "/variants/{name}/artifact"): "publish",
    # With `--compat vllm-lora` only.
    ("POST", "/v1/load_lora_adapter"): "publish",
    ("POST", "/v1/unload_lora_adapter"): "publish",
    ("GET", "/me"): "any",
    ("GET", "/tenants"): "admin",
    ("PUT", "/tenants/{name}"): "admin",
    ("POST", "/keys"): "admin",
    ("GET", "/keys"): "admin",
    ("DELETE", "/keys/{key_id}"): "admin",
}


# Bound on a query: one that fills a head takes 14 ms to read, and 43 ms where its fields are checked.
MAX_QUERY_BYTES = 4 << 10
# Seconds for which a browser asks no second time whether a page may send a request.
PREFLIGHT_S = 600
# What pages may read of a reply beside its body.
EXPOSED = (
    "X-Request-Id", "X-Peraxis-Variant", "X-Peraxis-Version", "X-Peraxis-Digest", "X-Peraxis-Ignored", "Retry-After",
    *(f"x-ratelimit-{part}-{kind}" for part in ("limit", "remaining", "reset") for kind in ("requests", "tokens")),
)  # fmt: skip


def install_origins(app: FastAPI, settings: Settings) -> None:
    """Let pages of the origins that are allowed send requests with keys, without cookies, and read the replies.

    The application has its handlers of errors already.
    """
    if not settings.allowed_origin:
        return
    rules: dict[str, Any] = {
        "allow_origins": settings.allowed_origin,
        "allow_methods": sorted({"HEAD", *(method for method, _ in ROLES)}),
        "allow_headers": ["*"],
        "expose_headers": EXPOSED,
        "max_age": PREFLIGHT_S,
    }
    app.add_middleware(CORSMiddleware, **rules)
    unexpected: Any = app.exception_handlers[Exception]

    async def on_unexpected(request: Request, error: Exception) -> Any:
        # Starlette sends this reply outside of all middleware.
        return CORSMiddleware(await unexpected(request, error), **rules)

    app.add_exception_handler(Exception, on_unexpected)


async def authorize(request: Request, service: AnyService) -> None:
    """Find the caller of a request and check that its key has the role of the route.

    Raises:
        InvalidApiKey: the route needs a key, and the request has none that is valid.
        Forbidden: the key does not have the route's role; or there are no keys, and the request may be a page's.
        QueueFull: the server has no connection left for the tenant.
        InvalidRequest: the query is too long.
    """
    if len(request.scope["query_string"]) > MAX_QUERY_BYTES:
        raise InvalidRequest(f"the query has more than {MAX_QUERY_BYTES} bytes: send fewer or shorter fields")
    if service.settings.auth == "none":
        _check_host(request, service.settings)
        _check_site(request)
    needed = ROLES[request.method, request.scope["route"].path]
    if needed is None:
        _identify(request, NOBODY)
        return
    caller = await _caller_of(request, service)
    _identify(request, caller.tenant.name)
    # The middleware counts the reply under the tenant's name.
    request.scope["state"].update(caller=caller, tenant=caller.tenant.name)
    allowed = caller.acts_for_tenant() if needed == "any" else caller.has(needed)
    if not allowed:
        role = "inference or publish" if needed == "any" else needed
        raise Forbidden(f"this call needs a key with the role {role}: ask the operator for one")


def _identify(request: Request, tenant: str) -> None:
    """Tell the web server whose connection it is; others' servers do not ask."""
    identify = request.scope["state"].get("identify")
    if identify is not None and not identify(tenant):
        raise QueueFull("the server has as many connections of the tenant as it may: try again in a moment")


def _check_host(request: Request, settings: Settings) -> None:
    """Refuse a name that is not this server's."""
    if settings.allow_unauthenticated and not settings.allowed_host:
        return
    for host in request.headers.getlist("host"):
        name = _host_of(f"//{host}")[0]
        if name not in ("localhost", *settings.allowed_host) and not _is_address(name):
            raise Forbidden(
                f"{shown(name)} is no name of this server: use localhost or an IP address, or start it with "
                "--allowed-host NAME"
            )


def _check_site(request: Request) -> None:
    """Refuse what a page of another origin asks for, but for a link to this server."""
    headers = request.headers
    site = headers.get("sec-fetch-site", "none")
    is_link = request.method == "GET" and headers.get("sec-fetch-dest") == "document"
    is_foreign = site not in ("none", "same-origin") and not is_link
    # A gateway may rewrite Host; the browser has compared the origins itself if it says so.
    if site != "same-origin" and (origin := headers.get("origin")) is not None:
        is_foreign |= _host_of(origin) != _host_of(f"//{headers.get('host', '')}")
    if is_foreign:
        raise Forbidden(
            "a page of another site sent this request, and this server has no keys: send it from a program, or start "
            "the server with --auth keys"
        )


def _host_of(url: str) -> tuple[str, int | None]:
    """Return the host and the port of an URL; no host if it has none."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "", None
    return (parts.hostname or "").rstrip("."), None if port in (80, 443) else port


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _caller_of(request: Request, service: Service) -> Caller:
    if service.settings.auth == "none":
        return UNAUTHENTICATED
    given = _given_keys(request.headers)
    if not given:
        raise InvalidApiKey("this call needs an API key: send it as `Authorization: Bearer KEY`")
    if len(given) > 1:
        raise InvalidApiKey("the request has several API keys that differ: send one")
    return await service.keys.caller(given.pop())


def _given_keys(headers: Headers) -> set[str]:
    given = set(headers.getlist("x-api-key"))
    for value in headers.getlist("authorization"):
        scheme, _, credentials = value.partition(" ")
        if scheme.lower() == "bearer":
            given.add(credentials.strip())
        elif "x-api-key" not in headers:
            # Credentials of another scheme are no key, and never pass as one; beside a key, they are a proxy's.
            given.add("")
    return given


def owner_of(service: Service, headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the tenant that a request's head shows, before it is authorized; NOBODY without a key that is known."""
    if service.settings.auth == "none":
        return UNAUTHENTICATED.tenant.name
    given = _given_keys(Headers(raw=list(headers)))
    return service.keys.known_tenant(given.pop()) or NOBODY if len(given) == 1 else NOBODY


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
        if is_head := scope["method"] == "HEAD":
            # The web server's own scope stays: it sends no body.
            scope = {**scope, "method": "GET"}

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if is_head and message["type"] == "http.response.body":
                return
            if message["type"] == "http.response.start":
                status = message["status"]
                head = MutableHeaders(scope=message)
                head["X-Request-Id"] = request_id
                if ignored := scope["state"].get("ignored"):
                    head["X-Peraxis-Ignored"] = ignored
            await send(message)
            if is_head:
                # At once: nothing of a large or endless body is made, because its reader is gone.
                await send({"type": "http.response.body", "body": b"", "more_body": False})

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
