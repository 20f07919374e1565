"""JSON of requests and replies: bodies read in time and within bounds, documents, pages and events.

A parsed array, object or string takes up to a hundred times the memory of its text, and as much more time, so JSON is
bounded in these before it is parsed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from codecs import BOM_UTF8
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ParamSpec, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from deltastore.errors import shown
from server.api.conversations import MAX_VALUES, has_many_members, num_values, too_many_values
from server.api.fields import IgnoredNames, ignored_fields, members, told
from server.api.schemas import OpenAIBody
from server.errors import InvalidRequest, RequestTimeout
from server.fairness import FairBudget, FairLimiter
from server.tenants.loop_ledger import LoopLedger, timed_on_thread

JSON = "application/json"
# Bound on one JSON body.
MAX_BYTES = 8 << 20
# Bound on all JSON bodies that are read or wait to be tokenized, beyond the first `FREE_BYTES` of each: small requests
# are always read. One tenant alone may have half of it.
MAX_HELD_BYTES = 256 << 20
# Larger bodies are parsed off the event loop, and bytes are reserved in steps of it.
FREE_BYTES = 64 << 10
# So are those in which these bytes are more frequent, texts in JSON included: a value can take 3 us, with the checks of
# schemas, and hundreds of bodies may end in one turn of the event loop.
MARKS, MAX_MARKS = (b"{", b"[", b'"', b","), 400
# Of a list or object that is none of `LONG_LISTS`, and of what belongs to no field. Larger bodies have their fields
# measured before they are parsed: the numbers of a schema of 8 MiB would take half a second.
MAX_FIELD_BYTES = 1 << 20
LONG_LISTS = {"prompt", "messages", "tokens"}
# Bodies of one tenant that wait to be parsed; their bytes are bounded before.
MAX_WAITING = 4096
# Of bodies, by the event loop.
READ_BYTES_PER_S = 500e6
# Of one call: a tenant whose texts take threads long goes on.
MAX_REST_S = 2.0
# A JSON body must be complete after this time.
JSON_S = 120.0
# Each `SLOW_S` of waiting for a client must bring `SLOW_BYTES` of its body, or the end: 4 KiB/s.
SLOW_S = 30.0
SLOW_BYTES = 120 << 10

MISSING_FIELD = re.compile(r"Object missing required field `(.*?)`(?: - at `\$\.?(.*)`)?", re.DOTALL)
UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$(.*)`)?", re.DOTALL)
# Fields of other APIs, with the name that one has in a call of this server.
OTHER_NAMES = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
AT = re.compile(r"(.*) - at (?:`key` in )?`\$\.?(.*)`", re.DOTALL)

B = TypeVar("B", bound=msgspec.Struct)
T = TypeVar("T")
P = ParamSpec("P")


class ParsingTurns:
    """Turns of tenants for `parsed`: one call at a time, because a parser holds the interpreter's lock.

    While other tenants are served, a tenant's call rests until threads have worked for it, and the event loop has read
    what they worked on, in at most a part of the time since its last one began. So a tenant that sends nothing but
    large bodies takes that part of a processor from the engine.

    Args:
        ledger: the seconds of the tenants.
        num_cores: that the process may use; the part is a sixteenth of them, and at most half of one.
        clock: by which calls rest.
    """

    def __init__(
        self,
        ledger: LoopLedger,
        num_cores: int = len(os.sched_getaffinity(0)),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._part = min(num_cores / 16, 0.5)
        self._clock = clock
        self._turns = FairLimiter(1, 1, MAX_WAITING)
        # A call that rests keeps those of other tenants waiting for nothing.
        self._own_turns = FairLimiter(sys.maxsize, 1, MAX_WAITING)
        # When the last call of each tenant began, and the seconds that threads had worked for it.
        self._begun: dict[str, tuple[float, float]] = {}

    @asynccontextmanager
    async def turn(self, tenant: str, num_bytes: int = 0) -> AsyncIterator[None]:
        """Wait for a tenant's turn and hold it inside the `async with` block.

        Args:
            num_bytes: that the event loop has read for the call.

        Raises:
            QueueFull: `MAX_WAITING` calls of the tenant wait.
        """
        async with self._own_turns.permit(tenant):
            if tenant in self._begun and self._ledger.has_others(tenant):
                begun_at, worked_s = self._begun[tenant]
                rested_at = begun_at + (self._ledger.used_on_threads(tenant) - worked_s) / self._part
                await asyncio.sleep(min(rested_at - self._clock(), MAX_REST_S))
            async with self._turns.permit(tenant):
                read_s = num_bytes / READ_BYTES_PER_S
                self._begun[tenant] = self._clock(), self._ledger.used_on_threads(tenant) - read_s
                yield


@dataclass(frozen=True, slots=True)
class Bodies:
    """Memory that the JSON bodies of one application share, turns of the thread that parses the large ones, and what
    the log has told of them.
    """

    budget: FairBudget
    parsing: ParsingTurns
    ignored: IgnoredNames


async def parsed(
    parsing: ParsingTurns,
    tenant: str,
    num_bytes: int,
    function: Callable[P, T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Call a function of a request's large values on a thread, in its tenant's turn.

    Args:
        num_bytes: that the event loop has read for it and that no call before has counted.

    Raises:
        QueueFull: `MAX_WAITING` calls of the tenant wait.
    """
    async with parsing.turn(tenant, num_bytes):
        return await asyncio.to_thread(timed_on_thread(function), *args, **kwargs)


