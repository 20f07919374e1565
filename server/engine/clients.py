"""The engine's clients: the ZeroMQ socket that they share, their messages in turn, their requests and events. No torch.

Engine thread only. The engine cancels the requests of a client that is gone. Events for a client that does not read are
kept; the number of its open requests bounds them, and the supervisor kills a process that does not recover.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import zmq

from deltastore.errors import PeraxisError
from server.engine.sequence import LeastServed
from server.errors import EngineFailed
from server.fairness import FairBudget
from server.protocol.messages import (
    MAX_MESSAGE_BYTES,
    Beat,
    CallDone,
    DoneEvent,
    EngineMessage,
    ErrorEvent,
    Event,
    Header,
    MetricsAnswer,
    Outputs,
    PromptEvent,
    Refused,
    ResidencyAnswer,
    ResidentsAnswer,
    TokenEvent,
    encode,
)

# Messages that wait in ZeroMQ for a client that does not read.
MAX_WAITING_MESSAGES = 10_000
# How long the last messages may take to leave after `close`.
LINGER_MS = 1000


class ClientLost(Exception):
    """A message cannot be delivered: its client is gone."""


class EngineSocket:
    """Receives from any client and sends to one by its identity. One thread uses it; `wake` may be called from any.

    Raises:
        EngineFailed: the address cannot be bound, as on a full disk.
    """

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        # Otherwise ZeroMQ drops messages to clients that are gone, and their requests would run on.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.set_hwm(MAX_WAITING_MESSAGES)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close(0)
            reason = os.strerror(error.errno or errno.EIO)
            raise EngineFailed(f"cannot bind the engine's socket {address}: {reason}") from error
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakeup, zmq.POLLIN)

    def receive(self, wait_s: float) -> list[tuple[bytes, bytes, bytes]]:
        """Return what has arrived: the client's identity, a message's header and the message.

        Wait up to `wait_s` for the first or for `wake`.
        """
        ready = dict(self._poller.poll(int(wait_s * 1000)))
        if self._wakeup in ready:
            os.eventfd_read(self._wakeup)
        received: list[tuple[bytes, bytes, bytes]] = []
        while self._socket in ready:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) == 3:
                received.append((frames[0], frames[1], frames[2]))
        return received

    def send(self, identity: bytes, raw: bytes) -> bool:
        """Send to one client without waiting. Return False if `MAX_WAITING_MESSAGES` wait for it already.

        Raises:
            ClientLost: the client is gone.
        """
        try:
            self._socket.send_multipart([identity, raw], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            # EHOSTUNREACH, or another error of this client's connection alone.
            raise ClientLost(identity) from error
        return True

    def wake(self) -> None:
        """End the wait in `receive`: the engine has something to do although no message came."""
        os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Close after the last messages have left, or `LINGER_MS`."""
        self._socket.close(LINGER_MS)
        os.close(self._wakeup)


# Read between two steps: some forty prompts of 8,000 tokens, or the masks of 128 sequences and 256k tokens.
TURN_BYTES = 4 << 20
# Counted for each request beside its bytes: about what admitting it takes.
REQUEST_BYTES = 64 << 10
# Of requests that are not read yet. A tenant's may have as many as it leaves free.
MAX_UNREAD_BYTES = 256 << 20


@dataclass(slots=True)
class _Unread:
    """A message that has come."""

    identity: bytes  # of its client
    raw: bytes
    cost: int
    num_held: int  # bytes of the budget


@dataclass(slots=True, eq=False)
class _TenantMessages:
    """The messages of one tenant, in the order in which each client sent its own."""

    tenant: str
    counter: float = 0.0  # bytes read
    messages: deque[_Unread] = field(default_factory=deque)

    @property
    def is_ready(self) -> bool:
        return bool(self.messages)

    @property
    def is_idle(self) -> bool:
        return not self.messages


class Inbox:
    """Messages that have come and are not read yet: a tenant's in their order, and of tenants the least read first.

    So prompts of one tenant, however many have come, delay each step by a bounded time and another tenant's by less.
    """

    def __init__(self) -> None:
        self._queues: LeastServed[str, _TenantMessages] = LeastServed(_TenantMessages)
        self._budget = FairBudget(MAX_UNREAD_BYTES, "bytes of requests")
        self._num_unread = 0

    def __len__(self) -> int:
        return self._num_unread

    def put(self, identity: bytes, header: Header, raw: bytes) -> None:
        """Keep a message until its turn.

        Raises:
            QueueFull: it brings a request, and its tenant has too many bytes of them unread.
        """
        is_new = header.refusable is not None
        num_held = len(raw) if is_new else 0
        self._budget.take(header.tenant, num_held)
        queue = self._queues.get(header.tenant)
        cost = len(raw) + (REQUEST_BYTES if is_new else 0)
        queue.messages.append(_Unread(identity, raw, cost, num_held))
        self._num_unread += 1
        if len(queue.messages) == 1:
            self._queues.activate(queue)

    def take(self, max_cost: float = TURN_BYTES) -> Iterator[tuple[str, bytes, bytes]]:
        """Yield messages behind their tenant and their client's identity until they have cost so much; at least one."""
        cost = 0
        while cost < max_cost and (queue := self._queues.first()) is not None:
            unread = queue.messages.popleft()
            queue.counter += unread.cost
            cost += unread.cost
            self._num_unread -= 1
            self._budget.give_back(queue.tenant, unread.num_held)
            yield queue.tenant, unread.identity, unread.raw


