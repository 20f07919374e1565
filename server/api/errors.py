"""From an exception to the one shape of error that clients see: status, code, type. The only table of its kind."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from deltastore.errors import (
    ArtifactError,
    ArtifactTooLarge,
    BaseMismatch,
    CorruptObject,
    PeraxisError,
    StorageFull,
    UsageError,
    VariantNotFound,
    VariantQuarantined,
)
from server.errors import Draining, InvalidRequest, LoadTimeout, QueueFull

log = logging.getLogger(__name__)

CLIENT_GONE = 499  # for the metrics: nobody is there to read the answer


@dataclass(frozen=True, slots=True)
class Failure:
    """How one kind of error is told to a client."""

    status: int
    code: str
    type: str = "invalid_request_error"
    retry_after_s: int | None = None


UNEXPECTED = Failure(500, "internal_error", "server_error")
FAILURES: Mapping[type[PeraxisError], Failure] = {
    VariantNotFound: Failure(404, "model_not_found"),
    InvalidRequest: Failure(400, "invalid_request"),
    UsageError: Failure(400, "invalid_request"),
    ArtifactError: Failure(400, "invalid_artifact"),
    BaseMismatch: Failure(409, "base_mismatch"),
    ArtifactTooLarge: Failure(413, "too_large"),
    StorageFull: Failure(507, "insufficient_storage", "server_error"),
    QueueFull: Failure(503, "overloaded", "server_error", 1),
    Draining: Failure(503, "draining", "server_error", 5),
    LoadTimeout: Failure(503, "load_timeout", "server_error", 5),
    VariantQuarantined: Failure(424, "variant_quarantined"),
    CorruptObject: Failure(424, "variant_quarantined"),
    PeraxisError: UNEXPECTED,  # a part of the server failed: the registry's disk, a step of the engine
}
HTTP_FAILURES: Mapping[int, Failure] = {
    404: Failure(404, "not_found"),
    405: Failure(405, "method_not_allowed"),
    413: Failure(413, "too_large"),
    416: Failure(416, "range_not_satisfiable"),
}


def failure_of(error: PeraxisError) -> Failure:
    """The row of the nearest class in the table."""
    return next(FAILURES[kind] for kind in type(error).__mro__ if kind in FAILURES)


def error_body(error: PeraxisError, request_id: str) -> dict[str, Any]:
    """The document that tells a client of an error; what the server itself did wrong stays in its log."""
    failure = failure_of(error)
    message = str(error)
    if failure is UNEXPECTED:
        log.error("request %s: %s: %s", request_id, type(error).__name__, error)
        message = _unexpected(request_id)
    return _document(failure, message, getattr(error, "param", None))


def install(app: FastAPI) -> None:
    """Make every error that leaves a route, and those of routing itself, take the one shape."""
    app.add_exception_handler(PeraxisError, _on_ours)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(Exception, _on_unexpected)


def request_id_of(request: Request) -> str:
    """The id that the middleware gave the request."""
    return str(request.scope["state"]["request_id"])


async def _on_ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, PeraxisError)
    return _reply(failure_of(error), error_body(error, request_id_of(request)))


async def _on_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    failure = FAILURES[InvalidRequest]
    path = [str(part) for part in first["loc"] if part not in ("query", "path")]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = f"{'.'.join(path)} is no field of this call: leave it out"
    elif path:
        message = f"{'.'.join(path)}: {message}"
    return _reply(failure, _document(failure, message, path[0] if path else None))


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    failure = HTTP_FAILURES.get(error.status_code, Failure(error.status_code, "invalid_request"))
    message = str(error.detail)
    if failure.code in ("not_found", "method_not_allowed"):
        message = (
            f"there is no {request.method} {request.url.path}: see the list of calls in the documentation"
        )
    return _reply(failure, _document(failure, message, None), error.headers)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _on_unexpected(request: Request, error: Exception) -> Response:
    # The framework raises it again for the server's log, past the middleware that adds the id to a reply.
    request_id = request_id_of(request)
    return _reply(
        UNEXPECTED, _document(UNEXPECTED, _unexpected(request_id), None), {"X-Request-Id": request_id}
    )


def _unexpected(request_id: str) -> str:
    return f"the server failed on this request; its log says more under the request id {request_id}"


def _document(failure: Failure, message: str, param: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": failure.type, "param": param, "code": failure.code}}


def _reply(
    failure: Failure, document: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Response:
    retry = {} if failure.retry_after_s is None else {"Retry-After": str(failure.retry_after_s)}
    return Response(
        json.dumps(
            document
        ),  # ASCII alone, so that half a surrogate pair in a client's field name can be told back
        status_code=failure.status,
        headers={**retry, **(headers or {})},
        media_type="application/json",
    )
