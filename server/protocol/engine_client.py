"""The engine as an HTTP process and the supervisor see it: requests and calls go out, events and answers come back.

`EngineClient` is the link to one engine over ZeroMQ, and `server/scale/replica_link.py` the one to replicas of Ray
Serve. Everything happens on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Protocol

import zmq

from deltastore.errors import PeraxisError
from deltastore.registry.records import VersionRecord
from server.errors import EndedEngine, EngineRestarted, QueueFull, VersionEndsEngines
from server.fairness import FairBudget
from server.metrics.instruments import Snapshot
from server.protocol.messages import (
    MAX_MESSAGE_BYTES,
    Beat,
    CallDone,
    Cancel,
    ClientGone,
    ClientMessage,
    DeltaState,
    DoneEvent,
    EngineFacts,
    EngineMessage,
    ErrorEvent,
    Event,
    FinishEvent,
    ForgetVariants,
    Header,
    Hello,
    LoadAction,
    LoadCall,
    Mask,
    MetricsAnswer,
    MetricsQuery,
    Outputs,
    Pause,
    PinChanged,
    Progress,
    PromptEvent,
    Refused,
    ResidencyAnswer,
    ResidencyQuery,
    Resident,
    ResidentsAnswer,
    ResidentsQuery,
    SequenceProgress,
    StopSequence,
    Submit,
    TokenEvent,
    Welcome,
    decode_engine_message,
    encode,
    encode_header,
)
from server.protocol.request import Request, TokenIds, token_ids_of

OnEvent = Callable[[Event], None]


class EngineLink(Protocol):
    """A link to an engine, or to several that answer as one. Event loop only."""

    @property
    def identity(self) -> bytes:
        """The name of the HTTP process to the engine."""

    @property
    def pinned(self) -> tuple[VersionRecord, ...]:
        """All pinned versions."""

    @property
    def facts(self) -> EngineFacts:
        """The facts of the engine, or of the one before it while it restarts; raises QueueFull before the first."""

    @property
    def has_facts(self) -> bool:
        """True once an engine has loaded the base."""

    def check_ready(self) -> None:
        """Raise QueueFull while the base loads, or EngineRestarted while the engine is started again."""

    def disconnect(self, error: PeraxisError | None = None) -> None:
        """End the connection and every request and call with `error`, by default EngineRestarted."""

    def submit(self, request: Request, on_event: OnEvent, first_mask: bytes | None = None) -> None:
        """Send a request; `on_event` is called with each event, a DoneEvent or an ErrorEvent last.

        A constrained request has a `first_mask` for the first token of each sequence; `send_mask` sends the others.

        Raises:
            InvalidRequest: it is too large.
            QueueFull, EngineRestarted: it can be sent again later.
        """

    def cancel(self, request_id: str) -> None:
        """End a request whose client is gone. Its events are dropped from now on."""

    def stop_sequence(self, request_id: str, index: int) -> None:
        """End one sequence, whose text holds a stop string. Tokens already computed may still come."""

    def set_paused(self, request_id: str, is_paused: bool) -> None:
        """Let a request whose events are not read wait outside the batch, or go on. A few events may still come."""

    def send_mask(self, request_id: str, index: int, position: int, bits: bytes | None) -> None:
        """Send the mask for the next token of a sequence that has `position` tokens; None ends its constraint."""

    def load(
        self, action: LoadAction, record: VersionRecord, max_pinned: int | None = None
    ) -> asyncio.Future[None]:
        """Load a version into a slot, pin it there, unpin it or free its slot; done when that has happened."""

    async def residency_of(self, versions: Sequence[str], tenant: str) -> tuple[DeltaState, ...]:
        """Return the state of each version, named by its label; without a ready engine all are on disk.

        Args:
            tenant: the one that asks, which may not own the versions.

        Raises:
            QueueFull: too many questions of the tenant wait, or the engine has not answered for `STATES_S`.
            EngineRestarted: the engine ended before it had answered.
        """


log = logging.getLogger(__name__)

# Messages that wait for an engine that does not read, as during a long step.
MAX_WAITING_MESSAGES = 10_000
RETRY_S = 0.1
# Versions of one ResidencyQuery, which the engine answers between two steps.
MAX_ASKED = 500
# Versions that calls wait for and that are not asked for yet. One tenant may have as many as it leaves free.
MAX_UNASKED = 1 << 16
# How long a call waits for the states of `MAX_ASKED` versions, as long as for a list of the registry's.
STATES_S = 30.0


class StateQuestions:
    """Asks for the states of versions: of all that calls wait for, `MAX_ASKED` in tenants' turns at a time.

    A tenant's calls for one version share an answer, for which was asked after the last of them. Event loop only.

    Args:
        ask: returns the states of up to `MAX_ASKED` versions, not all different; called again when it has ended.
    """

    def __init__(self, ask: Callable[[tuple[str, ...]], Awaitable[tuple[DeltaState, ...]]]) -> None:
        self._ask = ask
        # By tenant, the next to be asked for first, and by version.
        self._unasked: dict[str, dict[str, asyncio.Future[DeltaState]]] = {}
        self._budget = FairBudget(MAX_UNASKED, "questions for the levels of versions")
        self._asking: asyncio.Task[None] | None = None

    async def states_of(self, versions: Sequence[str], tenant: str) -> tuple[DeltaState, ...]:
        """Return the states of versions for a tenant; raises as `EngineLink.residency_of`, or what `ask` raises."""
        states: list[DeltaState] = []
        for start in range(0, len(versions), MAX_ASKED):
            answers = self._put(versions[start : start + MAX_ASKED], tenant)
            try:
                async with asyncio.timeout(STATES_S):
                    # Shielded, since other calls wait for them, too.
                    states += [await asyncio.shield(answer) for answer in answers]
            except TimeoutError:
                raise QueueFull(
                    f"the engine has told no levels for {STATES_S:g} s: try again in a moment"
                ) from None
        return tuple(states)

    def _put(self, versions: Sequence[str], tenant: str) -> list[asyncio.Future[DeltaState]]:
        """Return the answers to come. They count until they are asked for, also when the call has left."""
        new = set(versions).difference(self._unasked.get(tenant, ()))
        self._budget.take(tenant, len(new))
        unasked, loop = self._unasked.setdefault(tenant, {}), asyncio.get_running_loop()
        unasked.update((version, loop.create_future()) for version in new)
        if self._asking is None:
            # In a context of its own: no tenant is charged for the questions of others.
            self._asking = loop.create_task(self._ask_all(), context=Context())
        return [unasked[version] for version in versions]

    async def _ask_all(self) -> None:
        try:
            while self._unasked:
                versions, answers = self._take()
                try:
                    states = await self._ask(versions)
                except PeraxisError as error:
                    for answer in answers:
                        answer.set_exception(error)
                        # Read, so that asyncio does not log an error whose calls have left.
                        answer.exception()
                else:
                    for answer, state in zip(answers, states, strict=True):
                        answer.set_result(state)
        finally:
            self._asking = None

    def _take(self) -> tuple[tuple[str, ...], list[asyncio.Future[DeltaState]]]:
        """Return the versions of the next question and where their states belong: of each tenant as many."""
        taken: list[tuple[str, asyncio.Future[DeltaState]]] = []
        share = max(1, MAX_ASKED // len(self._unasked))
        while self._unasked and len(taken) < MAX_ASKED:
            tenant = next(iter(self._unasked))
            unasked = self._unasked.pop(tenant)
            some = list(islice(unasked.items(), min(share, MAX_ASKED - len(taken))))
            taken += some
            self._budget.give_back(tenant, len(some))
            for version, _ in some:
                del unasked[version]
            if unasked:
                # Behind the others.
                self._unasked[tenant] = unasked
        return tuple(version for version, _ in taken), [answer for _, answer in taken]


@dataclass(slots=True)
class _OpenRequest:
    """A request that is not answered in full, and what has come of it: enough to send it to another engine."""

    request: Request
    on_event: OnEvent
    submitted_at: float
    first_mask: bytes | None
    token_ids: dict[int, TokenIds] = field(default_factory=dict)  # by sequence
    over: set[int] = field(default_factory=set)  # sequences that have ended
    # Of each sequence the mask that was sent last, behind its position.
    masks: dict[int, tuple[int, bytes | None]] = field(default_factory=dict)
    has_prompt: bool = False
    is_paused: bool = False
    first_token_at: float | None = None
    lost_at: float | None = None  # since when nothing has come, because its engine has died

    def take_in(self, event: Event) -> None:
        """Note an event that the client gets."""
        self.lost_at = None
        match event:
            case TokenEvent(index, token_id):
                if self.first_token_at is None:
                    self.first_token_at = time.monotonic()
                self.token_ids.setdefault(index, token_ids_of(())).append(token_id)
            case FinishEvent(index):
                self.over.add(index)
            case PromptEvent():
                self.has_prompt = True

    def again(self) -> Submit:
        """Return the message with which another engine goes on."""
        sequences = tuple(map(self._progress, range(self.request.sampling_params.n)))
        progress = Progress(sequences, self.has_prompt, self.first_token_at, self.is_paused)
        return Submit(self.request, self.submitted_at, self.first_mask, progress)

    def _progress(self, index: int) -> SequenceProgress:
        token_ids = self.token_ids.get(index, token_ids_of(()))
        position, bits = self.masks.get(index, (-1, None))
        return SequenceProgress(
            token_ids,
            is_over=index in self.over,
            is_free=position >= 0 and bits is None,
            mask=bits if position == len(token_ids) else None,
        )


class EngineClient:
    """A client of one engine at a time. Use it on the event loop that runs when it is made.

    A request whose engine dies goes on with the next one behind the tokens that have come.

    Args:
        identity: names the client to the engine; no two clients of an engine may share it.
        resume_s: how long a request waits for the first event of another engine.
    """

    def __init__(self, identity: str, resume_s: float = 0.0) -> None:
        self.identity = identity.encode()
        self._resume_s = resume_s
        self.last_beat_at = time.monotonic()
        # Done when the engine has loaded the base; raises the error of an engine that refuses this client.
        self.welcomed: asyncio.Future[EngineFacts]
        self._loop = asyncio.get_running_loop()
        self._facts: EngineFacts | None = None
        self._pinned: dict[str, VersionRecord] = {}  # by label
        # One ResidencyQuery at a time, so that a step answers one of them.
        self._questions = StateQuestions(
            lambda versions: self._call(partial(ResidencyQuery, versions=versions))
        )
        self._socket: zmq.Socket[bytes] | None = None
        self._call_ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._requests: dict[str, _OpenRequest] = {}
        # Labels of versions whose requests have ended engines.
        self._quarantined: frozenset[str] = frozenset()

    @property
    def pinned(self) -> tuple[VersionRecord, ...]:
        """All pinned versions."""
        return tuple(self._pinned.values())

    @property
    def facts(self) -> EngineFacts:
        """The facts of the engine, or of the one before it while it restarts; raises QueueFull before the first."""
        if self._facts is None:
            raise QueueFull("the base is still loading: try again when /ready answers 200")
        return self._facts

    @property
    def has_facts(self) -> bool:
        """True once an engine has loaded the base."""
        return self._facts is not None

    @property
    def num_open(self) -> int:
        """Number of requests that are not answered in full."""
        return len(self._requests)

    def check_ready(self) -> None:
        """Raise QueueFull while the base loads, or EngineRestarted while the engine is started again."""
        if not self._is_welcomed:
            self.facts  # noqa: B018  raises while no engine has been ready yet
            raise _restarted()

    def connect(self, address: str) -> None:
        """Connect to an engine that may not have bound `address` yet. `welcomed` is done when it serves."""
        self._close()
        self.welcomed = self._loop.create_future()
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self.identity)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.set_hwm(MAX_WAITING_MESSAGES)
        self._socket.connect(address)
        self._loop.add_reader(self._socket.FD, self._receive)
        self._send(Hello(), Header())

    def disconnect(self, error: PeraxisError | None = None) -> None:
        """End the connection, if there is one, and every request and call with `error`, by default EngineRestarted."""
        self._close(error)
        for request_id in list(self._requests):
            self._fail(request_id, error or _restarted())

    def engine_lost(
        self, culprits: Collection[str], given_up: Collection[str], quarantined: Collection[str]
    ) -> None:
        """End the connection and its calls. Requests stay open for the next engine, for `resume_s` seconds.

        Args:
            culprits: ids of requests that ended the engine.
            given_up: ids of those that are not sent again, because engines die with them.
            quarantined: labels of versions that are not served any more.
        """
        self._close()
        now = time.monotonic()
        self._quarantined = frozenset(quarantined)
        for request_id, request in list(self._requests.items()):
            if request.lost_at is None:
                request.lost_at = now
            if request_id in culprits:
                self._fail(request_id, _ended_engine())
            elif request.request.version in self._quarantined:
                self._fail(request_id, _quarantined(request.request))
            elif request_id in given_up:
                self._fail(request_id, _restarted())
        self._loop.call_later(self._resume_s, self._fail_late)

    def quarantine(self, versions: Collection[str]) -> None:
        """Refuse requests for these versions, named by their labels, whose requests have ended engines."""
        self._quarantined = frozenset(versions)

    def _fail_late(self) -> None:
        """End the requests that have waited too long for another engine, and look again at those that have not."""
        now, waiting = time.monotonic(), list[float]()
        for request_id, request in list(self._requests.items()):
            if request.lost_at is None:
                continue
            left_s = request.lost_at + self._resume_s - now
            if left_s > 0:
                waiting.append(left_s)
                continue
            self._send_surely(Cancel(request_id), request.request.tenant)
            self._fail(request_id, _restarted())
        if waiting:
            # The timer was early: a loop's clock is that of the turn in which it was set.
            self._loop.call_later(min(waiting), self._fail_late)

    def _fail(self, request_id: str, error: PeraxisError) -> None:
        # An error of another request may have cancelled it just now.
        if (request := self._requests.pop(request_id, None)) is not None:
            request.on_event(ErrorEvent(error))

    def _close(self, error: PeraxisError | None = None) -> None:
        """End the connection, if there is one, and the calls with `error`, by default EngineRestarted."""
        if self._socket is None:
            return
        # What the engine sent last.
        self._receive()
        self._loop.remove_reader(self._socket.FD)
        self._socket.close()
        self._socket = None
        if self.welcomed.done():
            # Read, so that asyncio does not log an error that was acted on otherwise.
            self.welcomed.exception()
        else:
            self.welcomed.cancel()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.done():
                call.set_exception(error or _restarted())

    def submit(self, request: Request, on_event: OnEvent, first_mask: bytes | None = None) -> None:
        """Send a request; `on_event` is called with each event, a DoneEvent or an ErrorEvent last.

        A constrained request has a `first_mask` for the first token of each sequence; `send_mask` sends the others.

        Raises:
            InvalidRequest: it is too large.
            QueueFull, EngineRestarted: it can be sent again later.
            VersionEndsEngines: requests for its version have ended engines.
        """
        self.check_ready()
        if request.version in self._quarantined:
            raise _quarantined(request)
        submit = Submit(request, time.monotonic(), first_mask)
        self._send(submit, Header(request.tenant, request.id))
        self._requests[request.id] = _OpenRequest(request, on_event, submit.submitted_at, first_mask)

    def cancel(self, request_id: str) -> None:
        """End a request whose client is gone. Its events are dropped from now on."""
        if (request := self._requests.pop(request_id, None)) is not None:
            self._send_surely(Cancel(request_id), request.request.tenant)

    def stop_sequence(self, request_id: str, index: int) -> None:
        """End one sequence, whose text holds a stop string. Tokens already computed may still come."""
        if (request := self._requests.get(request_id)) is not None:
            request.over.add(index)
            self._send_surely(StopSequence(request_id, index), request.request.tenant)

    def set_paused(self, request_id: str, is_paused: bool) -> None:
        """Let a request whose events are not read wait outside the batch, or go on. A few events may still come."""
        if (request := self._requests.get(request_id)) is not None:
            request.is_paused = is_paused
            self._send_surely(Pause(request_id, is_paused), request.request.tenant)

    def send_mask(self, request_id: str, index: int, position: int, bits: bytes | None) -> None:
        """Send the mask for the next token of a sequence that has `position` tokens; None ends its constraint."""
        if (request := self._requests.get(request_id)) is not None:
            request.masks[index] = position, bits
            self._send_surely(Mask(request_id, index, position, bits), request.request.tenant)

    def load(
        self, action: LoadAction, record: VersionRecord, max_pinned: int | None = None
    ) -> asyncio.Future[None]:
        """Load a version into a slot, pin it there, unpin it or free its slot; done when that has happened.

        Versions of the same bytes share a slot. It stays pinned while any of them pins it, and is freed when the last
        of them that was loaded, pinned or requested is unloaded.

        Args:
            max_pinned: versions that the version's tenant may pin; None is any number.

        The future raises:
            InvalidRequest: all other slots are pinned.
            RateLimited: the tenant has pinned `max_pinned` versions.
            LoadTimeout: no slot was free in time.
            ArtifactError, VariantNotFound, VariantQuarantined: the delta cannot be loaded.
            QueueFull, EngineRestarted: no engine is ready.
        """
        return self._call(lambda call_id: LoadCall(call_id, action, record, max_pinned), record.tenant)

    async def residency_of(self, versions: Sequence[str], tenant: str) -> tuple[DeltaState, ...]:
        """Return the state of each version, named by its label; without a ready engine all are on disk.

        Raises as `EngineLink.residency_of` does.
        """
        if not versions or not self._is_welcomed:
            return (DeltaState("disk", False, 0),) * len(versions)
        return await self._questions.states_of(versions, tenant)

    async def metrics(self) -> Snapshot:
        """Return the engine's metrics.

        Raises:
            QueueFull, EngineRestarted: no engine is ready.
        """
        found: Snapshot = await self._call(MetricsQuery)
        return found

    async def residents(self) -> tuple[Resident, ...]:
        """Return the deltas in memory, the least recently used first.

        Raises:
            QueueFull, EngineRestarted: no engine is ready.
        """
        found: tuple[Resident, ...] = await self._call(ResidentsQuery)
        return found

    def forget_variants(self, labels: frozenset[str]) -> None:
        """Have the engine remove the series of deleted variants, so that others can have a label."""
        if labels and self._is_welcomed:
            self._send_surely(ForgetVariants(tuple(labels)))

    def report_gone(self, identity: bytes) -> None:
        """Tell the engine that another client has died, so that it cancels its requests."""
        if self._is_welcomed:
            self._send_surely(ClientGone(identity))

    @property
    def _is_welcomed(self) -> bool:
        welcomed = None if self._socket is None else self.welcomed
        return (
            welcomed is not None and welcomed.done() and not welcomed.cancelled() and not welcomed.exception()
        )

    def _call(self, message: Callable[[int], ClientMessage], tenant: str = "") -> asyncio.Future[Any]:
        answer = self._loop.create_future()
        call_id = next(self._call_ids)
        try:
            self.check_ready()
            self._send(message(call_id), Header(tenant))
        except PeraxisError as error:
            answer.set_exception(error)
        else:
            self._calls[call_id] = answer
        return answer

    def _send_surely(self, message: ClientMessage, tenant: str = "") -> None:
        try:
            self._send(message, Header(tenant))
        except QueueFull:
            self._loop.call_later(RETRY_S, self._send_surely, message, tenant)

    def _send(self, message: ClientMessage, header: Header) -> None:
        """Send a message. The engine takes those of one tenant in their order, and tenants in turns."""
        if self._socket is None:
            return
        raw = encode(message)
        try:
            self._socket.send_multipart([encode_header(header), raw], zmq.NOBLOCK)
        except zmq.Again:
            raise QueueFull("the engine has not read its messages for long: try again in a moment") from None
        # Sending may use up the signal of the file descriptor that a message has come.
        self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        """Handle every message that has come; the descriptor signals only the first of them."""
        while self._socket is not None and self._socket.poll(0):
            try:
                self._handle(decode_engine_message(self._socket.recv(zmq.NOBLOCK)))
            except PeraxisError:
                log.exception("a message of the engine was dropped")

    def _handle(self, message: EngineMessage) -> None:
        match message:
            case Outputs(events):
                for request_id, event in events:
                    self._on_event(request_id, event)
            case CallDone(call_id, error):
                self._answer(call_id, None, error)
            case ResidencyAnswer(call_id, states):
                self._answer(call_id, states)
            case ResidentsAnswer(call_id, residents):
                self._answer(call_id, residents)
            case MetricsAnswer(call_id, snapshot):
                self._answer(call_id, snapshot)
            case Beat():
                self.last_beat_at = time.monotonic()
            case PinChanged(record, is_pinned):
                self._pinned.pop(record.label, None)
                if is_pinned:
                    self._pinned[record.label] = record
            case Welcome(facts):
                self._pinned = {}
                before, self._facts, self.last_beat_at = self._facts, facts, time.monotonic()
                if not self.welcomed.done():
                    self.welcomed.set_result(facts)
                if before is not None:
                    self._send_again(before.base.fingerprint == facts.base.fingerprint)
            case Refused(error):
                if not self.welcomed.done():
                    self.welcomed.set_exception(error)
                else:
                    log.error("the engine refused a message: %s", error)

    def _send_again(self, is_same_base: bool) -> None:
        """Have a new engine go on with all open requests."""
        for request_id, request in list(self._requests.items()):
            try:
                if not is_same_base:
                    raise _restarted()
                self._send(request.again(), Header(request.request.tenant))
                if request.is_paused:
                    # No event of it will come until its client reads.
                    request.lost_at = None
            except PeraxisError as error:
                self._fail(request_id, error)
        if self._requests:
            log.info("%d requests go on with another engine", len(self._requests))

    def _on_event(self, request_id: str, event: Event) -> None:
        # A cancelled request is no longer known.
        request = self._requests.get(request_id)
        if request is not None:
            request.take_in(event)
            if isinstance(event, DoneEvent | ErrorEvent):
                del self._requests[request_id]
            request.on_event(event)

    def _answer(self, call_id: int, result: Any, error: PeraxisError | None = None) -> None:
        call = self._calls.pop(call_id, None)
        if call is None or call.done():
            return
        if error is None:
            call.set_result(result)
        else:
            call.set_exception(error)


def _restarted() -> EngineRestarted:
    return EngineRestarted(
        "the engine has failed and is being started again: send the request again in a moment"
    )


def _ended_engine() -> EndedEngine:
    return EndedEngine(
        "the engine has failed twice at this request, at last while it ran alone: send another one"
    )


def _quarantined(request: Request) -> VersionEndsEngines:
    return VersionEndsEngines(
        f"{request.version} is not served by this server any more: the engine has failed at two of its requests. "
        "Publish a new version"
    )
