"""Map exceptions to HTTP: status, code, type, headers and the one JSON shape of errors.

Owns the only such table.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from deltastore.errors import (
    ActiveVersionChanged,
    ArtifactError,
    ArtifactTooLarge,
    BaseMismatch,
    CorruptObject,
    PeraxisError,
    PublicNameTaken,
    RegistryUnavailable,
    StorageFull,
    UsageError,
    VariantNotFound,
    VariantQuarantined,
)
from server.api.json_io import JsonReply
from server.api.service import http_request_id_of
from server.errors import (
    ContextTooLong,
    Draining,
    EndedEngine,
    EngineRestarted,
    Forbidden,
    InvalidApiKey,
    InvalidRequest,
    KeyNotFound,
    LoadTimeout,
    MaskTimeout,
    QueueFull,
    RateLimited,
    RequestTimeout,
)

log = logging.getLogger(__name__)

# As in nginx: the client closed the connection. Only the metrics show it.
CLIENT_CLOSED_REQUEST = 499


@dataclass(frozen=True, slots=True)
class Failure:
    """The HTTP form of one kind of error."""

    status: int
    code: str
    type: str = "invalid_request_error"
    retry_after_s: int | None = None
    # The rest of the request is not read.
    closes_connection: bool = False
    # The client is told how to authenticate itself.
    wants_key: bool = False
    # Words in front of each message, for clients that look for them.
    prefix: str = ""


UNEXPECTED = Failure(500, "internal_error", "server_error")
FAILURES: Mapping[type[PeraxisError], Failure] = {
    VariantNotFound: Failure(404, "model_not_found"),
    InvalidRequest: Failure(400, "invalid_request"),
    # LiteLLM and LangChain tell it by these words, because openai's exceptions show a message and not its code.
    ContextTooLong: Failure(400, "context_length_exceeded", prefix="prompt is too long: "),
    UsageError: Failure(400, "invalid_request"),
    InvalidApiKey: Failure(401, "invalid_api_key", wants_key=True),
    Forbidden: Failure(403, "forbidden"),
    KeyNotFound: Failure(404, "key_not_found"),
    PublicNameTaken: Failure(409, "name_taken"),
    ActiveVersionChanged: Failure(409, "conflict"),
    ArtifactError: Failure(400, "invalid_artifact"),
    BaseMismatch: Failure(409, "base_mismatch"),
    ArtifactTooLarge: Failure(413, "too_large"),
    # `Retry-After`, because a volume that was away comes back.
    RegistryUnavailable: Failure(503, "registry_unavailable", "server_error", 5),
    StorageFull: Failure(507, "insufficient_storage", "server_error"),
    # `Retry-After` is the error's own.
    RateLimited: Failure(429, "rate_limited", "rate_limit_error"),
    QueueFull: Failure(503, "overloaded", "server_error", 1),
    # The next request of the connection would come here again, whatever stands in front of the servers.
    Draining: Failure(503, "draining", "server_error", 5, closes_connection=True),
    LoadTimeout: Failure(503, "load_timeout", "server_error", 5),
    MaskTimeout: Failure(503, "overloaded", "server_error", 1),
    EndedEngine: Failure(500, "engine_failed", "server_error"),
    EngineRestarted: Failure(503, "engine_restarted", "server_error", 5),
    RequestTimeout: Failure(408, "request_timeout", closes_connection=True),
    VariantQuarantined: Failure(424, "variant_quarantined"),
    CorruptObject: Failure(424, "variant_quarantined"),
    # A part of the server failed, such as the registry's disk or a step of the engine.
    PeraxisError: UNEXPECTED,
}
HTTP_FAILURES: Mapping[int, Failure] = {
    404: Failure(404, "not_found"),
    405: Failure(405, "method_not_allowed"),
    413: Failure(413, "too_large"),
    415: Failure(415, "unsupported_media_type"),
    416: Failure(416, "range_not_satisfiable"),
}


def failure_of(error: PeraxisError) -> Failure:
    """Return the table's entry for an error's class, or for its nearest base class."""
    return next(FAILURES[kind] for kind in type(error).__mro__ if kind in FAILURES)


def is_the_clients(error: BaseException) -> bool:
    """True if the client caused an error, or left before its request was whole."""
    if isinstance(error, PeraxisError):
        return failure_of(error).status < 500
    return isinstance(error, ClientDisconnect)


def error_body(error: PeraxisError, http_request_id: str) -> dict[str, Any]:
    """Return the JSON document of an error. Details of a server failure and paths go to the log, not to the client."""
    failure = failure_of(error)
    message = failure.prefix + error.public
    if failure is UNEXPECTED:
        log.error("request %s: %s: %s", http_request_id, type(error).__name__, error)
        message = _unexpected(http_request_id)
    return _document(failure, message, getattr(error, "param", None))


def install(app: FastAPI) -> None:
    """Install handlers that give every error of routes and of routing the one JSON shape."""
    app.add_exception_handler(PeraxisError, _on_peraxis_error)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_unexpected)


def _limit_headers(error: RateLimited) -> dict[str, str]:
    """Return the headers of a refusal: the time to come again, if there is one, and the tenant's rates."""
    retry = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return {**retry, **(error.rates.headers() if error.rates else {})}


