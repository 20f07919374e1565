"""`/openapi.json`: FastAPI's document, completed, and the page `/docs` that shows it.

The page loads nothing from another host: it is FastAPI's, with the files of Swagger UI in fastapi-offline.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from http import HTTPStatus
from importlib.metadata import version
from importlib.resources import files
from typing import Any, get_type_hints

import msgspec
from fastapi import APIRouter, FastAPI, Request, routing
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from server.api.access import ROLES
from server.api.json_io import encode, shared_reply
from server.api.lora_adapters import LoadLoraBody, UnloadLoraBody
from server.api.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    SourceBody,
    TokenizeBody,
)
from server.api.service import Service

PACKAGE = "fastapi-offline"
ASSETS: Mapping[str, str] = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
# The URLs of assets name the package's version, so that an upgrade is seen at once.
CACHED = "public, max-age=604800, immutable"
INLINE_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)

docs_router = APIRouter()


@docs_router.get("/docs")
async def docs_page() -> Response:
    """Show every call of this port, and send calls by hand. Loads nothing from another host."""
    return _page()


@docs_router.get("/docs/{asset}")
async def docs_asset(asset: str) -> Response:
    """Send a file of the page `/docs`."""
    if asset not in ASSETS:
        raise HTTPException(404)
    content = await run_in_threadpool(_content, asset)
    return shared_reply(content, ASSETS[asset], {"Cache-Control": CACHED})


@cache
def _page() -> HTMLResponse:
    script, style = (f"docs/{asset}?v={version(PACKAGE)}" for asset in ASSETS)
    # Relative addresses hold behind a proxy that adds a path, too.
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title="Peraxis",
        swagger_js_url=script,
        swagger_css_url=style,
        swagger_favicon_url="data:,",
        swagger_ui_parameters={"validatorUrl": None, "defaultModelsExpandDepth": -1},
    )
    page.headers["Content-Security-Policy"] = _policy(bytes(page.body).decode())
    return page


def _policy(page: str) -> str:
    """Return a Content-Security-Policy that allows the page's own script and nothing of another host."""
    digests = [hashlib.sha256(script.encode()).digest() for script in INLINE_SCRIPT.findall(page)]
    scripts = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src 'self' {scripts}; connect-src 'self'; img-src 'self' data:; "
        # Swagger UI sets styles of elements.
        "style-src 'self' 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


@cache
def _content(asset: str) -> bytes:
    """Return an asset; each process reads it once."""
    return (files(PACKAGE.replace("-", "_")) / "static" / asset).read_bytes()


Call = tuple[str, str]

JSON = "application/json"
FILE = {"type": "string", "format": "binary"}
FORM = {"type": "object", "required": ["file"], "properties": {"file": FILE}}
TEXT = {"type": "string"}
OBJECT = {JSON: {"schema": {"type": "object"}}}
EVENTS = {"text/event-stream": {"schema": TEXT}}
OBJECT_OR_EVENTS = {**OBJECT, **EVENTS}
PLAIN_TEXT = {"text/plain": {"schema": TEXT}}
ARTIFACT = {"application/octet-stream": {"schema": FILE}}

