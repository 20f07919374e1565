"""The web server of one process: uvicorn on uvloop and httptools, with bounds on connections and a client's time.

uvicorn waits without end for heads, for the rest of refused bodies and for clients that do not read. `HttpConnection`
reports each change of a connection's phase to `Connections`, whose `sweep` closes the late ones. A new connection
beyond the bound takes the place of another: of a caller without a valid key, of one whose reply is stalled or that
waits, or of the tenant with the most connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import httptools
import msgspec
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from server.fairness import FairBudget
from server.tenants.loop_ledger import NOBODY, PROBES, WITHOUT_KEY, Account, Turns, start_charged, timed_task

log = logging.getLogger(__name__)

# A client must read this much of its reply in each `WRITE_S`.
MIN_READ_BYTES = 32 << 10
WRITE_S = 60.0
# A reply is stalled when nothing could be written for so long: its connection may then give way to others.
STALLED_S = 1.0
# Connections beyond the bound. They are answered if there is a place for them when their request has come, or if they
# ask for the server's health.
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
        turns: of the requests of all ports.
        has_keys: the application tells the owner of each connection; without keys, none has one.
    """

    def __init__(self, max_connections: int, unsent: FairBudget, turns: Turns, *, has_keys: bool) -> None:
        self.has_keys = has_keys
        self.turns = turns
        self._max_connections = max_connections
        self._unsent = unsent
        self._open: set[asyncio.Transport] = set()
        # Of open connections whose caller is known: the tenant of the last valid key, or NOBODY.
        self._owners: dict[asyncio.Transport, str] = {}
        # By owner, the oldest first.
        self._owned: dict[str, dict[asyncio.Transport, None]] = {}
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

    def may_answer(self, transport: asyncio.Transport, *, is_probe: bool, has_key: bool, now: float) -> bool:
        """Return whether the application gets a request.

        In reserve, it needs a free place, or is a probe of the server, or has a key: `identify` decides then.
        """
        if transport not in self._reserved or self._place(transport, now):
            return True
        if is_probe or (has_key and self.has_keys):
            return True
        self.report("found no free connection")
        return False

    def identify(self, transport: asyncio.Transport, tenant: str, now: float) -> bool:
        """Note the owner of a connection. Return False if it is in reserve and there is no place for its tenant.

        The connection of a tenant stays the tenant's until another valid key comes.
        """
        if transport in self._reserved and tenant != NOBODY and not self._place(transport, now, tenant):
            self.report("found no free connection")
            return False
        if transport in self._open and (tenant != NOBODY or transport not in self._owners):
            self._disown(transport)
            self._owners[transport] = tenant
            self._owned.setdefault(tenant, {})[transport] = None
        return True

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
        self._disown(transport)
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

    def _place(self, transport: asyncio.Transport, now: float, tenant: str | None = None) -> bool:
        """Give a connection in reserve a place, if there is one or another gives way; see `_make_room`."""
        has_place = self._make_room(now, tenant)
        if has_place:
            self.forget(transport)
            self._open.add(transport)
        return has_place

    def _make_room(self, now: float, tenant: str | None = None) -> bool:
        """Return whether one more connection may be open, after one has given way if there are too many.

        Args:
            tenant: the owner of the new one. One that is not known ends no request of a tenant.
        """
        if len(self._open) < self._max_connections:
            return True
        leaving = next(iter(self._owned.get(NOBODY, ())), None) or self._waiting_one(now)
        if leaving is None and tenant is not None:
            leaving = self._one_of_more(tenant)
        if leaving is None:
            return False
        self.report("gave way to new ones")
        self._drop(leaving)
        return True

    def _waiting_one(self, now: float) -> asyncio.Transport | None:
        """Return a connection that is stalled, or else one that waits: without an owner, or of the largest owner."""
        unknown = (transport for transport in self._idle(now) if transport not in self._owners)
        return next(unknown, None) or max(self._idle(now), key=self._num_beside, default=None)

    def _idle(self, now: float) -> Iterator[asyncio.Transport]:
        """Yield the open connections whose replies are stalled, then those that wait, the longest first."""
        stalled = (
            transport
            for transport, stall in self._stalled.items()
            if now - stall.since >= STALLED_S
            and transport in self._open
            and transport.get_write_buffer_size()
        )
        return chain(stalled, *(self._waiting[phase] for phase in GIVING_WAY))

    def _num_beside(self, transport: asyncio.Transport) -> int:
        return len(self._owned[self._owners[transport]])

    def _one_of_more(self, tenant: str) -> asyncio.Transport | None:
        """Return the newest connection of the tenant with the most, if it would have more than the given one.

        The new one counts, so that two tenants never end each other's requests in turn.
        """
        most = max(self._owned.values(), key=len, default={})
        num_own = len(self._owned.get(tenant, ())) + 1
        return next(reversed(most)) if len(most) > num_own else None

    def _disown(self, transport: asyncio.Transport) -> None:
        owner = self._owners.pop(transport, None)
        if owner is not None:
            del self._owned[owner][transport]
            if not self._owned[owner]:
                del self._owned[owner]

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
# Bound on a head, and on trailers.
MAX_HEAD_BYTES = 64 << 10
# Bound on the size of a chunk with its extensions, of which none is known.
MAX_CHUNK_LINE = 4 << 10
MAX_FIELDS = 256
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
        # What comes after the request under way is left out, and the connection ends with its reply.
        self._is_deaf = False
        self._num_head_bytes = 0
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
        self._turns.leave(self, self._owner)
        # uvicorn tells only the last of several pipelined requests, which is not the one that is being answered.
        if self._answering is not None:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        begun = time.thread_time()
        try:
            self._feed(data)
        finally:
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
        except httptools.HttpParserError:
            if self._is_deaf:
                self.flow.pause_reading()
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
        if self.parser.should_upgrade():
            self._framing = [field for field in self.headers if field[0] in FRAMING]

    def on_chunk_header(self) -> None:
        self._in_chunk_line = False

    def on_chunk_complete(self) -> None:
        self._in_chunk_line = True

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._has_body, self._num_head_bytes = True, 0

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
