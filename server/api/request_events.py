"""The events of a submitted request on the event loop; leaving early cancels the request."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

import fastapi
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from server.engine.engine import Engine
from server.engine.events import DoneEvent, ErrorEvent, Event
from server.engine.request import Request

log = logging.getLogger(__name__)

T = TypeVar("T")


class RequestEvents:
    """One request, to be submitted under `request_id`, and its events.

    Use on the event loop, except `submit`. Always call `cancel` last; it does nothing after the end.
    """

    def __init__(self, engine: Engine, http_request_id: str) -> None:
        # The engine's log lines show the X-Request-Id; clients may send the same one twice, so it is not enough.
        self.request_id = f"{http_request_id}-{secrets.token_hex(8)}"
        self._engine = engine
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._submitted = self._cancelled = self._ended = False

    def submit(self, request: Request) -> None:
        """Submit the request. May read files: call it on a thread. Raises what `Engine.submit` does."""
        self._engine.submit(request, self._on_event)
        log.debug(
            "request %s of tenant %s: variant %s, %d prompt tokens, %d sequences of up to %d new ones",
            request.id,
            request.tenant,
            "base" if request.record is None else request.record.label,
            len(request.prompt_ids),
            request.sampling_params.n,
            request.sampling_params.max_new_tokens,
        )
        self._submitted = True
        # The task that awaits this thread may have been cancelled meanwhile.
        if self._cancelled:
            self._engine.cancel(self.request_id)

    async def next_event(self) -> Event:
        """Return the next event; raise the error of an ErrorEvent."""
        event = await self._events.get()
        self._ended = isinstance(event, DoneEvent | ErrorEvent)
        if isinstance(event, ErrorEvent):
            raise event.error
        return event

    def cancel(self) -> None:
        """Stop the engine's work for this request; no effect after its end or if it was not admitted."""
        self._cancelled = True
        if self._submitted and not self._ended:
            self._engine.cancel(self.request_id)

    def _on_event(self, event: Event) -> None:
        """Take an event from the engine thread."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)


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