# JSON bodies that routes parse themselves; those of the others are dependencies of the route.
OWN_BODIES: Mapping[Call, type[msgspec.Struct]] = {
    ("POST", "/generate"): GenerateBody,
    ("POST", "/v1/completions"): CompletionBody,
    ("POST", "/v1/chat/completions"): ChatBody,
    ("POST", "/tokenize"): TokenizeBody,
    ("POST", "/detokenize"): DetokenizeBody,
    ("POST", "/variants"): SourceBody,
    ("POST", "/v1/load_lora_adapter"): LoadLoraBody,
    ("POST", "/v1/unload_lora_adapter"): UnloadLoraBody,
}
# Bodies of other types.
OTHER_BODIES: Mapping[Call, Mapping[str, Any]] = {
    ("POST", "/variants"): {**ARTIFACT, "multipart/form-data": {"schema": FORM}},
}
# Contents of successful replies, by media type, that are not one JSON object; a 304 has none.
REPLIES: Mapping[Call, Mapping[str, Any]] = {
    ("POST", "/generate"): OBJECT_OR_EVENTS,
    ("POST", "/v1/completions"): OBJECT_OR_EVENTS,
    ("POST", "/v1/chat/completions"): OBJECT_OR_EVENTS,
    ("GET", "/metrics"): PLAIN_TEXT,
    ("GET", "/docs"): {"text/html": {"schema": TEXT}},
    ("GET", "/docs/{asset}"): {kind: {"schema": TEXT} for kind in ASSETS.values()},
    ("GET", "/"): {"text/html": {"schema": TEXT}},
    ("GET", "/console/{asset}"): {
        kind: {"schema": TEXT} for kind in ("text/javascript", "text/css", "image/svg+xml")
    },
    ("GET", "/variants/{name}/artifact"): ARTIFACT,
    ("POST", "/v1/load_lora_adapter"): PLAIN_TEXT,
    ("POST", "/v1/unload_lora_adapter"): PLAIN_TEXT,
}
# Statuses of errors that any call may answer: those of its credentials, its parameters, and a server that is busy or
# has failed.
COMMON = (400, 401, 403, 404, 429, 500, 503)
# Those of a call with a body: too slow, too large.
WITH_BODY = (408, 413, 415)
# The others, by route.
MORE: Mapping[Call, Sequence[int]] = {
    ("POST", "/generate"): (409, 413, 424),
    ("POST", "/v1/completions"): (409, 413, 424),
    ("POST", "/v1/chat/completions"): (409, 413, 424),
    ("POST", "/tokenize"): (424,),
    ("POST", "/detokenize"): (424,),
    ("POST", "/variants"): (201, 409, 507),
    ("POST", "/v1/load_lora_adapter"): (409, 424, 507),
    ("PATCH", "/variants/{name}"): (409, 424, 507),
    ("DELETE", "/variants/{name}"): (507,),
    ("POST", "/variants/{name}/load"): (409, 413, 424),
    ("POST", "/variants/{name}/pin"): (409, 413, 424),
    ("PUT", "/tenants/{name}"): (507,),
    ("GET", "/"): (304,),
    ("GET", "/console/{asset}"): (304,),
    ("POST", "/keys"): (201, 507),
    ("DELETE", "/keys/{key_id}"): (507,),
    ("GET", "/variants/{name}/artifact"): (206, 304, 416, 424),
}
# A body that a first try of each call can begin with.
EXAMPLES: Mapping[Call, Mapping[str, Any]] = {
    ("POST", "/generate"): {"prompt": "Hello", "max_new_tokens": 16},
    ("POST", "/v1/completions"): {"model": "base", "prompt": "Hello", "max_tokens": 16},
    ("POST", "/v1/chat/completions"): {
        "model": "base",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 16,
    },
    ("POST", "/tokenize"): {"model": "base", "prompt": "Hello"},
    ("POST", "/detokenize"): {"model": "base", "tokens": [1, 2, 3]},
    ("POST", "/variants"): {"source": "/models/tuned.safetensors"},
    ("PATCH", "/variants/{name}"): {"active": 1},
    ("POST", "/keys"): {"tenant": "acme", "roles": ["inference"]},
    ("PUT", "/tenants/{name}"): {"requests_per_minute": 60},
}
# The groups of calls, by the first part of their paths.
TAGS: Mapping[str, str] = {
    **dict.fromkeys(("generate", "v1", "tokenize", "detokenize"), "inference"),
    "variants": "variants",
    **dict.fromkeys(("keys", "me", "tenants"), "tenants"),
}
OPERATIONS = "operations"


def tag_of(path: str) -> str:
    """Return the group of a call."""
    return TAGS.get(path.split("/")[1], OPERATIONS)


