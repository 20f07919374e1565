"""Bounds on the connections of one process: their number, and how long each may wait. Knows no request.

`HttpConnection` reports each change of a connection's phase. `sweep`, called once per second, closes the late ones. A
new connection beyond the bound takes the place of one that waits, so that connections which send nothing cannot keep
others out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass

import msgspec

log = logging.getLogger(__name__)

# A client must read this much of its reply in each `WRITE_S`.
MIN_READ_BYTES = 32 << 10
WRITE_S = 60.0
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

    since: float
    num_bytes: int  # unsent at `since`


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


class Connections:
    """The open connections of one process, by transport. Use it on the event loop only."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._open: set[asyncio.Transport] = set()
        # The transports of each phase with the time at which it began, the oldest first.
        # The first phases lose their connections first when there are too many.
        self._waiting: dict[WaitingPhase, dict[asyncio.Transport, float]] = {
            LINGERING: {},
            IDLE: {},
            HEAD: {},
        }
        self._stalled: dict[asyncio.Transport, Stall] = {}
        self._faults: Counter[str] = Counter()
        self._next_log = 0.0

    def admit(self, transport: asyncio.Transport) -> bool:
        """Count a new connection, closing one that waits if there are too many; False refuses the new one."""
        if len(self._open) >= self._max_connections:
            waiting = next(filter(None, self._waiting.values()), None)
            if waiting is None:
                self.report("found no free connection")
                return False
            self.report("gave way to new ones")
            self._drop(next(iter(waiting)))
        self._open.add(transport)
        return True

    def enter(self, phase: WaitingPhase, transport: asyncio.Transport, now: float) -> None:
        """Begin a phase, which ends the connection's last one."""
        self.leave(transport)
        if transport in self._open:
            self._waiting[phase][transport] = now

    def leave(self, transport: asyncio.Transport) -> None:
        """End the phase of a connection: its request is being answered."""
        for transports in self._waiting.values():
            transports.pop(transport, None)

    def stall(self, transport: asyncio.Transport, now: float) -> None:
        """Watch a connection with unsent bytes until `resume`, or until they are sent."""
        self._stalled.setdefault(transport, Stall(now, transport.get_write_buffer_size()))

    def resume(self, transport: asyncio.Transport) -> None:
        self._stalled.pop(transport, None)

    def forget(self, transport: asyncio.Transport) -> None:
        """Drop a connection that is closed."""
        self._open.discard(transport)
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
            self._check_progress(transport, stall, now)
        if self._faults and now >= self._next_log:
            log.warning("connections: %s", ", ".join(f"{n} {fault}" for fault, n in self._faults.items()))
            self._faults.clear()
            self._next_log = now + LOG_INTERVAL_S

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
        elif now - stall.since >= WRITE_S:
            if stall.num_bytes - unsent >= MIN_READ_BYTES:
                self._stalled[transport] = Stall(now, unsent)
                return
            self.report("did not read their replies")
            self._drop(transport)

    def _drop(self, transport: asyncio.Transport) -> None:
        transport.abort()
        # At once: the protocol learns of the end only in the event loop's next turn.
        self.forget(transport)
