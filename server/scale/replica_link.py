"""The engine replicas as an ingress uses them: requests and calls go out over a DeploymentHandle, events come back.

A request is one streaming call. Its stop strings and masks go to the replica that answers it; closing the stream
cancels it. A request whose replica dies is sent again once if it had no event yet, and ends with EngineRestarted
otherwise. Event loop only.

One member of Ray beyond the documented ones is used, of 2.60, which the extra `ray` asks for:
`DeploymentBroadcastResponse._fetch_replica_results_async`, because `results_async` has no answer if one is late.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deltastore.errors import PeraxisError
from deltastore.registry.records import VersionRecord
from server.errors import EngineFailed, EngineRestarted, QueueFull, RateLimited
from server.protocol.engine_client import OnEvent, StateQuestions
from server.protocol.messages import (
    CallDone,
    DeltaState,
    DoneEvent,
    EngineFacts,
    ErrorEvent,
    Event,
    LoadAction,
    LoadCall,
    Mask,
    Outputs,
    Pause,
    PinChanged,
    ResidencyAnswer,
    ResidencyQuery,
    StopSequence,
    Submit,
    Welcome,
    decode_engine_message,
    encode,
)
from server.protocol.request import Request
from server.scale.engines import ReplicaState
from server.scale.routing import Route

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Messages to one receiver. Event loop only.

    Args:
        send: sends some messages in their order; called again only when it has ended. It raises nothing.
    """

    def __init__(self, send: Callable[[list[T]], Awaitable[None]]) -> None:
        self._send = send
        self._waiting: list[T] = []
        self._sending: asyncio.Task[None] | None = None

    def put(self, message: T) -> None:
        """Send a message behind all that were put before."""
        self._waiting.append(message)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())

    async def _send_all(self) -> None:
        while self._waiting:
            messages, self._waiting = self._waiting, []
            await self._send(messages)


log = logging.getLogger(__name__)

# Between two looks at all replicas.
WATCH_S = 1.0
# A replica that does not answer by then keeps the state that was known. It is left out of an answer to a question, as
# one in a long step.
ANSWER_S = 5.0
# Levels, the fastest first.
LEVELS = ("device", "host", "disk")
# The errors of a call whose replica or router has failed.
BROKEN = (RayError, RayServeException)


@dataclass(slots=True)
class _OpenRequest:
    """A request that is not answered in full."""

    on_event: OnEvent
    answering: asyncio.Task[None]
    outbox: Mailbox[bytes] | None = None  # to its replica, once one has taken it
    has_events: bool = False
    is_paused: bool = False


