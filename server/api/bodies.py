"""Read request bodies: in time, JSON strictly and within bounds on bytes and values.

A parsed array, object or string takes up to a hundred times the memory of its text, and as much more time, so JSON is
bounded in these before it is parsed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException

from deltastore.errors import shown
from server.api.schemas import MAX_VALUES, num_values
from server.errors import InvalidRequest, RequestTimeout
from server.fair_budget import FairBudget
from server.fair_limiter import FairLimiter

JSON = "application/json"
# Bound on one JSON body.
MAX_BYTES = 8 << 20
# Bound on all JSON bodies that are read or wait to be tokenized, beyond the first `FREE_BYTES` of each: small requests
# are always read. One tenant alone may have half of it.
MAX_HELD_BYTES = 256 << 20
# Larger bodies are parsed off the event loop, and bytes are reserved in steps of it.
FREE_BYTES = 64 << 10
# Bodies of one tenant that wait to be parsed; their bytes are bounded before.
MAX_WAITING = 4096
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


@dataclass(frozen=True, slots=True)
class Bodies:
    """Memory that the JSON bodies of one application share, and turns of the thread that parses the large ones."""

    budget: FairBudget
    parsing: FairLimiter


def install(app: FastAPI, num_bytes: int = MAX_HELD_BYTES) -> None:
    """Give the application's JSON bodies a budget of bytes."""
    # One at a time: a parser holds the interpreter's lock.
    parsing = FairLimiter(1, 1, MAX_WAITING)
    app.state.bodies = Bodies(FairBudget(num_bytes, "bytes of large bodies"), parsing)


def json_body(kind: type[B]) -> Callable[[Request], Awaitable[B]]:
    """Return a dependency that parses the body as a `kind`; it raises as `read_json` does.

    It also raises InvalidApiKey if the caller's key was revoked while the body came.
    """

    async def parse(request: Request) -> B:
        with ExitStack() as held:
            body = await read_json(request, kind, held)
        key_id = request.scope["state"]["caller"].key_id
        if key_id is not None:
            await request.app.state.service.keys.check_stands(key_id)
        return body

    return parse


async def read_json(request: Request, kind: type[B], held: ExitStack) -> B:
    """Read and parse the body of a request that `access.authorize` has let in.

    FastAPI's own body parameters read a body of any size, for any time, into memory.

    Args:
        held: holds the bytes that are reserved for the body, until nothing of its size is in memory.

    Raises:
        InvalidRequest: another media type, an invalid body, or one of too many values.
        RequestTimeout: the body comes too slowly.
        QueueFull: the tenant has too many bytes of bodies.
        HTTPException: 413 for a body that is too large.
    """
    _check_headers(request)
    bodies: Bodies = request.app.state.bodies
    tenant: str = request.scope["state"]["tenant"]
    body, num_reserved = bytearray(), FREE_BYTES
    async with aclosing(timed_chunks(request, JSON_S)) as chunks:
        async for chunk in chunks:
            _check_size(len(body) + len(chunk))
            while len(body) + len(chunk) > num_reserved:
                held.enter_context(bodies.budget.holding(tenant, FREE_BYTES))
                num_reserved += FREE_BYTES
            body += chunk
    if len(body) <= FREE_BYTES:
        return _parse(kind, body)
    async with bodies.parsing.permit(tenant):
        return await asyncio.to_thread(_parse, kind, body)


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


def _parse(kind: type[B], body: bytearray) -> B:
    if num_values(body) > MAX_VALUES:
        raise InvalidRequest(
            f"the body has more than {MAX_VALUES} arrays, objects and strings: send fewer",
            _largest_field(kind, body),
        )
    try:
        decoder: msgspec.json.Decoder[B] = _decoder(kind)
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid(str(error), kind.__struct_fields__) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(
            f"the body is no valid JSON: {str(error).removeprefix('JSON is malformed: ')}"
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidRequest("the body is not in UTF-8: encode it so") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply: send a flatter one") from error


@cache
def _decoder(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _largest_field(kind: type[msgspec.Struct], body: bytearray) -> str | None:
    """Return the field that is most of a body; None if there is none, or the body is no JSON."""
    try:
        fields = _unparsed(kind).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    names = kind.__struct_fields__
    return next((name for name in names if 2 * len(getattr(fields, name)) > len(body)), None)


@cache
def _unparsed(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    """Return a decoder that leaves each field as its text."""
    fields = [(name, msgspec.Raw, msgspec.Raw()) for name in kind.__struct_fields__]
    return msgspec.json.Decoder(msgspec.defstruct("Unparsed", fields))


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
