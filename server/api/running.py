"""A request for tokens between the event loop and the engine: its events come in, and leaving early cancels it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from server.engine.engine import Engine
from server.engine.request import DoneEvent, ErrorEvent, Event
from server.engine.request import Request as EngineRequest

T = TypeVar("T")


class Running:
    """One submitted request. Used on the event loop; whoever holds it calls `cancel` in the end, whatever happened."""

    def __init__(
        self, engine: Engine, make_request: Callable[[Callable[[Event], None]], EngineRequest]
    ) -> None:
        """Submit; raises what `Engine.submit` does.

        Args:
            make_request: given where events go, which any thread may call, makes the request.
        """
        self._engine = engine
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self.request = make_request(lambda event: _post(loop, self._events, event))
        self.ended = False
        engine.submit(self.request)

    async def next_event(self) -> Event:
        """The next event; an ErrorEvent's error is raised."""
        event = await self._events.get()
        self.ended = isinstance(event, DoneEvent | ErrorEvent)
        if isinstance(event, ErrorEvent):
            raise event.error
        return event

    def cancel(self) -> None:
        """Stop the engine's work for this request; nothing happens when it has ended."""
        if not self.ended:
            self._engine.cancel(self.request.id)


class EventStream(StreamingResponse):
    """Server-sent events of a running request, which is cancelled when the client goes, even before the first byte."""

    def __init__(self, running: Running, events: Any, headers: dict[str, str]) -> None:
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._running.cancel()


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await `work`; cancel it, and raise ClientDisconnect, when the client goes first. The body must have been read."""
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


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _post(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Event], event: Event) -> None:
    loop.call_soon_threadsafe(events.put_nowait, event)