def install_bodies(app: FastAPI, parsing: ParsingTurns, num_bytes: int = MAX_HELD_BYTES) -> None:
    """Give the application's JSON bodies a budget of bytes, and turns in which large ones are parsed."""
    app.state.bodies = Bodies(FairBudget(num_bytes, "bytes of large bodies"), parsing, IgnoredNames())


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
    if len(body) <= FREE_BYTES and sum(map(body.count, MARKS)) <= MAX_MARKS:
        document, ignored = _parse_all(kind, body)
    else:
        document, ignored = await parsed(bodies.parsing, tenant, len(body), _parse_all, kind, body)
    if ignored:
        bodies.ignored.tell(ignored, tenant)
        request.scope["state"]["ignored"] = told(ignored)
    return document


def _parse_all(kind: type[B], body: bytearray) -> tuple[B, tuple[str, ...]]:
    """Parse a body, and return the names of its fields that no API has."""
    # Some clients begin texts with it, and RFC 8259 lets readers ignore it.
    if body.startswith(BOM_UTF8):
        del body[: len(BOM_UTF8)]
    document = parse(kind, body)
    return document, ignored_fields(kind, body) if issubclass(kind, OpenAIBody) else ()


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


def check_encoding(request: Request) -> None:
    """Refuse a compressed body: how large it becomes is known only when it is read."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise HTTPException(415, f"the body has the coding {shown(coding)}: send it without Content-Encoding")


def _check_headers(request: Request) -> None:
    check_encoding(request)
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


def parse(kind: type[B], body: bytearray) -> B:
    """Return a body as a `kind`; raise InvalidRequest if it is none, or has too many values."""
    if num_values(body) > MAX_VALUES:
        raise InvalidRequest(
            f"the body has more than {MAX_VALUES} arrays, objects and strings: send fewer",
            _largest_field(kind, body),
        )
    try:
        if len(body) > MAX_FIELD_BYTES:
            _check_fields(kind, body)
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
    """Return the field that is most of a body; None if there is none, or the body is large or no JSON."""
    if len(body) > MAX_FIELD_BYTES:
        # Finding it would take longer than all else that is done for the body.
        return None
    try:
        fields = members.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return next((name for name in kind.__struct_fields__ if 2 * len(fields.get(name, b"")) > len(body)), None)


def _check_fields(kind: type[msgspec.Struct], body: bytearray) -> None:
    """Refuse a large body whose fields would take long to parse.

    Raises:
        InvalidRequest: it has a long field that is no text and none of `LONG_LISTS`, or messages with too many values.
        msgspec.DecodeError: it is no JSON object.
    """
    num_bytes = 0
    for name, value in members.decode(body).items():
        num_bytes += len(value)
        if len(value) > MAX_FIELD_BYTES and name not in LONG_LISTS and bytes(memoryview(value)[:1]) != b'"':
            raise InvalidRequest(
                f"{shown(name)} has {len(value)} bytes, more than {MAX_FIELD_BYTES}: make it shorter",
                name if name in kind.__struct_fields__ else None,
            )
        if name == "messages" and has_many_members(bytes(value)):
            raise too_many_values()
    if num_bytes < len(body) - MAX_FIELD_BYTES:
        raise InvalidRequest(
            f"more than {MAX_FIELD_BYTES} bytes of the body are names, spaces between fields, or fields that are given "
            "again: leave them out"
        )


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
        if name == "model" and "max_new_tokens" in fields:
            # The body of `POST /generate`.
            way_out = "name the variant in the URL, as ?variant=NAME"
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


# Bytes that are handed to the web server at once; the rest of a reply waits until the client has taken them.
PIECE_BYTES = 64 << 10

# Bound on the documents of one page of a list; the first of them may be larger.
MAX_PAGE_BYTES = 1 << 20


def install_replies(app: FastAPI, unsent: FairBudget) -> None:
    """Give the application's whole replies a budget of bytes that clients have not read."""
    app.state.unsent = unsent


