"""Token masks, and a client of the engine that sends them as an HTTP process does."""

from __future__ import annotations

import queue
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from deltastore.registry.records import VersionRecord
from server.engine.request_state import mask_bytes
from server.protocol.messages import DoneEvent, ErrorEvent, Event, TokenEvent
from tests.server.helpers.served import WAIT_S, AllowedTokens, Answer, Pending, Served


def pack(allowed: Iterable[int], num_embeddings: int) -> bytes:
    """Return the mask that allows these tokens."""
    return sum(1 << token for token in set(allowed)).to_bytes(mask_bytes(num_embeddings), "little")


def branching(tokens: list[int]) -> set[int]:
    """Allow other tokens after every history, now and then only one; a wrong mask changes all that follows."""
    draw = random.Random(str(tokens))
    return set(draw.sample(range(250), draw.choice([1, 2, 40, 200])))


def start_constrained(
    served: Served,
    record: VersionRecord | None,
    prompt: list[int],
    allowed: AllowedTokens = branching,
    **sampling: Any,
) -> Pending:
    """Start a constrained request and answer each of its tokens with the next mask."""
    request = served.request(record, prompt, is_constrained=True, **sampling)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    tokens: dict[int, list[int]] = defaultdict(list)

    def on_event(event: Event) -> None:
        if isinstance(event, TokenEvent):
            generated = tokens[event.index]
            generated.append(event.token_id)
            mask = pack(allowed(generated), request.num_embeddings)
            served.engine.send_mask(request.id, event.index, len(generated), mask)
        events.put(event)

    served.engine.submit(request, on_event, pack(allowed([]), request.num_embeddings))
    return Pending(request, events)


@dataclass(slots=True)
class ByHand:
    """A constrained request to the base that gets only the masks that the test sends, and its events so far."""

    served: Served
    pending: Pending
    events: list[Event] = field(default_factory=list)
    generated: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # by sequence

    @classmethod
    def start(
        cls, served: Served, prompt: list[int], allowed: AllowedTokens = branching, **sampling: Any
    ) -> ByHand:
        """Start a request with its first mask."""
        request = served.request(None, prompt, is_constrained=True, **sampling)
        pending = Pending(request, queue.SimpleQueue())
        served.engine.submit(request, pending.events.put, pack(allowed([]), request.num_embeddings))
        return cls(served, pending)

    def send(self, position: int, allowed: Iterable[int] | None, index: int = 0) -> None:
        """Send a mask; None ends the constraint."""
        request = self.pending.request
        self.send_bits(position, None if allowed is None else pack(allowed, request.num_embeddings), index)

    def send_bits(self, position: int, bits: bytes | None, index: int = 0) -> None:
        self.served.engine.send_mask(self.pending.request.id, index, position, bits)

    def next_token(self) -> int:
        event = self._next()
        assert isinstance(event, TokenEvent), event
        return event.token_id

    def answer(self, allowed: AllowedTokens = branching) -> Answer:
        """Send each sequence the mask that it waits for, and those behind it, until the request ends."""
        for index in list(self.generated):
            self._send_next(index, allowed)
        while not isinstance(event := self._next(), DoneEvent | ErrorEvent):
            if isinstance(event, TokenEvent):
                self._send_next(event.index, allowed)
        return Answer(self.events)

    def _send_next(self, index: int, allowed: AllowedTokens) -> None:
        generated = self.generated[index]
        self.send(len(generated), allowed(generated), index)

    def _next(self) -> Event:
        event = self.pending.events.get(timeout=WAIT_S)
        self.events.append(event)
        if isinstance(event, TokenEvent):
            self.generated[event.index].append(event.token_id)
        return event
