"""Constrains the outputs of an HTTP process: tries new grammars, and feeds each request its masks. Event loop only.

A grammar that was never tried is compiled in the pool for tenants' other input, where it can kill only its own work. A
lane then compiles it again before the engine has the request, so that the compilation delays the first token and not
those after it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from deltastore.errors import PeraxisError
from server.errors import InvalidRequest
from server.fairness import FairCache, Share, tenant_of
from server.grammar.grammar import Grammar
from server.grammar.lanes import Lanes, Place, Rule, Standing
from server.grammar.matching import NewSampled, NextMasks, Vocabulary, opening_masks, reading_vocabulary
from server.protocol.engine_client import EngineLink
from server.protocol.messages import DoneEvent, ErrorEvent, Event, FinishEvent, TokenEvent
from server.protocol.request import Request
from server.text.service import VariantText
from server.workers.pool import VariantWork, WorkerPool, WorkKind


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


# Bound on the first masks of grammars that were tried.
CACHE_BYTES = 32 << 20
MAX_WORKS = 1024
TRYING = WorkKind("compiling a schema for it", "simplify the schema")


class GrammarService:
    """Gives requests the masks of their grammars. What was tried is kept by vocabulary and grammar within a bound.

    It counts for the tenant that tried it, which loses its own if it holds more than others.

    Args:
        engine: takes the masks.
        pool: where new grammars are tried; its owner closes it.
    """

    def __init__(self, engine: EngineLink, pool: WorkerPool) -> None:
        self._engine = engine
        self._pool = pool
        self._standing = Standing()
        self._lanes = Lanes(self._standing)
        self._tried: FairCache[tuple[Vocabulary, str], NextMasks] = FairCache(CACHE_BYTES)
        self._works: FairCache[tuple[Share, str], VariantWork] = FairCache(MAX_WORKS)
        self._num_opened = 0

    async def open(self, text: VariantText, grammar: Grammar) -> Constraint:
        """Try a grammar with the vocabulary of a variant, and have a lane compile it.

        Raises:
            InvalidRequest: llguidance refuses the grammar or the tokenizer, it needs too much time or memory, or it is
                refused because it or others of the tenant failed in a lane.
            QueueFull: too many grammars of the tenant wait.
        """
        vocabulary = Vocabulary(
            text.tokenizer_key, text.num_embeddings, tuple(sorted(text.generation.eos_token_ids))
        )
        self._standing.check(Rule(tenant_of(text.share), vocabulary, grammar))
        key = (vocabulary, grammar.key)
        with _naming(grammar):
            opening = self._tried.get(key)
            if opening is None:
                opening = await self._try(text, vocabulary, grammar)
                self._tried.put(key, opening, tenant_of(text.share), _num_bytes(opening))
            await self._compile(text, vocabulary, grammar)
        return Constraint(self._engine, self._lanes, text, (vocabulary, grammar), opening)

    async def close(self) -> None:
        """End the lanes; what waits for them raises Draining."""
        await self._lanes.close()

    async def _try(self, text: VariantText, vocabulary: Vocabulary, grammar: Grammar) -> NextMasks:
        warm = partial(opening_masks, vocabulary=vocabulary, grammar=grammar)
        cold = partial(
            reading_vocabulary, vocabulary=vocabulary, function=partial(opening_masks, grammar=grammar)
        )
        return await text.run_in(self._work(text), warm, cold)

    async def _compile(self, text: VariantText, vocabulary: Vocabulary, grammar: Grammar) -> None:
        """Compile a grammar in the lane that the request would enter now."""
        self._num_opened += 1
        new = NewSampled(f"opened-{self._num_opened}", grammar, 0, ())
        place = self._lanes.enter(text, vocabulary)
        try:
            await place.advance(new, ())
            place.forget(new.matcher)
        finally:
            place.leave()

    def _work(self, text: VariantText) -> VariantWork:
        key, tenant = (text.share, text.label), tenant_of(text.share)
        work = self._works.get(key)
        if work is None:
            work = VariantWork(self._pool, (tenant, ("grammar", text.share)), text.label, kind=TRYING)
            self._works.put(key, work, tenant)
        return work


class Constraint:
    """The grammar of one call with a variant's vocabulary; each of its requests gets a feed of masks."""

    def __init__(
        self,
        engine: EngineLink,
        lanes: Lanes,
        text: VariantText,
        rule: tuple[Vocabulary, Grammar],
        opening: NextMasks,
    ) -> None:
        self._engine = engine
        self._lanes = lanes
        self._text = text
        self._vocabulary, self._grammar = rule
        self._opening = opening

    def feed(self) -> MaskFeed:
        """Return the masks of one request, which takes a place in a lane."""
        return MaskFeed(
            self._engine, self._lanes.enter(self._text, self._vocabulary), self._grammar, self._opening
        )


@contextmanager
def _naming(grammar: Grammar) -> Iterator[None]:
    """Have errors name the request's field, which the client must change for any of these reasons."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(str(error), error.param or grammar.param) from error


def _num_bytes(masks: NextMasks) -> int:
    return sum(map(len, masks.masks))
