"""The connections of one port: how many a turn of the event loop accepts, and which give way when there are too many.

`Connections` is told of each change of a connection's phase, and its `sweep` closes the late ones. A new connection
beyond the bound takes the place of another: of a caller without a valid key, of one whose reply is stalled or that
waits, or of the tenant with the most connections.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import chain

import msgspec

from server.fairness import FairBudget
from server.tenants.loop_ledger import NOBODY, Turns

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


# Pieces of what callers without a key have sent that a turn of the event loop reads: some 10 ms. With fewer,
# connections whose heads wait give way to new ones before they are answered.
READ_PER_TURN = 32
# And no further piece is read when a turn has taken so long: what is in a piece decides how long it takes.
READING_S = 0.02
# Bound on the pieces that wait: thousands of heads of usual size.
MAX_UNREAD_BYTES = 16 << 20


class ReadingTurns:
    """The turns of the event loop in which pieces that connections have sent are read, a few in each.

    Those that came last are read first. While more come than are read, some wait for longer than their clients do in
    any order, and so the others are answered at once.
    """

    def __init__(self) -> None:
        self._num_left = READ_PER_TURN
        self._until = 0.0  # of this thread's time
        self._num_bytes = 0
        self._waiting: dict[Hashable, tuple[Callable[[], None], int]] = {}

    def begin(self) -> bool:
        """Return whether one more piece may be read in this turn, and count it then."""
        if self._num_left == READ_PER_TURN:
            self._until = time.thread_time() + READING_S
            asyncio.get_running_loop().call_soon(self._turn)
        elif not self._num_left or time.thread_time() > self._until:
            return False
        self._num_left -= 1
        return True

    def wait(self, key: Hashable, num_bytes: int, read: Callable[[], None]) -> bool:
        """Have so many bytes read in a later turn, unless `leave` is called with the key before.

        Return False if too many wait.
        """
        if self._num_bytes + num_bytes > MAX_UNREAD_BYTES:
            return False
        _, num_before = self._waiting.pop(key, (read, 0))
        self._waiting[key] = read, num_before + num_bytes
        self._num_bytes += num_bytes
        return True

    def leave(self, key: Hashable) -> None:
        """Forget what waits to be read; no effect if there is nothing."""
        _, num_bytes = self._waiting.pop(key, (None, 0))
        self._num_bytes -= num_bytes

    def _turn(self) -> None:
        self._num_left = READ_PER_TURN
        while self._waiting and self.begin():
            key, (read, _) = next(reversed(self._waiting.items()))
            self.leave(key)
            read()


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
        self.reading = ReadingTurns()
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


# Some 10 ms. With fewer, those that the kernel has not handed over yet, probes of the server among them, wait longer.
ACCEPTED_PER_TURN = 64
# Until it tries again, if the process has no descriptor left, or the system no memory.
RETRY_S = 0.5


class Listener:
    """Accepts the connections of a listening socket, a few in each turn of the event loop.

    So what is under way goes on between them, however many arrive at once. The event loop's own servers accept all
    that have arrived in one turn. Takes the place of an `asyncio.Server`.

    Args:
        listening: the socket, which listens already and is not closed.
        make: makes the protocol of a connection.
        turns: their ledger is charged.
    """

    def __init__(self, listening: socket.socket, make: Callable[[], asyncio.Protocol], turns: Turns) -> None:
        self._listening = listening
        self._make = make
        self._turns = turns
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[object]] = set()
        self._retry: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        # Inherited by those that it accepts.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._resume()

    def close(self) -> None:
        """Accept no more connections."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listening)

    async def wait_closed(self) -> None:
        """Wait until the last connections that were accepted are open."""
        if self._opening:
            await asyncio.wait(self._opening)

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        begun = time.thread_time()
        try:
            for _ in range(ACCEPTED_PER_TURN):
                self._open(self._listening.accept()[0])
        except (BlockingIOError, ConnectionAbortedError):
            # All that have arrived are accepted, or one has left.
            pass
        except OSError as error:
            log.error("cannot accept connections, and tries again in %g s: %s", RETRY_S, error)
            self._loop.remove_reader(self._listening)
            self._retry = self._loop.call_later(RETRY_S, self._resume)
        self._turns.ledger.charge(self._turns.first_owner, time.thread_time() - begun)

    def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        opening = self._loop.create_task(self._loop.connect_accepted_socket(self._make, connection))
        self._opening.add(opening)
        opening.add_done_callback(self._opened)

    def _opened(self, opening: asyncio.Task[object]) -> None:
        self._opening.discard(opening)
        if not opening.cancelled() and (error := opening.exception()) is not None:
            log.warning("a connection was accepted and cannot be used: %s", error)