SCHEMAS = "#/components/schemas/"
KEY = "key"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                # A status on vLLM's calls for LoRA adapters.
                "code": {"type": ["string", "integer"]},
            },
        }
    },
}


router = APIRouter()


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """Describe every call of this port in OpenAPI's format."""
    app: FastAPI = request.app
    if app.openapi_schema is None:
        service: Service = app.state.service
        app.openapi_schema = openapi_document(app, has_keys=service.settings.auth == "keys")
        app.state.openapi = encode(app.openapi_schema)
    return shared_reply(app.state.openapi, JSON)


def openapi_document(app: FastAPI, *, has_keys: bool) -> dict[str, Any]:
    """Return the OpenAPI document of an application, as a JSON object.

    Args:
        has_keys: Calls need an API key, except those without a role.
    """
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    calls = [
        (route, (method, str(route.path)))
        for route in routes_of(app)
        for method in sorted(route.methods or ())
    ]
    kinds = {kind for route, call in calls if (kind := _json_body(route, call))}
    _, schemas = msgspec.json.schema_components(kinds, ref_template=SCHEMAS + "{name}")
    # msgspec takes them from a set: sorted, every start has the same document.
    document["components"] = {"schemas": dict(sorted(schemas.items())) | {"Error": ERROR}}
    if has_keys:
        document["components"]["securitySchemes"] = {KEY: {"type": "http", "scheme": "bearer"}}
    for route, call in calls:
        method, path = call
        operation = document["paths"][path][method.lower()]
        operation["tags"] = [tag_of(path)]
        operation["summary"] = _summary(operation["description"])
        if has_keys and ROLES[call] is not None:
            operation["security"] = [{KEY: []}]
        content = _body(route, call)
        if content:
            operation["requestBody"] = {"required": True, "content": content}
        operation["responses"] = _responses(operation["responses"], call, has_body=bool(content))
    return document


def routes_of(app: FastAPI | APIRouter) -> list[Any]:
    """Return the routes of an application with those of its routers, each with `path`, `methods` and `endpoint`."""
    # FastAPI keeps included routers apart from 0.137 on.
    return list(getattr(routing, "iter_route_contexts", iter)(app.routes))


def _summary(description: str) -> str:
    """Return the first sentence of a call's description, which is Markdown, as plain text."""
    return description.partition("\n")[0].partition(". ")[0].rstrip(".").replace("`", "")


def _body(route: Any, call: Call) -> dict[str, Any]:
    """Return the contents of the call's body by media type; none for a call without a body."""
    content: dict[str, Any] = {}
    if (kind := _json_body(route, call)) is not None:
        example = {"example": EXAMPLES[call]} if call in EXAMPLES else {}
        content[JSON] = {"schema": {"$ref": SCHEMAS + kind.__name__}, **example}
    return {**OTHER_BODIES.get(call, {}), **content}


def _responses(known: dict[str, Any], call: Call, *, has_body: bool) -> dict[str, Any]:
    """Return all replies of a call; `known` are those that FastAPI has found."""
    # 422 is FastAPI's validation error, which is answered as the others.
    statuses = {int(status) for status in known} - {422}
    statuses |= {*COMMON, *(WITH_BODY if has_body else ()), *MORE.get(call, ())}
    responses: dict[str, Any] = {}
    for status in sorted(statuses):
        response: dict[str, Any] = {"description": HTTPStatus(status).phrase}
        if status >= HTTPStatus.BAD_REQUEST:
            response["content"] = {JSON: {"schema": {"$ref": SCHEMAS + "Error"}}}
        elif status < HTTPStatus.MULTIPLE_CHOICES:
            response["content"] = REPLIES.get(call, OBJECT)
        responses[str(status)] = response
    return responses


def _json_body(route: Any, call: Call) -> type[msgspec.Struct] | None:
    """Return the type of the call's JSON body, if it has one."""
    for kind in get_type_hints(route.endpoint).values():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return kind
    return OWN_BODIES.get(call)
