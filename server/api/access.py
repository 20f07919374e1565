"""The role that each route needs, and the one place that asks for it. Knows no route's work.

`authorize` is a dependency of every application, so it runs before a route reads its parameters or its body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fastapi import Request

from server.api.service import AnyService, Service
from server.errors import Forbidden, InvalidApiKey
from server.tenants.tenant import UNAUTHENTICATED, Caller, Role

# "any": a key with any role of a tenant, so all but `metrics`. None: no key. A request for a route that is not listed
# fails.
ROLES: Mapping[tuple[str, str], Role | Literal["any"] | None] = {
    ("GET", "/health"): None,
    ("GET", "/ready"): None,
    ("GET", "/openapi.json"): None,
    ("GET", "/docs"): None,
    ("GET", "/docs/{asset}"): None,
    # Metrics and statistics show the names of all tenants and variants. Prometheus needs no statistics.
    ("GET", "/metrics"): "metrics",
    ("GET", "/stats"): "admin",
    ("POST", "/generate"): "inference",
    ("POST", "/v1/completions"): "inference",
    ("POST", "/v1/chat/completions"): "inference",
    ("POST", "/tokenize"): "inference",
    ("POST", "/detokenize"): "inference",
    ("GET", "/v1/models"): "any",
    ("GET", "/v1/models/{model_id}"): "any",
    ("POST", "/variants"): "publish",
    ("GET", "/variants/{name}/sources/{source_id}"): "publish",
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


async def authorize(request: Request, service: AnyService) -> None:
    """Find the caller of a request and check that its key has the role of the route.

    Raises:
        InvalidApiKey: the route needs a key, and the request has none that is valid.
        Forbidden: the key does not have the route's role.
    """
    needed = ROLES[request.method, request.scope["route"].path]
    if needed is None:
        return
    caller = await _caller_of(request, service)
    # The middleware counts the reply under the tenant's name.
    request.scope["state"].update(caller=caller, tenant=caller.tenant.name)
    allowed = caller.acts_for_tenant() if needed == "any" else caller.has(needed)
    if not allowed:
        role = "inference or publish" if needed == "any" else needed
        raise Forbidden(f"this call needs a key with the role {role}: ask the operator for one")


async def _caller_of(request: Request, service: Service) -> Caller:
    if service.settings.auth == "none":
        return UNAUTHENTICATED
    given = set(request.headers.getlist("x-api-key"))
    for value in request.headers.getlist("authorization"):
        scheme, _, credentials = value.partition(" ")
        # Credentials of another scheme are no key, and never pass as one.
        given.add(credentials.strip() if scheme.lower() == "bearer" else "")
    if not given:
        raise InvalidApiKey("this call needs an API key: send it as `Authorization: Bearer KEY`")
    if len(given) > 1:
        raise InvalidApiKey("the request has several API keys that differ: send one")
    return await service.keys.caller(given.pop())
