"""The engine's loop: receive messages, step, send what came of it. Owns the thread that owns the model.

Clients reach it through `clients.py` alone, from other processes or from threads of the same one.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial

from deltastore.errors import PeraxisError
from deltastore.registry.records import VersionRecord
from server.deltas.residency import Prefetch, Residency, Unload
from server.engine.clients import Clients, EngineSocket, Inbox
from server.engine.core import EngineCore
from server.errors import Draining, EngineFailed, QueueFull
from server.metrics.metrics import EngineMetrics
from server.protocol.messages import (
    VERSION,
    Beat,
    CallDone,
    Cancel,
    ClientGone,
    ClientMessage,
    DeltaState,
    EngineFacts,
    ErrorEvent,
    ForgetVariants,
    Hello,
    LoadCall,
    Mask,
    MetricsAnswer,
    MetricsQuery,
    Pause,
    PinChanged,
    Refused,
    ResidencyAnswer,
    ResidencyQuery,
    Resident,
    ResidentsAnswer,
    ResidentsQuery,
    StopSequence,
    Submit,
    Welcome,
    decode_client_message,
    decode_header,
)
from server.protocol.step_page import StepPage, Suspect

SWITCH_S = 0.0005  # between the interpreter's thread switches; Python's default is ten times as long
IDLE_S = 0.2  # between checks for work when nothing arrives
BEAT_S = 0.5
# Deltas in one answer.
MAX_RESIDENTS = 4096


class Engine:
    """Serves clients on the thread that calls `run`."""

    def __init__(
        self,
        core: EngineCore,
        residency: Residency,
        socket: EngineSocket,
        facts: EngineFacts,
        metrics: EngineMetrics,
    ) -> None:
        self._core = core
        self._residency = residency
        self._socket = socket
        self._inbox = Inbox()
        self._clients = Clients(socket)
        self._facts = facts
        self._metrics = metrics
        self._next_beat = 0.0
        self._is_supervised = False

    def supervise(self, page: StepPage, suspects: Iterable[Suspect]) -> None:
        """Leave open requests to the next engine when this one fails, and tell the supervisor at which it was.

        Args:
            page: takes each step.
            suspects: requests with which the engine before this one died.
        """
        self._core.supervise(page, suspects)
        self._is_supervised = True

    def run(self, stopping: threading.Event) -> None:
        """Step until `stopping` is set; then, or when the device is lost, answer every request with an error.

        Raises:
            Exception: the model's own, when its device does not work any more.
        """
        sys.setswitchinterval(SWITCH_S)
        busy = False
        try:
            while not stopping.is_set():
                self._receive(0.0 if busy or self._inbox else IDLE_S)
                if self._core.sample_masked():
                    self._clients.send_events()
                busy = self._core.step()
                self._send()
            self._fail_all(Draining("the server has shut down: send the request again"))
        except BaseException:
            if not self._is_supervised:
                self._fail_all(EngineFailed("the engine has failed: send the request again"))
            raise
        finally:
            self._clients.send_events()
            self._residency.close()

    def _receive(self, wait_s: float) -> None:
        """Take in what has come, and read as much of it as a step may be delayed by."""
        self._take_in(wait_s)
        for tenant, identity, raw in self._inbox.take():
            began = time.monotonic()
            try:
                self._handle(identity, decode_client_message(raw))
            except PeraxisError as error:
                self._clients.send(identity, Refused(error))
            if tenant:
                self._core.charge_reading(tenant, time.monotonic() - began)

    def _take_in(self, wait_s: float) -> None:
        """Let what has come wait for its turn; refuse the requests of a tenant that has too much of it."""
        for identity, head, raw in self._socket.receive(wait_s):
            try:
                header = decode_header(head)
            except PeraxisError as error:
                self._clients.send(identity, Refused(error))
                continue
            try:
                self._inbox.put(identity, header, raw)
            except QueueFull as error:
                assert header.refusable is not None
                self._metrics.rejected(header.tenant, error)
                self._refuse(identity, header.refusable, error)

    def _refuse(self, identity: bytes, request_id: str, error: PeraxisError) -> None:
        """Answer a request that was not admitted."""
        self._clients.open_request(identity, request_id)
        self._clients.add_event(identity, request_id, ErrorEvent(error))

    def _fail_all(self, error: PeraxisError) -> None:
        """Answer all requests and calls with an error, those too that have come and will not be read any more."""
        self._core.fail_all(error)
        self._take_in(0.0)
        for _, identity, raw in self._inbox.take(math.inf):
            try:
                message = decode_client_message(raw)
            except PeraxisError:
                continue
            if isinstance(message, Submit):
                self._refuse(identity, message.request.id, error)
            elif isinstance(message, LoadCall):
                self._clients.send(identity, CallDone(message.call_id, error))

    def _send(self) -> None:
        """Send events, and what clients watch: the pins and a sign of life."""
        self._clients.send_events()
        for record, is_pinned in self._residency.take_pin_changes():
            self._clients.broadcast(PinChanged(record, is_pinned))
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self._clients.broadcast(Beat())
        for identity in self._clients.take_lost():
            self._cancel_all_of(identity)
        for request_id in self._clients.take_unsendable():
            self._core.cancel(request_id)

    def _handle(self, identity: bytes, message: ClientMessage) -> None:
        """Act on one message of a client; raise the error that refuses it."""
        core, clients = self._core, self._clients
        match message:
            case Submit(request, submitted_at, first_mask, progress):
                clients.open_request(identity, request.id)
                on_event = partial(clients.add_event, identity, request.id)
                core.add_request(request, on_event, submitted_at, first_mask, progress)
            case Cancel(request_id):
                core.cancel(request_id)
            case StopSequence(request_id, index):
                core.stop_sequence(request_id, index)
            case Pause(request_id, is_paused):
                core.set_paused(request_id, is_paused)
            case Mask():
                core.set_mask(message)
            case LoadCall():
                self._call(identity, message)
            case ResidencyQuery(call_id, versions):
                states = states_of(self._residency, core.versions_in_use(), versions)
                clients.send(identity, ResidencyAnswer(call_id, states))
            case MetricsQuery(call_id):
                clients.send(identity, MetricsAnswer(call_id, self._metrics.snapshot()))
            case ResidentsQuery(call_id):
                found = residents(self._residency, core.versions_in_use())
                clients.send(identity, ResidentsAnswer(call_id, found))
            case ForgetVariants(labels):
                self._metrics.forget_variants(labels)
            case ClientGone(gone):
                self._cancel_all_of(gone)
            case Hello(version):
                self._welcome(identity, version)

    def _welcome(self, identity: bytes, version: str) -> None:
        if version != VERSION:
            raise EngineFailed(
                f"a client of version {version} met an engine of version {VERSION}: restart the server"
            )
        self._clients.add(identity)
        self._clients.send(identity, Welcome(self._facts))
        for record in self._residency.pinned_records():
            self._clients.send(identity, PinChanged(record, is_pinned=True))

    def _call(self, identity: bytes, call: LoadCall) -> None:
        """Start a call that loads, pins or unloads; send its outcome when there is one."""
        future: Future[None] = Future()
        future.add_done_callback(
            lambda done: self._clients.send(identity, CallDone(call.call_id, _error_of(done)))
        )
        calls = self._core.residency_calls
        try:
            if call.action == "unpin":
                self._residency.unpin(call.record.label)
                future.set_result(None)
            elif call.action == "unload":
                calls.add_unload(Unload(call.record, future))
            else:
                calls.add_prefetch(Prefetch(call.record, call.action == "pin", future, call.max_pinned))
        except QueueFull as error:
            future.set_exception(error)

    def _cancel_all_of(self, identity: bytes) -> None:
        for request_id in list(self._clients.remove(identity)):
            self._core.cancel(request_id)


def _error_of(done: Future[None]) -> PeraxisError | None:
    error = done.exception()
    return error if error is None or isinstance(error, PeraxisError) else EngineFailed(str(error))


def states_of(
    residency: Residency, in_use: Iterable[VersionRecord], versions: tuple[str, ...]
) -> tuple[DeltaState, ...]:
    """Return the level of each version's delta, whether it is pinned, and its number of requests.

    Args:
        in_use: the version of each admitted request.
        versions: labels of versions.
    """
    counts = Counter(record.label for record in in_use)
    return tuple(
        DeltaState(residency.level_of(version), residency.is_pinned(version), counts[version])
        for version in versions
    )


def residents(residency: Residency, in_use: Iterable[VersionRecord]) -> tuple[Resident, ...]:
    """Return the versions of the deltas in memory, the least recently used first.

    Of more than `MAX_RESIDENTS` deltas, those that were used last, so that the answer delays a step by a bounded time.
    """
    records = residency.records()[-MAX_RESIDENTS:]
    states = states_of(residency, in_use, tuple(record.label for record in records))
    return tuple(
        Resident(record.tenant, record.name, record.version, record.digest, record.device_bytes, state)
        for record, state in zip(records, states, strict=True)
    )
