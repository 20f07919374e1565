"""Read request bodies: in time, JSON strictly and within a bound on the bytes of all bodies. Knows no route."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException

from deltastore.errors import shown
from server.errors import InvalidRequest, QueueFull, RequestTimeout

JSON = "application/json"
# Of one JSON body.
MAX_BYTES = 8 << 20
# Of all JSON bodies that are being read, beyond the first `FREE_BYTES` of each: small requests are always read.
MAX_READING_BYTES = 128 << 20
FREE_BYTES = 64 << 10
# A JSON body must be complete after this time.
JSON_S = 120.0
# Each `SLOW_S` of waiting for a client must bring `SLOW_BYTES` of its body, or the end: 4 KiB/s.
SLOW_S = 30.0
SLOW_BYTES = 120 << 10

MISSING_FIELD = re.compile(r"Object missing required field `(.*?)`(?: - at `\$\.?(.*)`)?", re.DOTALL)
UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$(.*)`)?", re.DOTALL)
# Fields of other APIs, with the name that one has in a call of this server.
OTHER_NAMES = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
AT = re.compile(r"(.*) - at `\$\.?(.*)`", re.DOTALL)

B = TypeVar("B", bound=msgspec.Struct)


class BodyBudget:
    """Bytes that the JSON bodies of one process may take while they are read."""

    def __init__(self, num_bytes: int) -> None:
        self._free = num_bytes

    def take(self, num_bytes: int) -> None:
        """Reserve bytes; raise QueueFull if they are not free."""
        if num_bytes > self._free:
            raise QueueFull("the server is reading too many large bodies: try again in a moment")
        self._free -= num_bytes

    def give_back(self, num_bytes: int) -> None:
        self._free += num_bytes


def install(app: FastAPI, num_bytes: int = MAX_READING_BYTES) -> None:
    """Give the application's JSON bodies a budget of bytes."""
    app.state.body_budget = BodyBudget(num_bytes)


def json_body(kind: type[B]) -> Callable[[Request], Awaitable[B]]:
    """Return a dependency that parses the body as a `kind`.

    FastAPI's own body parameters read a body of any size, for any time, into memory. msgspec stops at the first error,
    so that a hostile body costs no more than an honest one of its size.

    The dependency raises InvalidRequest for another media type or an invalid body, RequestTimeout for a slow one,
    QueueFull when too many bytes of bodies are being read, and HTTPException 413 for a body that is too large.
    """
    decoder = msgspec.json.Decoder(kind)

    async def parse(request: Request) -> B:
        _check_headers(request)
        budget: BodyBudget = request.app.state.body_budget
        body, taken = bytearray(), 0
        try:
            async with aclosing(timed_chunks(request, JSON_S)) as chunks:
                async for chunk in chunks:
                    body += chunk
                    _check_size(len(body))
                    if len(body) > FREE_BYTES:
                        budget.take(len(chunk))
                        taken += len(chunk)
            return _decode(decoder, body)
        finally:
            budget.give_back(taken)

    return parse


def media_type_of(request: Request) -> str:
    """Return the media type of the body, without its parameters; empty if none is given."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def timed_chunks(request: Request, total_s: float | None = None) -> AsyncGenerator[bytes, None]:
    """Yield the body in chunks as they arrive. Only the time that is spent waiting for the client counts.

    Args:
        request: a request whose body has not been read.
        total_s: the time for the whole body, in seconds; None has no such bound.

    Raises:
        RequestTimeout: the body comes more slowly than `SLOW_BYTES` in `SLOW_S`, or takes `total_s`.
        ClientDisconnect: the client left.
    """
    loop = asyncio.get_running_loop()
    waited_s, slow_s, num_bytes = 0.0, 0.0, 0
    async with aclosing(request.stream()) as stream:
        while True:
            begun = loop.time()
            left_s = SLOW_S - slow_s if total_s is None else min(SLOW_S - slow_s, total_s - waited_s)
            try:
                async with asyncio.timeout(left_s):
                    chunk = await anext(stream, None)
            except TimeoutError as error:
                raise RequestTimeout("the body of the request came too slowly: send it again") from error
            if chunk is None:
                return
            waited_s += loop.time() - begun
            slow_s += loop.time() - begun
            num_bytes += len(chunk)
            if num_bytes >= SLOW_BYTES:
                slow_s, num_bytes = 0.0, 0
            yield chunk


def _check_headers(request: Request) -> None:
    media_type = media_type_of(request)
    if media_type != JSON:
        raise InvalidRequest(
            f"the body has {f'type {media_type}' if media_type else 'no type'}: "
            "send one JSON object as application/json",
            "Content-Type",
        )
    # The web server has checked that Content-Length is a number.
    _check_size(int(request.headers.get("content-length", "0")))


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_BYTES:
        raise HTTPException(413, f"the body is larger than {MAX_BYTES} bytes: split the request")


def _decode(decoder: msgspec.json.Decoder[B], body: bytearray) -> B:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid(str(error), decoder.type.__struct_fields__) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(
            f"the body is no valid JSON: {str(error).removeprefix('JSON is malformed: ')}"
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidRequest("the body is not in UTF-8: encode it so") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply: send a flatter one") from error


def invalid(message: str, fields: Collection[str] = ()) -> InvalidRequest:
    """Return the error of a body that msgspec refused; it names the field at fault.

    Args:
        message: msgspec's.
        fields: the names of the body's own fields.
    """
    if unknown := UNKNOWN_FIELD.fullmatch(message):
        name, path = unknown[1], (unknown[2] or "").removeprefix(".")
        other = None if path else OTHER_NAMES.get(name)
        way_out = f"use {other}" if other in fields else "remove it"
        return InvalidRequest(
            f"{shown(name)}{f' in {path}' if path else ''} is not a field of this call: {way_out}",
            _first_name(path) or name[:80],
        )
    if missing := MISSING_FIELD.fullmatch(message):
        name, path = missing[1], missing[2] or ""
        return InvalidRequest(f"{path}{path and '.'}{name} is missing: give it", _first_name(path) or name)
    if located := AT.fullmatch(message):
        return InvalidRequest(f"{located[2]}: {located[1]}", _first_name(located[2]))
    return InvalidRequest(message)


def _first_name(path: str) -> str | None:
    """Return the first field of a path such as ``messages[0].content``; None for an empty one."""
    return re.split(r"[.\[]", path, maxsplit=1)[0] or None
