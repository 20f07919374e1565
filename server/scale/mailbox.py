"""Sends messages over a slow way in their order, those that come during one call together in the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

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