async def _on_peraxis_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PeraxisError)
    headers = _limit_headers(error) if isinstance(error, RateLimited) else {}
    return _reply(failure_of(error), error_body(error, http_request_id_of(request)), headers)


async def _on_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    failure = FAILURES[InvalidRequest]
    path = [str(part) for part in first["loc"] if part not in ("query", "path")]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = f"{'.'.join(path)} is not a field of this call: remove it"
    elif path:
        message = f"{'.'.join(path)}: {message}"
    return _reply(failure, _document(failure, message, path[0] if path else None))


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    failure = HTTP_FAILURES.get(error.status_code, Failure(error.status_code, "invalid_request"))
    if failure.code == "not_found" and (location := _without_last_slash(request)) is not None:
        return Response(status_code=307, headers={"Location": location})
    message = str(error.detail)
    if failure.code in ("not_found", "method_not_allowed"):
        # Not `url.path`: a query that is not in UTF-8 makes no URL.
        call = f"{request.method} {request.scope['path']}"
        message = f"there is no call {call}: see the list of calls in the documentation"
    return _reply(failure, _document(failure, message, None), error.headers)


def _without_last_slash(request: Request) -> str | None:
    """Return the URL of a path without its last slash, if there is a call of that path; None if there is none."""
    path: str = request.scope["path"].rstrip("/")
    scope = {**request.scope, "path": path}
    if path == request.scope["path"] or not path:
        return None
    if all(route.matches(scope)[0] is Match.NONE for route in request.app.routes):
        return None
    raw_path: bytes = request.scope["raw_path"].rstrip(b"/")
    query: bytes = request.scope["query_string"]
    return (raw_path + (b"?" + query if query else b"")).decode("latin-1")


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_unexpected(request: Request, error: Exception) -> Response:
    # Starlette raises the error again for uvicorn's log and skips the middleware that sets this header.
    http_request_id = http_request_id_of(request)
    return _reply(
        UNEXPECTED,
        _document(UNEXPECTED, _unexpected(http_request_id), None),
        {"X-Request-Id": http_request_id},
    )


def _unexpected(http_request_id: str) -> str:
    return f"the server failed on this request: see request id {http_request_id} in its log"


def _document(failure: Failure, message: str, param: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": failure.type, "param": param, "code": failure.code}}


def _reply(
    failure: Failure, document: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Response:
    retry = {} if failure.retry_after_s is None else {"Retry-After": str(failure.retry_after_s)}
    closing = {"Connection": "close"} if failure.closes_connection else {}
    challenge = {"WWW-Authenticate": "Bearer"} if failure.wants_key else {}
    return JsonReply(
        document,
        status_code=failure.status,
        headers={**retry, **closing, **challenge, **(headers or {})},
    )
