"""The engines as the routes of an HTTP process use them.

`EngineClient` is the link to one engine over ZeroMQ, and `server/scale/replica_link.py` the one to replicas of Ray
Serve.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from deltastore.errors import PeraxisError
from deltastore.registry.records import VersionRecord
from server.protocol.events import Event
from server.protocol.messages import DeltaState, EngineFacts, LoadAction
from server.protocol.request import Request

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

    def send_mask(self, request_id: str, index: int, position: int, bits: bytes | None) -> None:
        """Send the mask for the next token of a sequence that has `position` tokens; None ends its constraint."""

    def load(
        self, action: LoadAction, record: VersionRecord, max_pinned: int | None = None
    ) -> asyncio.Future[None]:
        """Load a version into a slot, pin it there, unpin it or free its slot; done when that has happened."""

    async def residency_of(self, versions: Sequence[str]) -> tuple[DeltaState, ...]:
        """Return the state of each version, named by its label; without a ready engine all are on disk."""