class WholeReply(Response):
    """A reply whose body is made at once. A large one is counted until the client has taken its last piece."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the reply; raises QueueFull before its first byte if its tenant leaves too much unread."""
        if len(self.body) <= PIECE_BYTES:
            await super().__call__(scope, receive, send)
            return
        unsent: FairBudget = scope["app"].state.unsent
        with unsent.holding(scope["state"].get("tenant", ""), len(self.body)):
            await StreamingResponse(_pieces(self.body), self.status_code, self.headers)(scope, receive, send)


class JsonReply(WholeReply):
    """A reply with a JSON document, in which NaN is null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


def shared_reply(content: bytes, media_type: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return a reply of bytes that the process keeps for all clients: they count for none."""
    length = {"Content-Length": str(len(content))}
    return StreamingResponse(_pieces(content), headers={**length, **(headers or {})}, media_type=media_type)


async def _pieces(content: bytes | memoryview) -> AsyncIterator[bytes]:
    for begin in range(0, len(content), PIECE_BYTES):
        yield bytes(content[begin : begin + PIECE_BYTES])


def page_reply(
    key: str,
    documents: Iterable[tuple[str, Any]],
    *,
    has_more: bool,
    last_id: str | None = None,
    **fields: Any,
) -> JsonReply:
    """Return a page of a list, with the fields that OpenAI's API gives one: `has_more` and `last_id`.

    Args:
        key: the name of the list.
        documents: those of the page, each with its id. Only as many as fit into `MAX_PAGE_BYTES` are taken.
        has_more: there are others behind them.
        last_id: what the next page begins behind, if that is not the last document.
        fields: of the reply beside the list.
    """
    shown: list[msgspec.Raw] = []
    num_bytes, last_shown = 0, None
    for document_id, document in documents:
        encoded = encode(document)
        num_bytes += len(encoded)
        if shown and num_bytes > MAX_PAGE_BYTES:
            has_more, last_id = True, None
            break
        shown.append(msgspec.Raw(encoded))
        last_shown = document_id
    last_id = last_shown if last_id is None else last_id
    return JsonReply({**fields, key: shown, "has_more": has_more, "last_id": last_id})


def encode(document: Any) -> bytes:
    """Return a document as JSON in UTF-8."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        # A client's field name can hold a lone surrogate, which UTF-8 cannot encode and an escape can.
        return json.dumps(document).encode()


def server_sent_event(name: str, document: Any) -> bytes:
    """Return one server-sent event with a JSON document."""
    return b"event: %s\n%s" % (name.encode(), unnamed_event(document))


def unnamed_event(document: Any) -> bytes:
    """Return one server-sent event that has a JSON document and no name, as those of OpenAI's API."""
    return b"data: %s\n\n" % encode(document)
