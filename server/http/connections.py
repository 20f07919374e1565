"""Bounds on the connections of one port: their number, how long each may wait, and what it leaves unread.

`HttpConnection` reports each change of a connection's phase. `sweep`, called once per second, closes the late ones. A
new connection beyond the bound takes the place of one whose reply is stalled, or else of one that waits, so that
clients which read or send nothing cannot keep others out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass

import msgspec

from server.fair_budget import FairBudget

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
