"""The events of a submitted request on the event loop; leaving early cancels the request."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

import fastapi
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from server.errors import EngineRestarted, RequestTimeout
from server.frontend.engine_client import EngineClient
from server.metrics.frontend import FrontendMetrics
from server.protocol.events import DoneEvent, ErrorEvent, Event, TokenEvent
from server.protocol.request import Request

log = logging.getLogger(__name__)

# Tokens, and log-probabilities of tokens, that are kept for a client which does not read its stream.
MAX_UNREAD = 1 << 16

T = TypeVar("T")


class RequestEvents:
    """One request, to be submitted under `request_id`, and its events. Event loop only.

    Always call `cancel` last; it does nothing after the end.
    """

    def __init__(self, engine: EngineClient, metrics: FrontendMetrics, http_request_id: str) -> None:
        # The engine's log lines show the X-Request-Id; clients may send the same one twice, so it is not enough.
        self.request_id = f"{http_request_id}-{secrets.token_hex(8)}"
        self._engine = engine
        self._metrics = metrics
        self._events: list[Event] = []
        self._arrived = asyncio.Event()
        self._num_unread = 0
        self._ended = False

    def submit(self, request: Request) -> None:
        """Submit the request; raises what `EngineClient.submit` does."""
        self._engine.submit(request, self._on_event)
        self._request, self._submitted_at = request, time.monotonic()
        log.debug(
            "request %s of tenant %s: variant %s, %d prompt tokens, %d sequences of up to %d new ones",
            request.id,
            request.tenant,
            "base" if request.record is None else request.record.label,
            len(request.prompt_ids),
            request.sampling_params.n,
            request.sampling_params.max_new_tokens,
        )

    async def take(self) -> list[Event]:
        """Wait for events and return all that have come, none of them an ErrorEvent; raise the error of one."""
        await self._arrived.wait()
        events, self._events = self._events, []
        self._arrived.clear()
        self._num_unread = 0
        if isinstance(events[-1], ErrorEvent):
            raise events[-1].error
        return events

    def stop_sequence(self, index: int) -> None:
        """End one sequence, whose text holds a stop string."""
        self._engine.stop_sequence(self.request_id, index)

    def cancel(self) -> None:
        """Stop the engine's work for this request; no effect after its end or if it was not submitted."""
        if not self._ended:
            self._engine.cancel(self.request_id)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            self._num_unread += 1 + len(event.top)
            if self._num_unread > MAX_UNREAD:
                self.cancel()
                event = ErrorEvent(RequestTimeout("the stream was not read in time: read it as it arrives"))
        self._ended = isinstance(event, DoneEvent | ErrorEvent)
        if isinstance(event, ErrorEvent) and isinstance(event.error, EngineRestarted):
            self._count_as_lost()
        self._events.append(event)
        self._arrived.set()

    def _count_as_lost(self) -> None:
        """Count the request, which its engine cannot count any more."""
        request = self._request
        owner = request.tenant if request.record is None else request.record.tenant
        self._metrics.finished(owner, request.name, "error", time.monotonic() - self._submitted_at)


class EventStream(StreamingResponse):
    """Server-sent events of a request; cancels it when the client disconnects, even before the first byte."""

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
    watching = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()


async def _disconnected(request: fastapi.Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
