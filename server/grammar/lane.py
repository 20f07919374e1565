"""One worker that keeps matchers, and the calls of tenants on it. Event loop only.

A call is light or heavy. A light one advances matchers that the worker has, and ends after a slice of processor time. A
heavy one reads a vocabulary, or compiles a grammar and makes a matcher again; it concerns one sequence, so that its
failure has one cause.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from typing import TypeVar

from deltastore.errors import PeraxisError
from server.errors import InvalidRequest, WorkerDied, WorkerKilled, WorkerTimeout
from server.fair_limiter import FairLimiter, tenant_of
from server.grammar.grammar import Grammar
from server.grammar.matching import (
    MAX_MATCHERS,
    WORKER_MODULES,
    NewSampled,
    NextMasks,
    Vocabulary,
    advance_all,
    make_matcher,
    read_vocabulary,
)
from server.grammar.standing import Rule, Standing
from server.text.variant_text import BASE_KEY, VariantText
from server.text.variant_work import WORK_LIMITS, VariantWork, WorkKind
from server.workers.pool import WorkerPool

# Sequences of one light call.
MAX_BATCH = 64
# Time of one tenant's call after which other tenants' sequences leave the lane.
PATIENCE_S = 0.2
# A failure pauses no share: that would end its sequences with harmless grammars. `Standing` pauses tenants instead.
MATCHING = WorkKind("its constrained output", "simplify the schema", pauses=False)

T = TypeVar("T")
Result = NextMasks | PeraxisError | None
Asked = tuple[NewSampled, "asyncio.Future[Result]"]


class LaneLate(PeraxisError):
    """A call of another tenant takes too long: the sequence goes on in another lane."""


class Lane:
    """One worker with matchers. Tenants have it in turn, and so do the variants of a tenant.

    Args:
        heavy: the permits of heavy calls, which lanes share.
    """

    def __init__(self, heavy: FairLimiter, standing: Standing) -> None:
        self.num_open = 0  # requests that stay with it
        self.on_time = asyncio.Event()  # no call is late
        self.on_time.set()
        self.heavy = heavy
        self.standing = standing
        self.ended: list[str] = []  # matchers for the worker to drop with the next light call
        self._late_tenant: str | None = None
        self._vocabularies: set[Vocabulary] = set()
        self._pool = WorkerPool(1, WORK_LIMITS, WORKER_MODULES)
        self._turns = FairLimiter(1, 1, MAX_MATCHERS)
        self._waiting: dict[asyncio.Timeout, str] = {}
        self._shares: dict[Hashable, LaneShare] = {}

    def share(self, text: VariantText, vocabulary: Vocabulary) -> LaneShare:
        """Return the calls of a tenant on a variant, for one more request; give it back with `leave`."""
        key = (text.share, text.label, vocabulary)
        if key not in self._shares:
            work = VariantWork(self._pool, (tenant_of(text.share), key), text.label, kind=MATCHING)
            self._shares[key] = LaneShare(self, work, text, vocabulary)
        self.num_open += 1
        self._shares[key].num_open += 1
        return self._shares[key]

    def leave(self, share: LaneShare) -> None:
        """Forget a share when its last request has ended."""
        self.num_open -= 1
        share.num_open -= 1
        if not share.num_open:
            self._shares = {key: other for key, other in self._shares.items() if other is not share}

    def serves(self, tenant: str) -> bool:
        """Return whether requests of a tenant stay with this lane."""
        return any(share.tenant == tenant for share in self._shares.values())

    def burden(self, tenant: str) -> tuple[bool, bool]:
        """Return whether the lane is late for a tenant, and whether others use it: the smallest is the best."""
        return self.is_late_for(tenant), any(share.tenant != tenant for share in self._shares.values())

    def has_read(self, vocabulary: Vocabulary) -> bool:
        """Return whether the worker runs and is taken to have a vocabulary."""
        return self._pool.is_running and vocabulary in self._vocabularies

    def take_in(self, vocabulary: Vocabulary, is_read: bool) -> None:
        """Note that the worker has a vocabulary, or that it has not."""
        (self._vocabularies.add if is_read else self._vocabularies.discard)(vocabulary)

    def is_late_for(self, tenant: str) -> bool:
        """Return whether a call of another tenant takes longer than `PATIENCE_S`."""
        return self._late_tenant not in (None, tenant)

    @asynccontextmanager
    async def turn(self, work: VariantWork) -> AsyncIterator[None]:
        """Wait for the worker and hold it inside the `async with` block.

        Raises:
            LaneLate: a call of another tenant takes longer than `PATIENCE_S`.
        """
        tenant = tenant_of(work.share)
        async with AsyncExitStack() as held:
            await self._wait(work, tenant, held)
            timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._be_late, tenant)
            try:
                yield
            finally:
                timer.cancel()
                self._late_tenant = None
                self.on_time.set()
                # The call may have ended it.
                if not self._pool.is_running:
                    self._vocabularies.clear()

    async def close(self) -> None:
        await self._pool.close()

    async def _wait(self, work: VariantWork, tenant: str, held: AsyncExitStack) -> None:
        late = LaneLate("a call of another tenant takes too long: the sequence goes on in another lane")
        if self.is_late_for(tenant):
            raise late
        try:
            async with asyncio.timeout(None) as waiting:
                self._waiting[waiting] = tenant
                try:
                    await held.enter_async_context(self._turns.permit(work.share))
                finally:
                    del self._waiting[waiting]
        except TimeoutError:
            raise late from None

    def _be_late(self, tenant: str) -> None:
        self._late_tenant = tenant
        self.on_time.clear()
        for waiting, other in self._waiting.items():
            if other != tenant:
                waiting.reschedule(asyncio.get_running_loop().time())


class LaneShare:
    """The sequences of one tenant on one variant in one lane. Light calls that come during another are one call."""

    def __init__(self, lane: Lane, work: VariantWork, text: VariantText, vocabulary: Vocabulary) -> None:
        self.num_open = 0
        self.lane = lane
        self.tenant = tenant_of(text.share)
        self._work = work
        self._text = text
        self._vocabulary = vocabulary
        self._waiting: list[Asked] = []
        self._calling: asyncio.Task[None] | None = None
        self._heavy_calls: set[asyncio.Task[None]] = set()

    async def advance(self, new: NewSampled, history: Sequence[int]) -> NextMasks:
        """Have the matcher of a sequence consume tokens; make it again from `history` if the worker does not have it.

        Args:
            history: all tokens of the sequence, the new ones included.

        Raises:
            InvalidRequest: the grammar needs too much time or memory, or is refused because it or others did.
            LaneLate: another tenant holds the lane.
            NotLoaded: the worker has not read the vocabulary.
            PeraxisError: the worker could not be started, or the server shuts down.
        """
        rule, standing = self._rule(new.grammar), self.lane.standing
        result = await self._ask(new)
        if result is None:
            again = NewSampled(new.matcher, new.grammar, 0, tuple(history))
            # A grammar that has worked must not wait for calls with grammars that may be slow.
            is_new = not standing.has_worked(rule)
            result = await self._heavy(new.grammar, partial(self._make, again), needs_permit=is_new)
        if isinstance(result, PeraxisError):
            if isinstance(result, InvalidRequest):
                standing.failed(rule, str(result), has_killed=False)
            raise result
        standing.worked(rule)
        return result

    async def load(self, grammar: Grammar) -> None:
        """Have the worker read the vocabulary for a grammar; raises as `advance`."""
        await self._heavy(grammar, self._load, needs_permit=self._vocabulary.key != BASE_KEY)

    def forget(self, matcher: str) -> None:
        """Have the worker drop the matcher of a sequence that has ended, with the next call."""
        self.lane.ended.append(matcher)

    async def _ask(self, new: NewSampled) -> Result:
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
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
                results = await self._call([new for new, _ in asked])
                for (_, answer), result in zip(asked, results, strict=False):
                    if not answer.done():
                        answer.set_result(result)
                self._waiting = asked[len(results) :] + self._waiting
        except BaseException as error:
            for _, answer in (*asked, *self._waiting):
                if not answer.done():
                    answer.set_exception(error)
            self._waiting = []
            raise
        finally:
            self._calling = None

    async def _call(self, all_new: list[NewSampled]) -> Sequence[Result]:
        """Make a light call. After the worker's death each sequence gets None: a heavy call shows which is at fault."""
        try:
            async with self.lane.turn(self._work):
                ended, self.lane.ended = self.lane.ended, []
                return await self._work.run(advance_all, self._vocabulary, self.tenant, all_new, ended)
        except PeraxisError as error:
            if not _has_killed(error):
                return [error] * len(all_new)
            return [None] * len(all_new)

    async def _heavy(self, grammar: Grammar, function: Callable[[], Awaitable[T]], needs_permit: bool) -> T:
        """Call `function` when it has the lane and, if it needs one, a permit of heavy calls."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        # A task of its own: the sequence may end meanwhile, and a call that is cancelled kills the worker.
        permit = self.lane.heavy.permit(self.tenant) if needs_permit else nullcontext()
        task = asyncio.create_task(self._answer(answer, permit, partial(self._alone, grammar, function)))
        self._heavy_calls.add(task)
        task.add_done_callback(self._heavy_calls.discard)
        return await answer

    async def _answer(
        self,
        answer: asyncio.Future[T],
        permit: AbstractAsyncContextManager[None],
        function: Callable[[], Awaitable[T]],
    ) -> None:
        try:
            async with permit, self.lane.turn(self._work):
                if answer.done():
                    return
                result = await function()
        except BaseException as error:
            if not answer.done():
                answer.set_exception(error)
            if not isinstance(error, PeraxisError):
                raise
        else:
            if not answer.done():
                answer.set_result(result)

    async def _alone(self, grammar: Grammar, function: Callable[[], Awaitable[T]]) -> T:
        rule, standing = self._rule(grammar), self.lane.standing
        # Checked when its turn has come: grammars that waited must not kill one worker after the other.
        standing.check(rule)
        try:
            try:
                return await function()
            except InvalidRequest as error:
                if not isinstance(error.__cause__, WorkerKilled):
                    raise
                return await function()
        except InvalidRequest as error:
            standing.failed(rule, str(error), _has_killed(error))
            raise

    async def _make(self, new: NewSampled) -> NextMasks:
        return await self._work.run(make_matcher, self._vocabulary, self.tenant, new)

    async def _load(self) -> None:
        if not self.lane.has_read(self._vocabulary):
            read = partial(read_vocabulary, vocabulary=self._vocabulary, owner=self.tenant)
            await self._text.run_in(self._work, read, read)
            self.lane.take_in(self._vocabulary, is_read=True)

    def _rule(self, grammar: Grammar) -> Rule:
        return Rule(self.tenant, self._vocabulary, grammar)


def _has_killed(error: PeraxisError) -> bool:
    return isinstance(error.__cause__, WorkerDied | WorkerTimeout)
