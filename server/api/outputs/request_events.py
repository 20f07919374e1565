"""The events of submitted requests on the event loop; leaving early cancels the requests."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import fastapi
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from server.errors import EngineRestarted, RequestTimeout
from server.grammar.mask_feed import MaskFeed
from server.http.engine_link import EngineLink
from server.metrics.frontend import FrontendMetrics
from server.protocol.events import DoneEvent, ErrorEvent, Event, Timings, TokenEvent
from server.protocol.request import Request
from server.tenants.limits.admission import Admission
from server.tracing.traced_request import Operation, TracedRequest

if TYPE_CHECKING:
    from server.tracing.request_spans import RequestSpans

log = logging.getLogger(__name__)

# Tokens, and log-probabilities of tokens, that are kept for a client which does not read its stream.
MAX_UNREAD = 1 << 16

T = TypeVar("T")


class RequestEvents:
    """The engine's requests of one HTTP request, and their events. Event loop only.

    A request that fails ends the others. Always call `cancel` last; it does nothing after the end.
    """

    def __init__(
        self,
        engine: EngineLink,
        metrics: FrontendMetrics,
        http_request_id: str,
        spans: RequestSpans | None = None,
    ) -> None:
        self._http_request_id = http_request_id
        self._engine = engine
        self._metrics = metrics
        self._request_ids: list[str] = []
        self._feeds: list[MaskFeed] = []
        self._events: list[tuple[int, Event]] = []
        self._arrived = asyncio.Event()
        self._num_unread = 0
        self._num_open = 0
        self.admission = Admission()
        self._is_cancelled = False
        self._spans = spans
        # Requests whose span is not made yet, by their number.
        self._traced: dict[int, TracedRequest] = {}

    def admitted(self, admission: Admission) -> None:
        """Take note of the tenant's admission, which is released when the requests have ended. Call it before `submit`.

        Raises:
            ClientDisconnect: `cancel` was called; the admission is released.
        """
        self.admission = admission
        self._check_open()

    def new_request_id(self) -> str:
        """Return the id of one more request."""
        # The engine's log lines show the X-Request-Id; clients may send the same one twice, so it is not enough.
        return f"{self._http_request_id}-{secrets.token_hex(8)}"

    def submit(
        self, request: Request, masks: MaskFeed | None = None, operation: Operation = "text_completion"
    ) -> None:
        """Submit a request.

        Args:
            masks: of a constrained request.
            operation: its kind, for its span.

        Raises:
            ClientDisconnect: `cancel` was called.
            PeraxisError: as `EngineLink.submit` does.
        """
        if masks is not None:
            self._feeds.append(masks)
        self._check_open()
        on_event = partial(self._on_event, len(self._request_ids), request, time.monotonic())
        if masks is None:
            self._engine.submit(request, on_event)
        else:
            self._engine.submit(request, masks.before(on_event), masks.first_mask)
            masks.start(request, lambda error: on_event(ErrorEvent(error)))
        if self._spans is not None:
            self._traced[len(self._request_ids)] = TracedRequest(request, operation)
        self._request_ids.append(request.id)
        self._num_open += 1
        log.debug(
            "request %s of tenant %s: variant %s, %d prompt tokens, %d sequences of up to %d new ones",
            request.id,
            request.tenant,
            "base" if request.record is None else request.record.label,
            len(request.prompt_ids),
            request.sampling_params.n,
            request.sampling_params.max_new_tokens,
        )

    async def take(self) -> list[tuple[int, Event]]:
        """Wait for events and return all that have come, none of them an ErrorEvent; raise the error of one.

        Each stands behind the number of its request, in order of submission.
        """
        await self._arrived.wait()
        events, self._events = self._events, []
        self._arrived.clear()
        self._num_unread = 0
        _, last = events[-1]
        if isinstance(last, ErrorEvent):
            raise last.error
        return events

    def stop_sequence(self, number: int, index: int) -> None:
        """End one sequence of a request, whose text holds a stop string."""
        self._engine.stop_sequence(self._request_ids[number], index)

    def cancel(self) -> None:
        """Stop the engine's work for the requests; no effect on those that have ended. Nothing begins afterwards."""
        self._is_cancelled = True
        for request_id in self._request_ids:
            self._engine.cancel(request_id)
        for feed in self._feeds:
            feed.close()
        for number in list(self._traced):
            self._make_span(number, "cancelled")
        self.admission.release()

    def _check_open(self) -> None:
        # The cancellation of a task is lost if what it waits for has just ended, so that a call may be submitted
        # whose client has left. Without this it would count as running for ever.
        if self._is_cancelled:
            self.cancel()
            raise ClientDisconnect

    def _on_event(self, number: int, request: Request, submitted_at: float, event: Event) -> None:
        if self._spans is not None:
            self._trace(number, event)
        if isinstance(event, TokenEvent):
            self.admission.count(1)
            self._num_unread += 1 + len(event.top)
            if self._num_unread > MAX_UNREAD:
                event = ErrorEvent(RequestTimeout("the stream was not read in time: read it as it arrives"))
        if isinstance(event, ErrorEvent):
            if isinstance(event.error, EngineRestarted):
                self._count_as_lost(request, submitted_at)
            # No event follows, so that an error is the last one.
            self.cancel()
        elif isinstance(event, DoneEvent):
            self._num_open -= 1
            if not self._num_open:
                self.admission.release()
        self._events.append((number, event))
        self._arrived.set()

    def _trace(self, number: int, event: Event) -> None:
        traced = self._traced.get(number)
        if traced is None:
            return
        if isinstance(event, TokenEvent):
            traced.num_tokens[event.index] += 1
        elif isinstance(event, DoneEvent):
            self._make_span(number, event.timings)
        elif isinstance(event, ErrorEvent):
            self._make_span(number, type(event.error).__name__)

    def _make_span(self, number: int, outcome: Timings | str) -> None:
        """Record a request as answered, or as failed with a kind of error."""
        traced = self._traced.pop(number)
        assert self._spans is not None
        if isinstance(outcome, Timings):
            self._spans.finished(traced, outcome)
        else:
            self._spans.failed(traced, outcome)

    def _count_as_lost(self, request: Request, submitted_at: float) -> None:
        """Count a request that its engine cannot count any more."""
        owner = request.tenant if request.record is None else request.record.tenant
        self._metrics.finished(owner, request.name, "error", time.monotonic() - submitted_at)


class EventStream(StreamingResponse):
    """Server-sent events of requests; cancels them when the client disconnects, even before the first byte."""

    def __init__(self, events: RequestEvents, content: AsyncIterator[bytes], headers: dict[str, str]) -> None:
        super().__init__(content, headers=headers, media_type="text/event-stream")
        self._request_events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._request_events.cancel()


async def while_connected(request: fastapi.Request, work: Awaitable[T]) -> T:
    """Await `work`; cancel it and raise ClientDisconnect if the client disconnects first.

    The body of `request` must have been read.
    """
    working = asyncio.ensure_future(work)
    working.add_done_callback(_take_exception)
    watching = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()


def _take_exception(done: asyncio.Future[T]) -> None:
    """Have asyncio log no error of work whose client has left."""
    if not done.cancelled():
        done.exception()


async def _disconnected(request: fastapi.Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
