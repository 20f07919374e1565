"""Workers that keep matchers: each request stays with one of them, so that a token costs no replay. Event loop only.

Knows neither engine nor HTTP. A lane is a pool of one worker, which has a queue per tenant and variant; tenants are
served in turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from functools import partial

from deltastore.errors import PeraxisError
from server.errors import InvalidRequest, WorkerDied
from server.grammar.matching import (
    WORKER_MODULES,
    NewSampled,
    NextMasks,
    Vocabulary,
    advance_all,
    reading_vocabulary,
)
from server.text.variant_text import VariantText
from server.text.variant_work import WORK_LIMITS, VariantWork, WorkKind
from server.workers.fair_limiter import tenant_of
from server.workers.pool import WorkerPool

NUM_LANES = 2
# Sequences of one call. Each step of a matcher is bounded by llguidance, and a call by `WORK_S`.
MAX_BATCH = 64
# A worker that was killed must not end the other sequences of its tenant, so nothing is refused for a while.
MATCHING = WorkKind("its constrained output", "simplify the schema", pauses=False)

Asked = tuple[NewSampled, "asyncio.Future[NextMasks | PeraxisError | None]"]


class Lane:
    """One worker with matchers."""

    def __init__(self) -> None:
        self.num_open = 0  # requests that stay with it
        self._pool = WorkerPool(1, WORK_LIMITS, WORKER_MODULES)
        self._shares: dict[Hashable, LaneShare] = {}

    def share(self, text: VariantText, vocabulary: Vocabulary) -> LaneShare:
        """Return the calls of a tenant on a variant, for one more request; give it back with `leave`."""
        key = (text.share, text.label, vocabulary)
        if key not in self._shares:
            work = VariantWork(self._pool, (tenant_of(text.share), key), text.label, kind=MATCHING)
            self._shares[key] = LaneShare(work, text, vocabulary)
        self.num_open += 1
        self._shares[key].num_open += 1
        return self._shares[key]

    def leave(self, share: LaneShare) -> None:
        """Forget a share when its last request has ended."""
        self.num_open -= 1
        share.num_open -= 1
        if not share.num_open:
            self._shares = {key: other for key, other in self._shares.items() if other is not share}

    async def close(self) -> None:
        await self._pool.close()


class LaneShare:
    """The sequences of one tenant on one variant in one lane. Calls that come during another are made together."""

    def __init__(self, work: VariantWork, text: VariantText, vocabulary: Vocabulary) -> None:
        self.num_open = 0
        self._work = work
        self._text = text
        self._vocabulary = vocabulary
        self._waiting: list[Asked] = []
        self._ended: list[str] = []
        self._calling: asyncio.Task[None] | None = None

    async def advance(self, new: NewSampled, history: Sequence[int]) -> NextMasks:
        """Have the matcher of a sequence consume tokens; make it again from `history` if its worker has lost it.

        Args:
            history: all tokens of the sequence, the new ones included.

        Raises:
            InvalidRequest: the grammar needs too much time or memory.
            PeraxisError: the worker could not be started, or the server shuts down.
        """
        result = await self._ask(new)
        if result is None:
            result = await self._ask(NewSampled(new.matcher, new.grammar, 0, tuple(history)))
        if result is None:
            raise InvalidRequest(
                "the worker that constrains the output died twice: simplify the schema, or send the request again"
            )
        if isinstance(result, PeraxisError):
            raise result
        return result

    def forget(self, matcher: str) -> None:
        """Have the worker drop the matcher of a sequence that has ended, with the next call."""
        self._ended.append(matcher)

    async def _ask(self, new: NewSampled) -> NextMasks | PeraxisError | None:
        answer: asyncio.Future[NextMasks | PeraxisError | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((new, answer))
        if self._calling is None:
            self._calling = asyncio.create_task(self._call_all())
        return await answer

    async def _call_all(self) -> None:
        """Call the worker until nothing waits."""
        asked: list[Asked] = []
        try:
            while self._waiting:
                # A sequence that has ended needs no mask.
                waiting = [each for each in self._waiting if not each[1].done()]
                asked, self._waiting = waiting[:MAX_BATCH], waiting[MAX_BATCH:]
                for (_, answer), result in zip(asked, await self._call_isolated(asked), strict=True):
                    if not answer.done():
                        answer.set_result(result)
        except BaseException as error:
            for _, answer in (*asked, *self._waiting):
                if not answer.done():
                    answer.set_exception(error)
            self._waiting = []
            raise
        finally:
            self._calling = None

    async def _call_isolated(self, asked: list[Asked]) -> list[NextMasks | PeraxisError | None]:
        """Advance sequences together; after a failure each alone, so that only the one at fault fails."""
        try:
            return await self._call([new for new, _ in asked])
        except PeraxisError as error:
            if len(asked) == 1:
                # Something else may have killed the worker: the sequence is tried once more, from its beginning.
                return [None if isinstance(error.__cause__, WorkerDied) else error]
        return [(await self._call_isolated([one]))[0] for one in asked]

    async def _call(self, all_new: list[NewSampled]) -> list[NextMasks | PeraxisError | None]:
        ended, self._ended = self._ended, []
        advance = partial(advance_all, all_new=all_new, ended=ended)
        warm = partial(advance, vocabulary=self._vocabulary)
        cold = partial(reading_vocabulary, vocabulary=self._vocabulary, function=advance)
        return await self._text.run_in(self._work, warm, cold)
