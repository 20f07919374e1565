"""The web server of one process: uvicorn on uvloop and httptools, with bounds on connections and a client's time.

uvicorn accepts all connections that have arrived at once, and waits without end for heads, for the rest of refused
bodies and for clients that do not read. `HttpConnection` reports each change of a connection's phase to `Connections`.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from collections.abc import Coroutine, Iterator
from functools import partial
from typing import Any, TypeVar

import httptools
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from server.connections import (
    HEAD,
    IDLE,
    LINGERING,
    OVERLOADED,
    Connections,
    Listener,
    WaitingPhase,
    short_reply,
)
from server.fairness import FairBudget
from server.tenants.loop_ledger import NOBODY, PROBES, WITHOUT_KEY, Account, Turns, start_charged, timed_task

MAX_ADMIN_CONNECTIONS = 256
# uvicorn's ticks are 0.1 s apart.
TICKS_PER_SWEEP = 10
# Bound on a head, and on trailers.
MAX_HEAD_BYTES = 64 << 10
# Bound on the size of a chunk with its extensions, of which none is known.
MAX_CHUNK_LINE = 4 << 10
MAX_FIELDS = 256
# Chunks of a body beside one for each `MIN_CHUNK_BYTES` of it: reading a chunk takes 0.7 us, whatever its size.
FREE_CHUNKS = 1 << 13
MIN_CHUNK_BYTES = 256
# Requests that wait for the answer to the one before them; uvicorn keeps as many as arrive together.
MAX_PIPELINED = 8
# Bound on unsent bytes of a reply, beside the piece that passes it; what is left waits in the application until the
# client reads.
MAX_UNSENT_BYTES = 32 << 10
# Answered in reserve, too: an orchestrator would end a server that is only full.
PROBED = [(method, path) for method in ("GET", "HEAD") for path in (b"/health", b"/ready")]
KEY_HEADERS = (b"x-api-key", b"authorization")
# The fields that tell where a body ends.
FRAMING = (b"content-length", b"transfer-encoding")
# How long uvicorn may send replies after the service has closed.
LAST_BYTES_S = 2

INVALID = short_reply(
    "400 Bad Request", "invalid_request_error", "invalid_request",
    "the request is no valid HTTP/1.1: send it with an HTTP client",
)  # fmt: skip
HEAD_TOO_LARGE = short_reply(
    "431 Request Header Fields Too Large", "invalid_request_error", "invalid_request",
    f"the head of the request has more than {MAX_HEAD_BYTES} bytes or {MAX_FIELDS} fields: send fewer or shorter ones",
)  # fmt: skip
MANY_CHUNKS = short_reply(
    "400 Bad Request", "invalid_request_error", "invalid_request",
    f"the body has more than {FREE_CHUNKS} chunks of less than {MIN_CHUNK_BYTES} bytes: send larger ones",
)  # fmt: skip

T = TypeVar("T")


class ManyChunks(ValueError):
    """A body comes in so many small chunks that reading it takes a hundred times as long as its bytes do."""


class WebServer(uvicorn.Server):
    """Serves one application on listening sockets until `should_exit` is set.

    It has no signal handlers: uvicorn's would stop listening before the requests have ended.
    """

    def __init__(self, app: Any, connections: Connections, *, lifespan: bool) -> None:
        """Make a server; `serve([socket])` runs it.

        Args:
            app: the ASGI application.
            connections: the bounds of its port.
            lifespan: run the application's lifespan.
        """
        super().__init__(WebConfig(app, connections, lifespan=lifespan))
        self._connections = connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        make = partial(HttpConnection, self.config, self.server_state, self.lifespan.state)
        turns = self._connections.turns
        self.servers = [Listener(each, make, turns) for each in sockets or ()]  # type: ignore[misc]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_PER_SWEEP == 0:
            self._connections.sweep(asyncio.get_running_loop().time())
            # Also a process without work shows its last seconds.
            self._connections.turns.ledger.slide()
        return await super().on_tick(counter)


def run_event_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new event loop of uvloop, whose time is charged to tenants, and return its result."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.get_loop().set_task_factory(timed_task)
        return runner.run(main)


def make_connections(
    max_connections: int, unsent: FairBudget, turns: Turns, *, has_keys: bool
) -> tuple[Connections, Connections]:
    """Return the bounds of this process' ports, the public one first, by its file descriptors, too.

    Args:
        max_connections: of the public port.
        unsent: bytes that clients have not read, of both ports.
        turns: of the requests of both ports.
        has_keys: tenants have keys.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    public, admin = min(max_connections, soft * 5 // 8), min(MAX_ADMIN_CONNECTIONS, soft // 16)
    return (
        Connections(public, unsent, turns, has_keys=has_keys),
        Connections(admin, unsent, turns, has_keys=has_keys),
    )


class WebConfig(uvicorn.Config):
    """uvicorn's configuration of one application, and the connections of its port."""

    def __init__(self, app: Any, connections: Connections, *, lifespan: bool) -> None:
        super().__init__(
            app,
            http=HttpConnection,
            lifespan="on" if lifespan else "off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=LAST_BYTES_S,
        )
        self.connections = connections


class HttpConnection(HttpToolsProtocol):
    """A connection from its first byte to its last. uvicorn makes one per accepted socket."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        assert isinstance(config, WebConfig)
        self._bounds = config.connections
        self._turns = config.connections.turns
        # The seconds of the bytes that come are those of the last request's tenant.
        self._owner = self._turns.first_owner
        self._is_waiting = False  # a request, for its turn
        self._unread: list[bytes] = []  # until its turn
        # What comes after the request under way is left out, and the connection ends with its reply.
        self._is_deaf = False
        self._num_head_bytes = 0
        # Of the body that is read.
        self._num_chunks = self._num_body_bytes = 0
        self._in_head = self._in_body = self._has_body = self._in_chunk_line = False
        # The request that is being answered; `cycle` is the last one that was received.
        self._answering: RequestResponseCycle | None = None
        self._account: Account | None = None  # of the last request that has begun
        # The fields that tell where the body ends, of a request that asks for another protocol, until it is read.
        self._framing: list[tuple[bytes, bytes]] | None = None
        self._is_framing = False  # they are being read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        begun = time.thread_time()
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        if self._bounds.admit(transport, self.loop.time()):
            self._enter(IDLE)
        else:
            self._refuse(OVERLOADED)
        self._turns.ledger.charge(self._owner, time.thread_time() - begun)

    def connection_lost(self, exc: Exception | None) -> None:
        self._bounds.forget(self.transport)
        self._bounds.reading.leave(self)
        self._turns.leave(self, self._owner)
        # uvicorn tells only the last of several pipelined requests, which is not the one that is being answered.
        if self._answering is not None:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        begun = time.thread_time()
        try:
            if self._unread or not self._may_read():
                self._read_later(data)
            else:
                self._feed(data)
        finally:
            self._turns.ledger.charge(self._owner, time.thread_time() - begun)

    def _may_read(self) -> bool:
        """Return whether bytes are read in this turn of the event loop: those of callers without a key have a pace."""
        has_pace = self._bounds.has_keys and self._owner in WITHOUT_KEY
        return not has_pace or self._bounds.reading.begin()

    def _read_later(self, data: bytes) -> None:
        self.flow.pause_reading()
        self._unread.append(data)
        if not self._bounds.reading.wait(self, len(data), self._read):
            self._bounds.report("sent more than could be read")
            self.transport.abort()

    def _read(self) -> None:
        """Read what has waited for its turn."""
        begun = time.thread_time()
        data, self._unread = b"".join(self._unread), []
        if not self._is_waiting and not self.pipeline:
            self.flow.resume_reading()
        if not self.transport.is_closing():
            self._feed(data)
        self._turns.ledger.charge(self._owner, time.thread_time() - begun)

    def _feed(self, data: bytes) -> None:
        if self._is_deaf:
            return
        was_in_head, was_in_body, self._has_body = self._in_head, self._in_body, False
        was_in_chunk_line = self._in_chunk_line
        try:
            rest = data
            while rest:
                rest = self._parse(rest)
        except httptools.HttpParserError as error:
            if self._is_deaf:
                self.flow.pause_reading()
            elif isinstance(error.__context__, ManyChunks):
                self._bounds.report("sent too many small chunks")
                self._refuse(MANY_CHUNKS)
            elif len(self.headers) > MAX_FIELDS:
                self._refuse_head()
            else:
                self._refuse_invalid()
            return
        if (was_in_head and self._in_head) or (was_in_body and self._in_body and not self._has_body):
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse_head()
            elif was_in_chunk_line and self._in_chunk_line and self._num_head_bytes > MAX_CHUNK_LINE:
                self._refuse_invalid()

    def _parse(self, data: bytes) -> bytes:
        """Read bytes, but for those behind a head that asks for another protocol; return these.

        The request is answered as if it had not asked. Its parser takes what follows for the other protocol, so another
        one reads on behind the same fields.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            framing, self._framing = self._framing, None
            self.parser = httptools.HttpRequestParser(self)
            if framing:
                self._is_framing = True
                fields = b"".join(b"%s: %s\r\n" % field for field in framing)
                self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % fields)
                self._is_framing = False
            return data[stop.args[0] :]
        return b""

    def on_url(self, url: bytes) -> None:
        if not self._is_framing:
            super().on_url(url)

    def on_message_begin(self) -> None:
        if self._is_framing:
            return
        if self._answering is not None and self._owner in WITHOUT_KEY:
            # Reading further heads would take as long as many refusals.
            self._is_deaf, self._answering.keep_alive = True, False
            raise ValueError("a caller without a key has one request at a time")
        super().on_message_begin()
        if self._bounds.has_keys:
            self.scope["state"]["identify"] = self._identify
        self._in_head, self._num_head_bytes = True, 0
        if self._answering is None:
            self._enter(HEAD)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers come here, too: uvicorn would add them to the head of a request that is being answered.
        if self._in_head and not self._is_framing:
            super().on_header(name, value)
            if len(self.headers) > MAX_FIELDS:
                raise ValueError("too many fields")

    def on_headers_complete(self) -> None:
        if self._is_framing:
            return
        if len(self.pipeline) == MAX_PIPELINED:
            raise ValueError("too many requests that were not waited for")
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            # Its end cannot be found.
            raise ValueError("a transfer coding that is not known")
        is_probe = (self.parser.get_method().decode(), self.url.partition(b"?")[0]) in PROBED
        has_key = any(name in KEY_HEADERS for name, _ in self.headers)
        may_answer = self._bounds.may_answer(
            self.transport, is_probe=is_probe, has_key=has_key, now=self.loop.time()
        )
        self.app = self.config.loaded_app if may_answer else overloaded
        super().on_headers_complete()
        if self._bounds.is_reserved(self.transport):
            self.cycle.keep_alive = False
        self._in_head, self._in_body, self._in_chunk_line = False, True, bool(codings)
        self._num_chunks = self._num_body_bytes = 0
        if self.parser.should_upgrade():
            self._framing = [field for field in self.headers if field[0] in FRAMING]

    def on_chunk_header(self) -> None:
        self._in_chunk_line = False
        self._num_chunks += 1
        if self._num_chunks > FREE_CHUNKS + self._num_body_bytes // MIN_CHUNK_BYTES:
            raise ManyChunks

    def on_chunk_complete(self) -> None:
        self._in_chunk_line = True

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._has_body, self._num_head_bytes = True, 0
        self._num_body_bytes += len(body)

    def on_message_complete(self) -> None:
        if self._framing:
            # Of the head alone.
            return
        super().on_message_complete()
        self._in_body = self._in_chunk_line = False
        if self._answering is None:
            self._enter(IDLE)

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        # Also a connection that is closing waits until the client has read its reply. What can be written at once is
        # written before the next turn.
        self.loop.call_soon(self._stall, self._tenant)
        self._answering = None
        if self._bounds.has_keys:
            # Also of one that the application has refused before it knew of a caller; a tenant's stays the tenant's.
            self._identify(NOBODY)
        if self.transport.is_closing():
            return
        next_one = self.pipeline.pop() if self.pipeline else None
        if not self.pipeline:
            self.flow.resume_reading()
        if next_one is not None:
            self._start_asgi_task(*next_one)
        else:
            self._enter(LINGERING if self._in_body else HEAD if self._in_head else IDLE)

    def shutdown(self) -> None:
        if self._in_body or self._is_waiting:
            # The service has closed, and the rest of the request or its turn may never come.
            self.transport.abort()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall(self._tenant)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._bounds.resume(self.transport)

    @property
    def _tenant(self) -> str:
        """The tenant that the reply under way is for; empty without a key."""
        state = {} if self._answering is None else self._answering.scope["state"]
        return str(state.get("tenant", ""))

    def _identify(self, tenant: str) -> bool:
        if self._account is not None and tenant != NOBODY:
            # A key may be newer than the last reading of the keys.
            self._account.tenant = self._owner = tenant
        return self._bounds.identify(self.transport, tenant, self.loop.time())

    def _stall(self, tenant: str) -> None:
        self._bounds.stall(self.transport, tenant, self.loop.time())

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        self._owner = self._turns.owner_of(cycle.scope["headers"])
        if self._owner == NOBODY and (cycle.scope["method"], cycle.scope["raw_path"]) in PROBED:
            self._owner = PROBES
        self._is_waiting = not self._turns.begin(self, self._owner, partial(self._begin, cycle, app))
        if self._is_waiting:
            self._wait()

    def _begin(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._is_waiting = False
        self._bounds.leave(self.transport)
        if not self.pipeline:
            self.flow.resume_reading()
        self._account = Account(self._turns.ledger, self._owner)
        start_charged(self._account, super()._start_asgi_task, cycle, app)

    def _wait(self) -> None:
        """Read nothing more before the turn of the request. One without a valid key gives way to other connections."""
        self.flow.pause_reading()
        if not self._bounds.is_reserved(self.transport):
            self._bounds.leave(self.transport)
        if self._owner in WITHOUT_KEY:
            self._identify(NOBODY)

    def _enter(self, phase: WaitingPhase) -> None:
        self._bounds.enter(phase, self.transport, self.loop.time())

    def _refuse_head(self) -> None:
        self._bounds.report("sent a head that is too large")
        self._refuse(HEAD_TOO_LARGE)

    def _refuse_invalid(self) -> None:
        self._bounds.report("sent no valid HTTP")
        self._refuse(INVALID)

    def _refuse(self, reply: bytes) -> None:
        """Answer a request that was not understood, unless a reply is under way, and close the connection."""
        answering = self._answering
        if answering is None:
            # In a body, the request was answered before.
            if not self._in_body:
                self.transport.write(reply)
        elif answering is self.cycle and self._in_body and not answering.response_started:
            # The application waits for the rest of its body.
            self.transport.write(reply)
            answering.disconnected = True
            answering.message_event.set()
        self.transport.close()


async def overloaded(scope: Any, receive: Any, send: Any) -> None:
    """Answer a request in reserve that finds no place."""
    body = OVERLOADED.partition(b"\r\n\r\n")[2]
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 503, "headers": [*headers, (b"retry-after", b"1")]})
    await send({"type": "http.response.body", "body": body})
