"""Tokens of a call's requests as text: decodes them, matches stop strings and ends the sequences that one completed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from server.api.outputs.request_events import RequestEvents
from server.grammar.tool_calls import CallDelta
from server.protocol.events import (
    DoneEvent,
    Event,
    FinishEvent,
    FinishReason,
    PromptEvent,
    Timings,
    TokenEvent,
)
from server.protocol.request import Request
from server.text.decoding.incremental import NewText, NewTokens, Window
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

    index: int  # of the sequence; of a prompt's token, of its prompt
    token_id: int
    text: str
    offset: int  # characters of the sequence, or of the prompt, before the token
    scored: ScoredText | None = None
    top: tuple[ScoredText, ...] = ()
    calls: tuple[CallDelta, ...] = ()  # of tools
    reasoning: str = ""  # before the answer, where the variant's response template tells it apart


class SequenceEnd(Struct, frozen=True):
    """The end of one sequence; `text` was held back until now."""

    index: int
    reason: FinishReason
    text: str
    calls: tuple[CallDelta, ...] = ()  # of tools
    reasoning: str = ""  # before the answer, where the variant's response template tells it apart


@dataclass(slots=True)
class _Sequence:
    """One sequence whose end has not been sent, and its events that are not decoded yet."""

    detokenizer: IncrementalDetokenizer
    num_chars: int = 0  # that were decoded
    tokens: list[TokenEvent] = field(default_factory=list)
    reason: FinishReason | None = None


class TextOutputs:
    """Turns the events of requests into text. Event loop only.

    The sequences of all requests are numbered in one row: those of the first request come first.

    Args:
        requests: all that were submitted to `events`, in this order, with the same variant, `n` and `stop`.
    """

    def __init__(self, events: RequestEvents, requests: Sequence[Request], text: VariantText) -> None:
        params = requests[0].sampling_params
        # Tokens of each prompt whose log-probabilities were asked for; they come before the first new token.
        self.prompts: dict[int, tuple[TextToken, ...]] = {}
        self.timings: Timings | None = None  # of the request that ended last
        self.num_tokens = 0  # that were returned
        self._events = events
        self._requests = requests
        self._text = text
        self._n = params.n
        self._stop_token_ids = params.stop_token_ids
        self._num_open = len(requests)
        self._sequences = {
            index: _Sequence(IncrementalDetokenizer(params.stop)) for index in range(params.n * len(requests))
        }

    async def take(self) -> list[TextToken | SequenceEnd]:
        """Return what has come since the last call, at least one output; nothing when all requests are done.

        Raises:
            PeraxisError: a request failed, or the variant's tokenizer did.
        """
        outputs: list[TextToken | SequenceEnd] = []
        while not outputs and self._num_open:
            outputs = await self._decoded(await self._events.take())
        self.num_tokens += sum(isinstance(output, TextToken) for output in outputs)
        return outputs

    async def _decoded(self, events: list[tuple[int, Event]]) -> list[TextToken | SequenceEnd]:
        """Decode all new tokens in one call."""
        changed: dict[int, _Sequence] = {}
        for number, event in events:
            if isinstance(event, DoneEvent):
                self.timings = event.timings
                self._num_open -= 1
            elif isinstance(event, PromptEvent):
                self.prompts[number] = await self._prompt(number, event)
            elif isinstance(event, TokenEvent | FinishEvent):
                index = number * self._n + event.index
                sequence = self._sequences.get(index)
                if sequence is None:
                    continue
                changed[index] = sequence
                if isinstance(event, TokenEvent):
                    sequence.tokens.append(event)
                else:
                    sequence.reason = event.reason
        if not changed:
            return []
        new = await self._text.decode_streams([self._new_tokens(sequence) for sequence in changed.values()])
        texts = await self._texts_of(token for sequence in changed.values() for token in sequence.tokens)
        return [
            output
            for (index, sequence), decoded in zip(changed.items(), new, strict=True)
            for output in self._outputs(index, sequence, decoded, texts)
        ]

    def _new_tokens(self, sequence: _Sequence) -> NewTokens:
        # An end token has no text.
        ids = [token.token_id for token in sequence.tokens if token.token_id not in self._stop_token_ids]
        return sequence.detokenizer.push(ids, sequence.reason is not None)

    async def _texts_of(self, tokens: Iterable[TokenEvent]) -> dict[int, str]:
        """Return the text of each token that log-probabilities name."""
        scored = [token for token in tokens if token.logprob is not None]
        if not scored:
            return {}
        ids = {token.token_id for token in scored} | {id_ for token in scored for id_, _ in token.top}
        return dict(zip(ids, await self._text.decode_each(list(ids)), strict=True))

    async def _prompt(self, number: int, event: PromptEvent) -> tuple[TextToken, ...]:
        """Return the tokens of a prompt; the first one has no log-probability."""
        ids = self._requests[number].prompt_ids
        tokens = [
            TokenEvent(number, ids[0]),
            *(TokenEvent(number, token.token_id, token.logprob, token.top) for token in event.tokens),
        ]
        (decoded,) = await self._text.decode_streams([NewTokens(Window(), ids, is_last=True)])
        texts = await self._texts_of(tokens)
        # Tens of thousands of values take long to make, and other requests need the event loop.
        return await asyncio.to_thread(_prompt_tokens, number, tokens, decoded.texts, texts)

    def _outputs(
        self, index: int, sequence: _Sequence, decoded: NewText, texts: dict[int, str]
    ) -> Iterator[TextToken | SequenceEnd]:
        """Yield a sequence's tokens up to a stop string, and its end."""
        visible = sequence.detokenizer.take(decoded)
        tokens, sequence.tokens = sequence.tokens, []
        shown = iter(zip(visible.texts, decoded.texts, strict=False))
        for token in tokens:
            text, whole = ("", "") if token.token_id in self._stop_token_ids else next(shown, (None, ""))
            if text is None:
                break
            yield _text_token(index, token, text, sequence.num_chars, texts)
            sequence.num_chars += len(whole)
        if visible.stopped:
            yield SequenceEnd(index, "stop", visible.tail)
            if sequence.reason is None:
                self._events.stop_sequence(*divmod(index, self._n))
        elif sequence.reason is not None:
            yield SequenceEnd(index, sequence.reason, visible.tail)
        else:
            return
        del self._sequences[index]


def _prompt_tokens(
    number: int, tokens: Sequence[TokenEvent], visible: Sequence[str], texts: dict[int, str]
) -> tuple[TextToken, ...]:
    """Return the tokens of a prompt, given the text that each makes visible and the texts of scored tokens."""
    offset, shown = 0, []
    for token, text in zip(tokens, visible, strict=True):
        shown.append(_text_token(number, token, text, offset, texts))
        offset += len(text)
    return tuple(shown)


def _text_token(index: int, token: TokenEvent, text: str, offset: int, texts: dict[int, str]) -> TextToken:
    if token.logprob is None:
        return TextToken(index, token.token_id, text, offset)
    scored = ScoredText(token.token_id, texts[token.token_id], token.logprob)
    top = tuple(ScoredText(token_id, texts[token_id], logprob) for token_id, logprob in token.top)
    return TextToken(index, token.token_id, text, offset, scored, top)
