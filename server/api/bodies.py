"""Read JSON bodies: at most `MAX_BYTES`, parsed strictly. Knows no route."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from server.errors import InvalidRequest

MAX_BYTES = 8 << 20

M = TypeVar("M", bound=BaseModel)


def json_body(model: type[M]) -> Callable[[Request], Awaitable[M]]:
    """Return a dependency that parses the body as a `model`.

    FastAPI's own body parameters read a body of any size into memory. The dependency raises InvalidRequest for another
    media type, RequestValidationError for an invalid body, and HTTPException 413 for one that is too large.
    """

    async def parse(request: Request) -> M:
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise InvalidRequest(
                f"the body has {f'type {media_type}' if media_type else 'no type'}: "
                "send one JSON object as application/json",
                "Content-Type",
            )
        try:
            return model.model_validate_json(await _read(request))
        except ValidationError as error:
            raise RequestValidationError(error.errors(include_url=False)) from error

    return parse


async def _read(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BYTES:
            raise HTTPException(413, f"the body is larger than {MAX_BYTES} bytes: split the request")
    return bytes(body)
