"""Constrains the outputs of an HTTP process: tries new grammars, and gives each request a lane. Event loop only.

A grammar that was never tried is compiled in the pool for tenants' other input, where it can kill only its own work. A
lane then compiles it again before the engine has the request, so that the compilation delays the first token and not
those after it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from server.errors import InvalidRequest
from server.fair_limiter import tenant_of
from server.grammar.grammar import Grammar
from server.grammar.lanes import Lanes
from server.grammar.mask_feed import MaskFeed
from server.grammar.matching import NewSampled, NextMasks, Vocabulary, opening_masks, reading_vocabulary
from server.grammar.standing import Rule, Standing
from server.http.engine_link import EngineLink
from server.text.variant_text import VariantText
from server.text.variant_work import VariantWork, WorkKind
from server.workers.pool import WorkerPool

# Bound on the first masks of grammars that were tried.
CACHE_BYTES = 32 << 20
MAX_WORKS = 1024
TRYING = WorkKind("compiling a schema for it", "simplify the schema")


class GrammarService:
    """Gives requests the masks of their grammars. What was tried is kept by vocabulary and grammar within a bound.

    Args:
        engine: takes the masks.
        pool: where new grammars are tried; its owner closes it.
    """

    def __init__(self, engine: EngineLink, pool: WorkerPool) -> None:
        self._engine = engine
        self._pool = pool
        self._standing = Standing()
        self._lanes = Lanes(self._standing)
        self._tried: OrderedDict[tuple[Vocabulary, str], NextMasks] = OrderedDict()
        self._works: OrderedDict[object, VariantWork] = OrderedDict()
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
            if key not in self._tried:
                self._keep(key, await self._try(text, vocabulary, grammar))
            self._tried.move_to_end(key)
            opening = self._tried[key]
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
        key = (text.share, text.label)
        if key not in self._works:
            self._works[key] = VariantWork(
                self._pool, (tenant_of(text.share), ("grammar", text.share)), text.label, kind=TRYING
            )
            if len(self._works) > MAX_WORKS:
                self._works.popitem(last=False)
        self._works.move_to_end(key)
        return self._works[key]

    def _keep(self, key: tuple[Vocabulary, str], opening: NextMasks) -> None:
        self._tried[key] = opening
        while len(self._tried) > 1 and sum(map(_num_bytes, self._tried.values())) > CACHE_BYTES:
            self._tried.popitem(last=False)


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