class ReplicaLink:
    """All engine replicas as one engine, which `EngineLink` describes.

    Args:
        identity: of the ingress replica.
        engines: a handle of the engine deployment.
    """

    def __init__(self, identity: str, engines: DeploymentHandle[Any]) -> None:
        self.identity = identity.encode()
        self.pinned: tuple[VersionRecord, ...] = ()
        self._engines = engines
        self._streams = engines.options(stream=True)
        self._facts: EngineFacts | None = None
        self._states: dict[str, ReplicaState] = {}
        self._requests: dict[str, _OpenRequest] = {}
        self._questions = StateQuestions(self._states_of)

    @property
    def facts(self) -> EngineFacts:
        """The facts of the replicas; raises QueueFull before one has loaded the base."""
        if self._facts is None:
            raise QueueFull("the base is still loading: try again when /ready answers 200")
        return self._facts

    @property
    def has_facts(self) -> bool:
        """True once a replica has loaded the base."""
        return self._facts is not None

    def check_ready(self) -> None:
        """Raise QueueFull while the first replica starts, EngineRestarted while there is none, or EngineFailed."""
        expected = self.facts.base.fingerprint
        if not self._states:
            raise _restarted()
        for state in self._states.values():
            if state.fingerprint != expected:
                raise EngineFailed(
                    f"replica {state.replica!r} serves the base {state.fingerprint[:12]}, and another one the base "
                    f"{expected[:12]}: give all nodes the same files"
                )

    async def watch(self) -> None:
        """Keep the replicas' states until cancelled."""
        while True:
            await self._look()
            await asyncio.sleep(WATCH_S)

    def disconnect(self, error: PeraxisError | None = None) -> None:
        """End every request with `error`, by default EngineRestarted."""
        for request_id in list(self._requests):
            self._end(request_id, error or _restarted())

    def submit(self, request: Request, on_event: OnEvent, first_mask: bytes | None = None) -> None:
        """Send a request; `on_event` is called with each event, a DoneEvent or an ErrorEvent last.

        Raises:
            InvalidRequest: it is too large.
            QueueFull, EngineRestarted, EngineFailed: no replica is ready.
        """
        self.check_ready()
        # The replica's engine counts from its arrival there: machines' monotonic clocks differ.
        submit = encode(Submit(request, time.monotonic(), first_mask))
        answering = asyncio.create_task(self._answer(request.id, submit, Route(request.version)))
        self._requests[request.id] = _OpenRequest(on_event, answering)

    def cancel(self, request_id: str) -> None:
        """End a request whose client is gone. Its events are dropped from now on."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.answering.cancel()

    def stop_sequence(self, request_id: str, index: int) -> None:
        """End one sequence. Tokens already computed may still come."""
        self._tell(request_id, StopSequence(request_id, index))

    def set_paused(self, request_id: str, is_paused: bool) -> None:
        """Let a request whose events are not read wait outside the batch, or go on. A few events may still come."""
        if (request := self._requests.get(request_id)) is not None:
            request.is_paused = is_paused
            self._tell(request_id, Pause(request_id, is_paused))

    def send_mask(self, request_id: str, index: int, position: int, bits: bytes | None) -> None:
        """Send the mask for the next token of a sequence that has `position` tokens; None ends its constraint."""
        self._tell(request_id, Mask(request_id, index, position, bits))

    def load(
        self, action: LoadAction, record: VersionRecord, max_pinned: int | None = None
    ) -> asyncio.Future[None]:
        """Load or pin a version on the replica that the router ranks first; unpin or unload it on all.

        The future raises what `EngineClient.load`'s does.
        """
        return asyncio.create_task(self._load(action, record, max_pinned))

    async def residency_of(self, versions: Sequence[str], tenant: str) -> tuple[DeltaState, ...]:
        """Return the state of each version, at the fastest level that a replica has it; all requests are added.

        Raises:
            QueueFull: as `EngineLink.residency_of` does.
        """
        if not versions or not self._states:
            return (DeltaState("disk", False, 0),) * len(versions)
        return await self._questions.states_of(versions, tenant)

    async def _states_of(self, versions: tuple[str, ...]) -> tuple[DeltaState, ...]:
        states = (DeltaState("disk", False, 0),) * len(versions)
        answers, _ = await self._ask_all("call", encode(ResidencyQuery(0, versions)))
        for raw in answers:
            answer = decode_engine_message(raw)
            assert isinstance(answer, ResidencyAnswer)
            states = tuple(map(merged, states, answer.states))
        return states

    async def _look(self) -> None:
        """Refresh what is known of the replicas; without any, end the requests that none has taken."""
        found, are_all = await self._ask_all("state")
        if not are_all:
            # A late one may be dead, which Ray tells within seconds, or be in a machine that was paused. Which one is
            # late is not told, so all stay that were known, until none is.
            answered = {state.replica for state in found}
            found += [state for name, state in self._states.items() if name not in answered]
        self._states = {state.replica: state for state in found}
        pinned: dict[str, VersionRecord] = {}
        for state in found:
            for message in map(decode_engine_message, state.pinned):
                assert isinstance(message, PinChanged)
                pinned[message.record.label] = message.record
        self.pinned = tuple(pinned.values())
        if found and self._facts is None:
            await self._learn_facts()
        if not found:
            for request_id, request in list(self._requests.items()):
                if request.outbox is None:
                    self._end(request_id, _restarted())

    async def _learn_facts(self) -> None:
        answers, _ = await self._ask_all("facts")
        for raw in answers[:1]:
            message = decode_engine_message(raw)
            assert isinstance(message, Welcome)
            self._facts = message.facts

    async def _ask_all(self, method: str, *arguments: object) -> tuple[list[Any], bool]:
        """Call a method of every replica.

        Returns:
            the answers that came in time, and whether no replica is late. One that has failed is not.
        """
        deadline = time.monotonic() + ANSWER_S
        try:
            async with asyncio.timeout(ANSWER_S):
                broadcast: Any = self._engines.broadcast(method, *arguments)
                results = await broadcast._fetch_replica_results_async()
        except TimeoutError:
            return [], False
        except BROKEN as error:
            log.debug("no replica was asked %r: %s", method, error)
            return [], True
        asked: list[asyncio.Future[Any]] = [asyncio.ensure_future(result.get_async()) for result in results]
        try:
            done, late = await asyncio.wait(asked, timeout=max(0.0, deadline - time.monotonic()))
        finally:
            for each in asked:
                each.cancel()
        answered = [
            each for each in asked if each in done and not each.cancelled() and each.exception() is None
        ]
        return [each.result() for each in answered], not late

    async def _load(self, action: LoadAction, record: VersionRecord, max_pinned: int | None) -> None:
        self.check_ready()
        call = encode(LoadCall(0, action, record, max_pinned))
        if action in ("unpin", "unload"):
            # Where the version is in use, an unload goes on until its requests have ended.
            answers, _ = await self._ask_all("call", call)
        else:
            if action == "pin" and max_pinned is not None:
                self._check_pins(record, max_pinned)
            try:
                answers = [await self._engines.call.remote(call, route=Route(record.label))]
            except BROKEN as error:
                raise _restarted() from error
        for answer in map(decode_engine_message, answers):
            assert isinstance(answer, CallDone)
            if answer.error is not None:
                raise answer.error
        await self._look()

    def _check_pins(self, record: VersionRecord, max_pinned: int) -> None:
        """Raise RateLimited if the tenant has pinned as many versions on all replicas together as it may."""
        labels = {pinned.label for pinned in self.pinned if pinned.tenant == record.tenant}
        if len(labels - {record.label}) >= max_pinned:
            raise RateLimited(
                f"tenant {record.tenant!r} may pin {max_pinned} versions and has pinned {len(labels)}: unpin one first",
                "max_pinned",
            )

    def _tell(self, request_id: str, message: StopSequence | Pause | Mask) -> None:
        request = self._requests.get(request_id)
        # Without a replica the request has no event that a message could follow.
        if request is not None and request.outbox is not None:
            request.outbox.put(encode(message))

    async def _answer(self, request_id: str, submit: bytes, route: Route) -> None:
        """Pass a request's events on; send it once more if its replica ends before the first."""
        for is_last in (False, True):
            try:
                await self._receive(request_id, submit, route)
                return
            except RayTaskError as error:
                log.error("a replica failed at a request: %s", error)
                self._end(request_id, EngineFailed("the engine's replica has failed: send the request again"))
                return
            except BROKEN as error:
                log.warning("the replica of a request is gone: %s", type(error).__name__)
                request = self._requests[request_id]
                if is_last or request.has_events:
                    self._end(request_id, _restarted())
                    return
                request.outbox = None

    async def _receive(self, request_id: str, submit: bytes, route: Route) -> None:
        stream = cast(Any, self._streams.generate.remote(submit, route=route))
        try:
            async for raw in stream:
                request = self._requests[request_id]
                if request.outbox is None:
                    request.outbox = self._outbox(Route(route.version, raw.decode()))
                    if request.is_paused:
                        self._tell(request_id, Pause(request_id, is_paused=True))
                    continue
                message = decode_engine_message(raw)
                assert isinstance(message, Outputs)
                request.has_events = True
                for _, event in message.events:
                    self._on_event(request_id, event)
                if request_id not in self._requests:
                    return
        finally:
            stream.cancel()
        # A replica that shuts down closes its streams.
        raise RayServeException("the stream has ended before its request")

    def _outbox(self, route: Route) -> Mailbox[bytes]:
        async def send(messages: list[bytes]) -> None:
            try:
                if not await self._engines.tell.remote(messages, route=route):
                    await self._ask_all("tell", messages)
            except (*BROKEN, PeraxisError) as error:
                # The stream of the request ends, too.
                log.debug("a replica did not take a message: %s", error)

        return Mailbox(send)

    def _on_event(self, request_id: str, event: Event) -> None:
        # A cancelled request is no longer known.
        request = self._requests.get(request_id)
        if request is not None:
            if isinstance(event, DoneEvent | ErrorEvent):
                del self._requests[request_id]
            request.on_event(event)

    def _end(self, request_id: str, error: PeraxisError) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            if request.answering is not asyncio.current_task():
                request.answering.cancel()
            self._on_event(request_id, ErrorEvent(error))


def merged(one: DeltaState, other: DeltaState) -> DeltaState:
    """Return the state of a version on two replicas together."""
    level = min(one.level, other.level, key=LEVELS.index)
    return DeltaState(level, one.is_pinned or other.is_pinned, one.num_requests + other.num_requests)


def _restarted() -> EngineRestarted:
    return EngineRestarted("the engine's replica has ended: send the request again in a moment")