log = logging.getLogger(__name__)

# Between two looks at whether to stop refusing clients.
LOOK_S = 0.1
# Tokens and log-probabilities of one message, each of less than 300 bytes with the id of its request.
MAX_SENT = 1 << 16


@dataclass(slots=True)
class _Client:
    """One client that has said Hello."""

    request_ids: set[str] = field(default_factory=set)
    events: list[tuple[str, Event]] = field(default_factory=list)  # not yet sent
    unsent: deque[EngineMessage] = field(default_factory=deque)  # for which ZeroMQ had no room


class Clients:
    """Sends messages to clients and notes which of them are lost."""

    def __init__(self, socket: EngineSocket) -> None:
        self._socket = socket
        self._clients: dict[bytes, _Client] = {}
        self._lost: list[bytes] = []
        self._unsendable: list[str] = []

    def add(self, identity: bytes) -> None:
        """Add a client that has said Hello."""
        self._clients.setdefault(identity, _Client())

    def open_request(self, identity: bytes, request_id: str) -> None:
        """Note a client's request, until its last event."""
        self._clients.setdefault(identity, _Client()).request_ids.add(request_id)

    def add_event(self, identity: bytes, request_id: str, event: Event) -> None:
        """Keep an event of a client's request for the next `send_events`."""
        client = self._clients.get(identity)
        if client is None:
            return
        client.events.append((request_id, event))
        if isinstance(event, DoneEvent | ErrorEvent):
            client.request_ids.discard(request_id)

    def send_events(self) -> None:
        """Send each client the events since the last call, after all that was sent before.

        They are one message, unless there are so many that it could be too large.
        """
        for identity, client in list(self._clients.items()):
            while client.unsent and self._deliver(identity, client.unsent[0]):
                client.unsent.popleft()
            if client.events and not client.unsent:
                events, client.events = client.events, []
                for part in _parts(events):
                    self.send(identity, Outputs(part))

    def send(self, identity: bytes, message: EngineMessage) -> None:
        """Send one client a message, or keep it until there is room for it."""
        client = self._clients.get(identity)
        if client is None:
            self._deliver(identity, message)
        elif isinstance(message, Beat):
            # A sign of life tells nothing later.
            self._deliver(identity, message)
        elif client.unsent or not self._deliver(identity, message):
            client.unsent.append(message)

    def _deliver(self, identity: bytes, message: EngineMessage) -> bool:
        """Return whether ZeroMQ had room for a message; a client that is gone takes any."""
        try:
            return self._socket.send(identity, self._encoded(message))
        except ClientLost:
            log.info("client %s is gone", identity.decode(errors="replace"))
            self._lost.append(identity)
            return True

    def _encoded(self, message: EngineMessage) -> bytes:
        """Return a message's bytes, or those of an error to the same request or call if it cannot be sent."""
        try:
            return encode(message)
        except Exception as error:  # nothing that a message holds may end the engine
            log.exception("a message cannot be sent: %s", type(message).__name__)
            failed = EngineFailed(f"the engine's answer cannot be sent: {type(error).__name__}")
        if isinstance(message, Outputs):
            request_ids = tuple(dict.fromkeys(request_id for request_id, _ in message.events))
            self._unsendable += request_ids
            return encode(Outputs(tuple((request_id, ErrorEvent(failed)) for request_id in request_ids)))
        if isinstance(message, CallDone | ResidencyAnswer | ResidentsAnswer | MetricsAnswer):
            return encode(CallDone(message.call_id, failed))
        return encode(Beat())

    def take_unsendable(self) -> list[str]:
        """Return the requests whose events could not be sent since the last call."""
        request_ids, self._unsendable = self._unsendable, []
        return request_ids

    def broadcast(self, message: EngineMessage) -> None:
        """Send every client a message."""
        for identity in list(self._clients):
            self.send(identity, message)

    def remove(self, identity: bytes) -> Iterable[str]:
        """Forget a client that has died. Return the ids of its open requests."""
        client = self._clients.pop(identity, None)
        return () if client is None else client.request_ids

    def take_lost(self) -> list[bytes]:
        """Return the clients that a message could not be delivered to since the last call."""
        lost, self._lost = self._lost, []
        return lost


def _parts(events: list[tuple[str, Event]]) -> Iterator[tuple[tuple[str, Event], ...]]:
    """Divide events behind each PromptEvent, which may be many megabytes, and behind `MAX_SENT` tokens."""
    begin = num_sent = 0
    for end, (_, event) in enumerate(events, 1):
        num_sent += 1 + len(event.top) if isinstance(event, TokenEvent) else 1
        if isinstance(event, PromptEvent) or num_sent >= MAX_SENT:
            yield tuple(events[begin:end])
            begin, num_sent = end, 0
    if begin < len(events):
        yield tuple(events[begin:])


def refuse_clients(
    socket: EngineSocket, error: PeraxisError, wait_s: float, stopping: threading.Event
) -> None:
    """Answer the clients' first messages with an error, because the base could not be loaded.

    Returns `wait_s` after the last message, or when `stopping` is set.
    """
    clients, end = Clients(socket), time.monotonic() + wait_s
    while not stopping.is_set() and time.monotonic() < end:
        for identity, *_ in socket.receive(LOOK_S):
            clients.send(identity, Refused(error))
            end = time.monotonic()
