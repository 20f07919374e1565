"""The web server of one process: uvicorn on uvloop and httptools, with bounds on connections and a client's time.

uvicorn waits without end for heads, for the rest of refused bodies and for clients that do not read. `HttpConnection`
reports each change of a connection's phase to `Connections`, whose `sweep` closes the late ones. A new connection
beyond the bound takes the place of one whose reply is stalled, or else of one that waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import httptools
import msgspec
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from server.fairness import FairBudget

log = logging.getLogger(__name__)

# A client must read this much of its reply in each `WRITE_S`.
MIN_READ_BYTES = 32 << 10
WRITE_S = 60.0
# A reply is stalled when nothing could be written for so long: its connection may then give way to others.
STALLED_S = 1.0
# Connections beyond the bound. They are answered if a place has become free, or if they ask for the server's health.
NUM_RESERVED = 64
# Bad connections are logged together, so that the log does not grow with their number.
LOG_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True)
class WaitingPhase:
    """A time that a connection spends without a request that is being answered."""

    timeout_s: float
    # Sent before a late connection is closed.
    reply: bytes = b""
    # Words for the log; phases that are no fault are not logged.
    fault: str | None = None


@dataclass(slots=True)
class Stall:
    """A reply that the client does not read."""

    tenant: str  # that the reply is for; empty without a key
    since: float
    checked_at: float
    num_bytes: int  # unsent at `checked_at`
    num_held: int = 0  # of the budget


def short_reply(status: str, kind: str, code: str, message: str, retry_after_s: int | None = None) -> bytes:
    """Return a whole HTTP reply with the JSON of an error, after which the connection is closed."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    body = msgspec.json.encode({"error": error})
    retry = "" if retry_after_s is None else f"retry-after: {retry_after_s}\r\n"
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        f"{retry}connection: close\r\n\r\n"
    )
    return head.encode() + body


OVERLOADED = short_reply(
    "503 Service Unavailable", "server_error", "overloaded",
    "the server has as many connections as it may: try again later, or raise the server's --max-connections", 1,
)  # fmt: skip
REQUEST_TIMEOUT = short_reply(
    "408 Request Timeout", "invalid_request_error", "request_timeout",
    "the head of the request did not arrive in time: send it again",
)  # fmt: skip

# The rest of a refused body is read, so that the client, which is still sending, gets to read its reply.
LINGERING = WaitingPhase(15.0)
# No byte of a request has arrived. Longer than the 60 s after which load balancers close their side.
IDLE = WaitingPhase(75.0)
# A part of a request's head has arrived.
HEAD = WaitingPhase(15.0, REQUEST_TIMEOUT, "sent no whole request head in time")
# Beyond the bound, whatever has arrived.
RESERVED = WaitingPhase(15.0, OVERLOADED, "found no free connection")
# In the order in which their connections give way to new ones.
GIVING_WAY = (LINGERING, IDLE, HEAD)


