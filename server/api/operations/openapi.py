"""`/openapi.json`: FastAPI's document, with the bodies that routes parse themselves and the statuses of each call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, get_type_hints

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from fastapi.routing import RouteContext, iter_route_contexts

from server.api.json_replies import JsonReply
from server.api.operations.docs_page import ASSETS

SCHEMAS = "#/components/schemas/"
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
FILE = {"type": "string", "format": "binary"}
FORM = {"type": "object", "required": ["file"], "properties": {"file": FILE}}
TEXT = {"type": "string"}
# Bodies that a route reads itself: they are no JSON of one shape, or their errors have another server's.
BODIES: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("POST", "/variants"): {
        "application/octet-stream": {"schema": FILE},
        "multipart/form-data": {"schema": FORM},
    },
    ("POST", "/v1/load_lora_adapter"): {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["lora_name", "lora_path"],
                "properties": {"lora_name": TEXT, "lora_path": TEXT, "load_inplace": {"type": "boolean"}},
            }
        }
    },
    ("POST", "/v1/unload_lora_adapter"): {
        "application/json": {
            "schema": {"type": "object", "required": ["lora_name"], "properties": {"lora_name": TEXT}}
        }
    },
}
OBJECT = {"application/json": {"schema": {"type": "object"}}}
# What calls answer with that is no JSON object.
OTHER_REPLIES: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("GET", "/metrics"): {"text/plain": {"schema": TEXT}},
    ("GET", "/docs"): {"text/html": {"schema": TEXT}},
    ("GET", "/docs/{asset}"): {kind: {"schema": TEXT} for kind in ASSETS.values()},
    ("GET", "/variants/{name}/artifact"): {"application/octet-stream": {"schema": FILE}},
    ("POST", "/v1/load_lora_adapter"): {"text/plain": {"schema": TEXT}},
    ("POST", "/v1/unload_lora_adapter"): {"text/plain": {"schema": TEXT}},
}
# Statuses of errors that any call may answer: those of its credentials, its parameters and a server that is busy.
COMMON = (400, 401, 403, 404, 429, 503)
# Those of a call with a body: too slow, too large.
WITH_BODY = (408, 413)
# The others, by route.
MORE: Mapping[tuple[str, str], Sequence[int]] = {
    ("POST", "/generate"): (409, 413, 424),
    ("POST", "/v1/completions"): (409, 413, 424),
    ("POST", "/v1/chat/completions"): (409, 413, 424),
    ("POST", "/tokenize"): (424,),
    ("POST", "/detokenize"): (424,),
    ("POST", "/variants"): (201, 408, 409, 413, 507),
    ("POST", "/v1/load_lora_adapter"): (409, 424, 507),
    ("PATCH", "/variants/{name}"): (409, 424, 507),
    ("DELETE", "/variants/{name}"): (507,),
    ("POST", "/variants/{name}/load"): (409, 413, 424),
    ("POST", "/variants/{name}/pin"): (409, 413, 424),
    ("PUT", "/tenants/{name}"): (507,),
    ("POST", "/keys"): (201, 507),
    ("DELETE", "/keys/{key_id}"): (507,),
    ("GET", "/variants/{name}/artifact"): (206, 304, 412, 416, 424),
}


router = APIRouter()


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """Describe every call of this port in OpenAPI's format."""
    app: FastAPI = request.app
    if app.openapi_schema is None:
        app.openapi_schema = openapi_document(app)
    return JsonReply(app.openapi_schema)


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of an application, as a JSON object."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    contexts = list(iter_route_contexts(app.routes))
    kinds = {kind for context in contexts for kind in _bodies(context)}
    _, schemas = msgspec.json.schema_components(kinds, ref_template=SCHEMAS + "{name}")
    document["components"] = {"schemas": {**schemas, "Error": ERROR}}
    for context in contexts:
        for method in sorted(context.methods or ()):
            operation = document["paths"][context.path][method.lower()]
            _complete(operation, context, (method, str(context.path)))
    return document


def _complete(operation: dict[str, Any], context: RouteContext, call: tuple[str, str]) -> None:
    """Add the body and the statuses of one call."""
    content: Mapping[str, Any] = BODIES.get(call, {})
    for kind in _bodies(context):
        content = {"application/json": {"schema": {"$ref": SCHEMAS + kind.__name__}}}
    if content:
        operation["requestBody"] = {"required": True, "content": content}
    responses = operation["responses"]
    # FastAPI's own validation errors, which are answered as the others.
    responses.pop("422", None)
    for status in (*COMMON, *(WITH_BODY if content else ()), *MORE.get(call, ())):
        response: dict[str, Any] = {"description": HTTPStatus(status).phrase}
        if status >= HTTPStatus.BAD_REQUEST:
            response["content"] = {"application/json": {"schema": {"$ref": SCHEMAS + "Error"}}}
        responses.setdefault(str(status), response)
    # FastAPI takes a reply without a model for a string.
    for status in responses:
        if status.startswith("2"):
            responses[status]["content"] = OTHER_REPLIES.get(call, OBJECT)


def _bodies(context: RouteContext) -> Iterator[type[msgspec.Struct]]:
    """Yield the type of the route's JSON body, if it has one."""
    for kind in get_type_hints(context.endpoint).values():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield kind
