"""The lanes of an HTTP process, and the places of requests in them. Event loop only.

A tenant's grammar delays another tenant's sequence at most by the sum of `PATIENCE_S`, one slice per tenant in its
lane, and the time to make its matcher again:

- Light calls end after a slice of processor time, a step that takes long ends its grammar, and tenants have a lane in
  turn. A tenant's new requests share no lane with other tenants while there is another, and stay in all lanes but one.
- Calls that read a variant's own vocabulary, or compile a grammar that has not worked in a lane, need a permit. A
  tenant has one, and all tenants together have one less than there are lanes.
- When a call takes longer than `PATIENCE_S`, sequences of other tenants go on in another lane that has read their
  vocabulary, and so do those whose worker died. `Lanes` keeps such a lane for each vocabulary in use.
- A grammar that failed in a lane is refused, and so are new grammars of a tenant whose grammars kill workers, for a
  pause.

If calls of several tenants are late in all lanes at once, sequences wait until one ends or is killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from deltastore.errors import PeraxisError
from server.errors import InvalidRequest
from server.fair_limiter import FairLimiter, tenant_of
from server.grammar.grammar import Grammar
from server.grammar.lane import Lane, LaneLate, LaneShare
from server.grammar.matching import MAX_MATCHERS, NewSampled, NextMasks, Vocabulary
from server.grammar.standing import Standing
from server.text.variant_text import VariantText
from server.text.worker_tasks import NotLoaded

NUM_LANES = 3
# How often one advance of a sequence may move to another lane; each move has a cause of its own, such as a dead worker.
MAX_MOVES = 16


class Lanes:
    """All lanes; places of requests in them are taken with `enter`."""

    def __init__(self, standing: Standing) -> None:
        heavy = FairLimiter(NUM_LANES - 1, 1, MAX_MATCHERS, permits_per_tenant=1)
        self.lanes = [Lane(heavy, standing) for _ in range(NUM_LANES)]
        self._spares: dict[Vocabulary, asyncio.Task[None]] = {}

    def enter(self, text: VariantText, vocabulary: Vocabulary) -> Place:
        """Give a request a place in the best lane for its tenant; call `leave` on it last."""
        tenant = tenant_of(text.share)
        own = [lane for lane in self.lanes if lane.serves(tenant)]
        choices = own if len(own) >= NUM_LANES - 1 else self.lanes
        best = min(
            choices, key=lambda lane: (lane.burden(tenant), not lane.has_read(vocabulary), lane.num_open)
        )
        return Place(self, best, text, vocabulary)

    def another(self, lane: Lane, tenant: str, vocabulary: Vocabulary) -> Lane | None:
        """Return the best other lane, if possible one that has read the vocabulary; None if all are late."""
        others = [other for other in self.lanes if other is not lane and not other.is_late_for(tenant)]
        return min(
            others,
            key=lambda other: (not other.has_read(vocabulary), other.burden(tenant), other.num_open),
            default=None,
        )

    def keep_spare(self, lane: Lane, text: VariantText, vocabulary: Vocabulary, grammar: Grammar) -> None:
        """Have a lane besides this one read a vocabulary, if none has."""
        if vocabulary in self._spares or any(
            other.has_read(vocabulary) for other in self.lanes if other is not lane
        ):
            return
        if (spare := self.another(lane, tenant_of(text.share), vocabulary)) is not None:
            self._spares[vocabulary] = asyncio.create_task(self._read(spare, text, vocabulary, grammar))

    async def close(self) -> None:
        """End the workers; what waits for them raises Draining."""
        for lane in self.lanes:
            await lane.close()
        await asyncio.gather(*self._spares.values())

    async def _read(self, lane: Lane, text: VariantText, vocabulary: Vocabulary, grammar: Grammar) -> None:
        share = lane.share(text, vocabulary)
        try:
            await share.load(grammar)
        except PeraxisError:
            # Sequences stay in their lane without a spare one; `Standing` has recorded the failure.
            return
        finally:
            lane.leave(share)
            del self._spares[vocabulary]


class Place:
    """One request in a lane, and in another when that one is held up or has lost its worker."""

    def __init__(self, lanes: Lanes, lane: Lane, text: VariantText, vocabulary: Vocabulary) -> None:
        self._lanes = lanes
        self._text = text
        self._vocabulary = vocabulary
        self._share: LaneShare | None = lane.share(text, vocabulary)
        # A matcher has been in the present lane, and another lane has the vocabulary or is about to read it.
        self._is_settled = False

    async def advance(self, new: NewSampled, history: Sequence[int]) -> NextMasks:
        """Have the matcher of a sequence consume tokens; make it again from `history` where it is missing.

        Args:
            history: all tokens of the sequence, the new ones included.

        Raises:
            InvalidRequest: the grammar needs too much time or memory, or is refused because it or others did.
            PeraxisError: a worker could not be started, or the server shuts down.
        """
        for _ in range(MAX_MOVES):
            share = self._share
            if share is None:
                break
            try:
                masks = await self._advance(share, new, history)
            except LaneLate:
                if self._move(share):
                    share.forget(new.matcher)
                else:
                    await share.lane.on_time.wait()
            except NotLoaded:
                share.lane.take_in(self._vocabulary, is_read=False)
                await self._read_or_move(share, new.grammar)
            else:
                self._settle(new.grammar)
                return masks
        raise InvalidRequest(
            "the workers that constrain the output died too often: simplify the schema, or send the request again"
        )

    def forget(self, matcher: str) -> None:
        """Have the worker drop the matcher of a sequence that has ended."""
        if self._share is not None:
            self._share.forget(matcher)

    def leave(self) -> None:
        """Give the place back; no effect if it has been."""
        if self._share is not None:
            self._share.lane.leave(self._share)
            self._share = None

    async def _advance(self, share: LaneShare, new: NewSampled, history: Sequence[int]) -> NextMasks:
        # Without a worker the call would wait until one has started.
        if self._is_settled and not share.lane.has_read(self._vocabulary):
            raise NotLoaded("the worker was lost")
        return await share.advance(new, history)

    async def _read_or_move(self, share: LaneShare, grammar: Grammar) -> None:
        """Go to another lane that has the vocabulary after the worker was lost; else have the lane read it."""
        other = self._lanes.another(share.lane, share.tenant, self._vocabulary)
        is_elsewhere = other is not None and other.has_read(self._vocabulary)
        if self._share is not share or (self._is_settled and is_elsewhere):
            self._move(share)
            return
        try:
            await share.load(grammar)
        except LaneLate:
            self._move(share)

    def _move(self, share: LaneShare) -> bool:
        """Go to another lane, unless another sequence of the request went already; return False if all are late."""
        if self._share is not share:
            return True
        other = self._lanes.another(share.lane, share.tenant, self._vocabulary)
        if other is None:
            return False
        self._share, self._is_settled = other.share(self._text, self._vocabulary), False
        share.lane.leave(share)
        return True

    def _settle(self, grammar: Grammar) -> None:
        if not self._is_settled and self._share is not None:
            self._is_settled = True
            self._lanes.keep_spare(self._share.lane, self._text, self._vocabulary, grammar)