class Connections:
    """The open connections of one port, by transport. Use it on the event loop only.

    Args:
        max_connections: beside those in reserve.
        unsent: bytes that clients have not read. What is stalled is counted here; a tenant's oldest gives way.
    """

    def __init__(self, max_connections: int, unsent: FairBudget) -> None:
        self._max_connections = max_connections
        self._unsent = unsent
        self._open: set[asyncio.Transport] = set()
        self._reserved: set[asyncio.Transport] = set()
        # The transports of each phase with the time at which it began, the oldest first.
        self._waiting: dict[WaitingPhase, dict[asyncio.Transport, float]] = {
            phase: {} for phase in (*GIVING_WAY, RESERVED)
        }
        # The longest first.
        self._stalled: dict[asyncio.Transport, Stall] = {}
        self._faults: Counter[str] = Counter()
        self._next_log = 0.0

    def admit(self, transport: asyncio.Transport, now: float) -> bool:
        """Count a new connection, in reserve if no other gives way to it; False refuses it."""
        if self._make_room(now):
            self._open.add(transport)
            return True
        if len(self._reserved) >= NUM_RESERVED:
            oldest = next(iter(self._waiting[RESERVED]), None)
            if oldest is None:
                self.report("found no free connection")
                return False
            self._close(oldest, RESERVED)
            self.forget(oldest)
        self._reserved.add(transport)
        return True

    def may_answer(self, transport: asyncio.Transport, *, is_probe: bool, now: float) -> bool:
        """Return whether a request is answered. In reserve, it needs a free place or is a probe of the server."""
        if transport not in self._reserved:
            return True
        if self._make_room(now):
            self.forget(transport)
            self._open.add(transport)
            return True
        if not is_probe:
            self.report("found no free connection")
        return is_probe

    def is_reserved(self, transport: asyncio.Transport) -> bool:
        """True for a connection that ends with its first reply, so that the reserve is free again."""
        return transport in self._reserved

    def enter(self, phase: WaitingPhase, transport: asyncio.Transport, now: float) -> None:
        """Begin a phase, which ends the connection's last one."""
        if transport in self._reserved:
            self._waiting[RESERVED].setdefault(transport, now)
            return
        self.leave(transport)
        if transport in self._open:
            self._waiting[phase][transport] = now

    def leave(self, transport: asyncio.Transport) -> None:
        """End the phase of a connection: its request is being answered."""
        for transports in self._waiting.values():
            transports.pop(transport, None)

    def stall(self, transport: asyncio.Transport, tenant: str, now: float) -> None:
        """Watch a connection with unsent bytes until `resume`, or until they are sent."""
        unsent = transport.get_write_buffer_size()
        if unsent and (transport in self._open or transport in self._reserved):
            self._stalled.setdefault(transport, Stall(tenant, now, now, unsent))

    def resume(self, transport: asyncio.Transport) -> None:
        stall = self._stalled.pop(transport, None)
        if stall is not None:
            self._unsent.give_back(stall.tenant, stall.num_held)

    def forget(self, transport: asyncio.Transport) -> None:
        """Drop a connection that is closed."""
        self._open.discard(transport)
        self._reserved.discard(transport)
        self.leave(transport)
        self.resume(transport)

    def report(self, fault: str) -> None:
        """Count a bad connection for the log."""
        self._faults[fault] += 1

    def sweep(self, now: float) -> None:
        """Close late connections and log the faults since the last log line."""
        for phase, transports in self._waiting.items():
            for transport in [each for each, since in transports.items() if now - since >= phase.timeout_s]:
                self._close(transport, phase)
        for transport, stall in list(self._stalled.items()):
            # It may have given way to one before it.
            if transport in self._stalled:
                self._check_progress(transport, stall, now)
        if self._faults and now >= self._next_log:
            log.warning("connections: %s", ", ".join(f"{n} {fault}" for fault, n in self._faults.items()))
            self._faults.clear()
            self._next_log = now + LOG_INTERVAL_S

    def _make_room(self, now: float) -> bool:
        """Return whether one more connection may be open, after one has given way if there are too many."""
        if len(self._open) < self._max_connections:
            return True
        stalled = (
            transport
            for transport, stall in self._stalled.items()
            if now - stall.since >= STALLED_S
            and transport in self._open
            and transport.get_write_buffer_size()
        )
        waiting = (transport for phase in GIVING_WAY for transport in self._waiting[phase])
        oldest = next(stalled, None) or next(waiting, None)
        if oldest is None:
            return False
        self.report("gave way to new ones")
        self._drop(oldest)
        return True

    def _close(self, transport: asyncio.Transport, phase: WaitingPhase) -> None:
        if phase.fault is not None:
            self.report(phase.fault)
        transport.write(phase.reply)
        transport.close()
        self.leave(transport)

    def _check_progress(self, transport: asyncio.Transport, stall: Stall, now: float) -> None:
        unsent = transport.get_write_buffer_size()
        if unsent == 0:
            self.resume(transport)
            return
        if now - stall.checked_at >= WRITE_S:
            if stall.num_bytes - unsent < MIN_READ_BYTES:
                self.report("did not read their replies")
                self._drop(transport)
                return
            stall.checked_at, stall.num_bytes = now, unsent
        if now - stall.since >= STALLED_S:
            self._hold(transport, stall, unsent)

    def _hold(self, transport: asyncio.Transport, stall: Stall, num_bytes: int) -> None:
        """Count the unsent bytes of a stalled reply. If they are too many, the tenant's longest stalled give way."""
        self._unsent.give_back(stall.tenant, stall.num_held)
        stall.num_held = 0
        while not self._unsent.has(stall.tenant, num_bytes):
            longest = next(each for each, other in self._stalled.items() if other.tenant == stall.tenant)
            self.report("left too much unread")
            self._drop(longest)
            if longest is transport:
                return
        self._unsent.take(stall.tenant, num_bytes)
        stall.num_held = num_bytes

    def _drop(self, transport: asyncio.Transport) -> None:
        transport.abort()
        # At once: the protocol learns of the end only in the event loop's next turn.
        self.forget(transport)


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
