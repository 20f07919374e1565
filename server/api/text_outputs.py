"""A request's tokens as text: decodes them, matches stop strings and ends the sequences that one completed.

Knows no HTTP and no tokenizer but the variant's text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec import Struct

from server.api.request_events import RequestEvents
from server.protocol.events import DoneEvent, Event, FinishEvent, FinishReason, Timings, TokenEvent
from server.protocol.request import Request
from server.text.decoding.incremental import NewText, NewTokens
from server.text.decoding.incremental_detokenizer import IncrementalDetokenizer
from server.text.variant_text import VariantText


class ScoredText(Struct, frozen=True):
    """One token as log-probabilities show it."""

    token_id: int
    text: str
    logprob: float


class TextToken(Struct, frozen=True):
    """One token and the text that became visible with it.

    `text` is empty while the token may be part of an incomplete character or of a stop string.
    """

    index: int  # of the sequence
    token_id: int
    text: str
    scored: ScoredText | None = None
    top: tuple[ScoredText, ...] = ()


class SequenceEnd(Struct, frozen=True):
    """The end of one sequence; `text` was held back until now."""

    index: int
    reason: FinishReason
    text: str


@dataclass(slots=True)
class _Sequence:
    """One sequence whose end has not been sent, and its events that are not decoded yet."""

    detokenizer: IncrementalDetokenizer
    tokens: list[TokenEvent] = field(default_factory=list)
    reason: FinishReason | None = None


class TextOutputs:
    """Turns the events of one request into text. Event loop only."""

    def __init__(self, events: RequestEvents, request: Request, text: VariantText) -> None:
        params = request.sampling_params
        self.timings: Timings | None = None
        self.num_tokens = 0  # that were returned
        self._events = events
        self._text = text
        self._stop_token_ids = params.stop_token_ids
        self._sequences = {i: _Sequence(IncrementalDetokenizer(params.stop)) for i in range(params.n)}

    async def take(self) -> list[TextToken | SequenceEnd]:
        """Return what has come since the last call, at least one output; nothing when the request is done.

        Raises:
            PeraxisError: the request failed, or the variant's tokenizer did.
        """
        outputs: list[TextToken | SequenceEnd] = []
        while not outputs and self.timings is None:
            outputs = await self._decoded(await self._events.take())
        self.num_tokens += sum(isinstance(output, TextToken) for output in outputs)
        return outputs

    async def _decoded(self, events: list[Event]) -> list[TextToken | SequenceEnd]:
        """Decode all new tokens in one call."""
        changed: dict[int, _Sequence] = {}
        for event in events:
            if isinstance(event, DoneEvent):
                self.timings = event.timings
            elif isinstance(event, TokenEvent | FinishEvent) and event.index in self._sequences:
                sequence = changed[event.index] = self._sequences[event.index]
                if isinstance(event, TokenEvent):
                    sequence.tokens.append(event)
                else:
                    sequence.reason = event.reason
        if not changed:
            return []
        new = await self._text.decode_streams([self._new_tokens(sequence) for sequence in changed.values()])
        texts = await self._texts_of_logprobs(changed)
        return [
            output
            for (index, sequence), decoded in zip(changed.items(), new, strict=True)
            for output in self._outputs(index, sequence, decoded, texts)
        ]

    def _new_tokens(self, sequence: _Sequence) -> NewTokens:
        # An end token has no text.
        ids = [token.token_id for token in sequence.tokens if token.token_id not in self._stop_token_ids]
        return sequence.detokenizer.push(ids, sequence.reason is not None)

    async def _texts_of_logprobs(self, changed: dict[int, _Sequence]) -> dict[int, str]:
        """Return the text of each token that log-probabilities name."""
        tokens = [
            token for sequence in changed.values() for token in sequence.tokens if token.logprob is not None
        ]
        if not tokens:
            return {}
        ids = {token.token_id for token in tokens} | {id_ for token in tokens for id_, _ in token.top}
        return dict(zip(ids, await self._text.decode_each(list(ids)), strict=True))

    def _outputs(
        self, index: int, sequence: _Sequence, decoded: NewText, texts: dict[int, str]
    ) -> Iterator[TextToken | SequenceEnd]:
        """Yield a sequence's tokens up to a stop string, and its end."""
        visible = sequence.detokenizer.take(decoded)
        tokens, sequence.tokens = sequence.tokens, []
        shown = iter(visible.texts)
        for token in tokens:
            text = "" if token.token_id in self._stop_token_ids else next(shown, None)
            if text is None:
                break
            yield _text_token(token, text, texts)
        if visible.stopped:
            yield SequenceEnd(index, "stop", visible.tail)
            if sequence.reason is None:
                self._events.stop_sequence(index)
        elif sequence.reason is not None:
            yield SequenceEnd(index, sequence.reason, visible.tail)
        else:
            return
        del self._sequences[index]


def _text_token(token: TokenEvent, text: str, texts: dict[int, str]) -> TextToken:
    if token.logprob is None:
        return TextToken(token.index, token.token_id, text)
    scored = ScoredText(token.token_id, texts[token.token_id], token.logprob)
    top = tuple(ScoredText(token_id, texts[token_id], logprob) for token_id, logprob in token.top)
    return TextToken(token.index, token.token_id, text, scored, top)
