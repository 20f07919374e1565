"""The web server of one process: uvicorn on uvloop and httptools, with bounds on heads and on a client's time.

uvicorn waits without end for heads, for the rest of refused bodies and for clients that do not read. `Connections` owns
the deadlines; this file reports to it what each connection does.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import httptools
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from server.fair_budget import FairBudget
from server.http.connections import (
    HEAD,
    IDLE,
    LINGERING,
    OVERLOADED,
    Connections,
    WaitingPhase,
    short_reply,
)

MAX_ADMIN_CONNECTIONS = 256
# uvicorn's ticks are 0.1 s apart.
TICKS_PER_SWEEP = 10
# Bound on a head, and on a body's framing: sizes of chunks, and trailers.
MAX_HEAD_BYTES = 64 << 10
MAX_FIELDS = 256
# Requests that wait for the answer to the one before them; uvicorn keeps as many as arrive together.
MAX_PIPELINED = 8
# Bound on unsent bytes of a reply, beside the piece that passes it; what is left waits in the application until the
# client reads.
MAX_UNSENT_BYTES = 32 << 10
# Answered in reserve, too: an orchestrator would end a server that is only full.
PROBES = (b"/health", b"/ready")
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

T = TypeVar("T")


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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_PER_SWEEP == 0:
            self._connections.sweep(asyncio.get_running_loop().time())
        return await super().on_tick(counter)


def run_event_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new event loop of uvloop, and return its result."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def make_connections(max_connections: int, unsent: FairBudget) -> tuple[Connections, Connections]:
    """Return the bounds of this process' ports, the public one first, by its file descriptors, too.

    Args:
        max_connections: of the public port.
        unsent: bytes that clients have not read, of both ports.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    public, admin = min(max_connections, soft * 5 // 8), min(MAX_ADMIN_CONNECTIONS, soft // 16)
    return Connections(public, unsent), Connections(admin, unsent)


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
        self._num_head_bytes = 0
        self._in_head = self._in_body = self._has_body = False
        # The request that is being answered; `cycle` is the last one that was received.
        self._answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        if self._bounds.admit(transport, self.loop.time()):
            self._enter(IDLE)
        else:
            self._refuse(OVERLOADED)

    def connection_lost(self, exc: Exception | None) -> None:
        self._bounds.forget(self.transport)
        # uvicorn tells only the last of several pipelined requests, which is not the one that is being answered.
        if self._answering is not None:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_head, was_in_body, self._has_body = self._in_head, self._in_body, False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The request itself is answered as if it had not asked for another protocol.
            self.cycle.keep_alive = False
        except httptools.HttpParserError:
            if len(self.headers) > MAX_FIELDS:
                self._refuse_head()
            else:
                self._bounds.report("sent no valid HTTP")
                self._refuse(INVALID)
            return
        if (was_in_head and self._in_head) or (was_in_body and self._in_body and not self._has_body):
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._num_head_bytes = True, 0
        if self._answering is None:
            self._enter(HEAD)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers come here, too: uvicorn would add them to the head of a request that is being answered.
        if self._in_head:
            super().on_header(name, value)
            if len(self.headers) > MAX_FIELDS:
                raise ValueError("too many fields")

    def on_headers_complete(self) -> None:
        if len(self.pipeline) == MAX_PIPELINED:
            raise ValueError("too many requests that were not waited for")
        is_probe = self.parser.get_method() == b"GET" and self.url.partition(b"?")[0] in PROBES
        may_answer = self._bounds.may_answer(self.transport, is_probe=is_probe, now=self.loop.time())
        self.app = self.config.loaded_app if may_answer else overloaded
        super().on_headers_complete()
        if self._bounds.is_reserved(self.transport):
            self.cycle.keep_alive = False
        self._in_head, self._in_body = False, True

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._has_body, self._num_head_bytes = True, 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_body = False
        if self._answering is None:
            self._enter(IDLE)

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        # Also a connection that is closing waits until the client has read its reply. What can be written at once is
        # written before the next turn.
        self.loop.call_soon(self._stall, self._tenant)
        self._answering = None
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
        if self._in_body:
            # The service has closed, and the rest of the request may never come.
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

    def _stall(self, tenant: str) -> None:
        self._bounds.stall(self.transport, tenant, self.loop.time())

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        self._bounds.leave(self.transport)
        super()._start_asgi_task(cycle, app)

    def _enter(self, phase: WaitingPhase) -> None:
        self._bounds.enter(phase, self.transport, self.loop.time())

    def _refuse_head(self) -> None:
        self._bounds.report("sent a head that is too large")
        self._refuse(HEAD_TOO_LARGE)

    def _refuse(self, reply: bytes) -> None:
        """Answer a request that was not understood, unless a reply is under way, and close the connection."""
        if self._answering is None:
            self.transport.write(reply)
        self.transport.close()


async def overloaded(scope: Any, receive: Any, send: Any) -> None:
    """Answer a request in reserve that finds no place."""
    body = OVERLOADED.partition(b"\r\n\r\n")[2]
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 503, "headers": [*headers, (b"retry-after", b"1")]})
    await send({"type": "http.response.body", "body": body})
