"""The masks of one request: after each token sends the next, which is known ahead or comes from its lane.

Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from deltastore.errors import PeraxisError
from server.grammar.grammar import Grammar
from server.grammar.lanes import Place
from server.grammar.matching import NewSampled, NextMasks
from server.http.engine_link import EngineLink
from server.protocol.events import DoneEvent, ErrorEvent, Event, FinishEvent, TokenEvent
from server.protocol.request import Request


@dataclass(slots=True)
class _MaskedSequence:
    """One sequence: its tokens, the masks that are known ahead, and how far its matcher is."""

    ahead: deque[bytes]
    num_consumed: int = 0  # tokens that its matcher has consumed, forced ones included
    token_ids: list[int] = field(default_factory=list)
    advancing: asyncio.Task[None] | None = None


class MaskFeed:
    """Sends the masks of one request. Always call `close` last.

    Args:
        opening: the masks at the beginning of the grammar.
    """

    def __init__(self, engine: EngineLink, place: Place, grammar: Grammar, opening: NextMasks) -> None:
        self._engine = engine
        self._place = place
        self._grammar = grammar
        self._opening = opening
        self._sequences: dict[int, _MaskedSequence] = {}

    @property
    def first_mask(self) -> bytes:
        """The mask of the first token of each sequence, which goes with the request."""
        return self._opening.masks[0]

    def start(self, request: Request, on_error: Callable[[PeraxisError], None]) -> None:
        """Begin, once the request has been submitted.

        Args:
            on_error: called when a matcher failed; the request must then be cancelled.
        """
        self._request, self._on_error = request, on_error
        for index in range(request.sampling_params.n):
            self._sequences[index] = _MaskedSequence(deque(self._opening.masks[1:]))
        # The lane compiles the grammar while the prompt is computed.
        self._sequences[0].advancing = asyncio.create_task(self._warm())

    def before(self, on_event: Callable[[Event], None]) -> Callable[[Event], None]:
        """Return a receiver of the request's events that has this feed take each in before `on_event`."""

        def receive(event: Event) -> None:
            self._take_in(event)
            on_event(event)

        return receive

    def _take_in(self, event: Event) -> None:
        """Begin to make the next mask if the event is a token."""
        match event:
            case TokenEvent(index, token_id) if index in self._sequences:
                # The sequence ends with an end token.
                if token_id not in self._request.sampling_params.stop_token_ids:
                    self._on_token(index, self._sequences[index], token_id)
            case FinishEvent(index):
                self._drop(index)
            case DoneEvent() | ErrorEvent():
                self.close()

    def close(self) -> None:
        """End the work for this request; no effect if it has ended."""
        for index in list(self._sequences):
            self._drop(index)
        self._place.leave()

    async def _warm(self) -> None:
        with contextlib.suppress(PeraxisError):
            await self._place.advance(NewSampled(self._name(0), self._grammar, 0, ()), ())

    def _on_token(self, index: int, sequence: _MaskedSequence, token_id: int) -> None:
        sequence.token_ids.append(token_id)
        if sequence.ahead:
            self._send_next(index, sequence)
        else:
            # It ends before the next token comes, which needs the mask that it sends.
            sequence.advancing = asyncio.create_task(self._advance(index, sequence))

    async def _advance(self, index: int, sequence: _MaskedSequence) -> None:
        new = NewSampled(
            self._name(index),
            self._grammar,
            sequence.num_consumed,
            tuple(sequence.token_ids[sequence.num_consumed :]),
        )
        try:
            following = await self._place.advance(new, sequence.token_ids)
        except PeraxisError as error:
            self._on_error(error)
            return
        sequence.num_consumed = len(sequence.token_ids) + len(following.forced)
        sequence.ahead.extend(following.masks)
        self._send_next(index, sequence)

    def _send_next(self, index: int, sequence: _MaskedSequence) -> None:
        self._engine.send_mask(self._request.id, index, len(sequence.token_ids), sequence.ahead.popleft())

    def _drop(self, index: int) -> None:
        sequence = self._sequences.pop(index, None)
        if sequence is None:
            return
        if sequence.advancing is not None:
            sequence.advancing.cancel()
        self._place.forget(self._name(index))

    def _name(self, index: int) -> str:
        return f"{self._request.id}/{index}"
