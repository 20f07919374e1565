"""`/openapi.json`: FastAPI's document, completed by what `openapi_calls.py` says of each call."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, get_type_hints

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from fastapi.routing import RouteContext, iter_route_contexts

from server.api.access import ROLES
from server.api.json_replies import encode, shared_reply
from server.api.operations.openapi_calls import (
    COMMON,
    EXAMPLES,
    HEADERS,
    JSON,
    MORE,
    OTHER_BODIES,
    OWN_BODIES,
    WITH_BODY,
    Call,
    content_of,
    tag_of,
)
from server.api.service import Service

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
    contexts = list(iter_route_contexts(app.routes))
    calls = [
        (context, (method, str(context.path)))
        for context in contexts
        for method in sorted(context.methods or ())
    ]
    kinds = {kind for context, call in calls if (kind := _json_body(context, call))}
    _, schemas = msgspec.json.schema_components(kinds, ref_template=SCHEMAS + "{name}")
    # msgspec takes them from a set: sorted, every start has the same document.
    document["components"] = {"schemas": dict(sorted(schemas.items())) | {"Error": ERROR}}
    if has_keys:
        document["components"]["securitySchemes"] = {KEY: {"type": "http", "scheme": "bearer"}}
    for context, call in calls:
        method, path = call
        operation = document["paths"][path][method.lower()]
        operation["tags"] = [tag_of(path)]
        operation["summary"] = _summary(operation["description"])
        if has_keys and ROLES[call] is not None:
            operation["security"] = [{KEY: []}]
        content = _body(context, call)
        if content:
            operation["requestBody"] = {"required": True, "content": content}
        operation["responses"] = _responses(operation["responses"], call, has_body=bool(content))
    return document


def _summary(description: str) -> str:
    """Return the first sentence of a call's description, which is Markdown, as plain text."""
    return description.partition("\n")[0].partition(". ")[0].rstrip(".").replace("`", "")


def _body(context: RouteContext, call: Call) -> dict[str, Any]:
    """Return the contents of the call's body by media type; none for a call without a body."""
    content: dict[str, Any] = {}
    if (kind := _json_body(context, call)) is not None:
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
            response["content"] = content_of(call, status)
        if (call, status) in HEADERS:
            response["headers"] = HEADERS[call, status]
        responses[str(status)] = response
    return responses


def _json_body(context: RouteContext, call: Call) -> type[msgspec.Struct] | None:
    """Return the type of the call's JSON body, if it has one."""
    for kind in get_type_hints(context.endpoint).values():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return kind
    return OWN_BODIES.get(call)
