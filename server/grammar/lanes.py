"""Lanes: workers that keep the matchers of constrained sequences, and what keeps tenants apart in them.

A call is light or heavy. A light one advances matchers that the worker has, and ends after a slice of processor time. A
heavy one reads a vocabulary, or compiles a grammar and makes a matcher again; it concerns one sequence, so that its
failure has one cause.

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
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from deltastore.errors import PeraxisError
from server.errors import InvalidRequest, WorkerDied, WorkerKilled, WorkerTimeout
from server.fairness import FairCache, FairLimiter, tenant_of
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
from server.text.service import BASE_KEY, VariantText
from server.text.worker_tasks import NotLoaded
from server.workers.pool import MAX_PAUSE_S, MIN_PAUSE_S, WORK_LIMITS, VariantWork, WorkerPool, WorkKind

# Grammars of all tenants together, and tenants.
MAX_GRAMMARS = 4096
MAX_TENANTS = 1024
# A grammar may have failed because the machine had no time for it.
REMEMBERED_S = 300.0


@dataclass(frozen=True, slots=True)
class Rule:
    """A tenant's grammar with one vocabulary.

    Failures are kept per tenant; else a tenant could have a grammar refused to others by failing with it.
    """

    tenant: str
    vocabulary: Vocabulary
    grammar: Grammar

    @property
    def key(self) -> tuple[str, Vocabulary, str]:
        return self.tenant, self.vocabulary, self.grammar.key


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The last outcome of a grammar, which is refused for a reason until a time; without a reason it has worked."""

    reason: str | None = None
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class _Pause:
    length_s: float
    until: float


class Standing:
    """The grammars that worked or failed in lanes, and the pauses of tenants.

    A tenant's pause begins when one of its grammars killed a worker, and doubles if the next such failure comes within
    `MAX_PAUSE_S` of its end. Grammars that have worked are served during a pause.

    Args:
        now: a clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._grammars: FairCache[tuple[str, Vocabulary, str], _Outcome] = FairCache(MAX_GRAMMARS)
        self._pauses: OrderedDict[str, _Pause] = OrderedDict()

    def check(self, rule: Rule) -> None:
        """Refuse a grammar that failed within `REMEMBERED_S`, and a new one while its tenant's pause lasts.

        Raises:
            InvalidRequest: says why, and names the request's field.
        """
        param, now = rule.grammar.param, self._now()
        last = self._grammars.get(rule.key)
        if last is not None and last.reason is not None and now < last.until:
            raise InvalidRequest(last.reason, param)
        pause = self._pauses.get(rule.tenant)
        if pause is not None and not self.has_worked(rule) and (left_s := pause.until - now) > 0:
            raise InvalidRequest(
                f"{param}: other schemas of yours could not be matched in time: simplify the schema, or try again in "
                f"{left_s:.0f} s",
                param,
            )

    def has_worked(self, rule: Rule) -> bool:
        """Return whether a grammar was compiled or advanced in a lane and has not failed since."""
        last = self._grammars.get(rule.key)
        return last is not None and last.reason is None

    def worked(self, rule: Rule) -> None:
        """Record that a grammar was compiled or advanced in a lane, unless a sequence with it failed recently."""
        last = self._grammars.get(rule.key)
        if last is None or last.until <= self._now():
            self._grammars.put(rule.key, _Outcome(), rule.tenant)

    def failed(self, rule: Rule, reason: str, has_killed: bool) -> None:
        """Record that a grammar failed in a lane.

        Args:
            has_killed: its worker is lost, so that the tenant's pause begins.
        """
        self._grammars.put(rule.key, _Outcome(reason, self._now() + REMEMBERED_S), rule.tenant)
        if not has_killed:
            return
        last, now = self._pauses.pop(rule.tenant, _Pause(0.0, 0.0)), self._now()
        goes_on = now < last.until + MAX_PAUSE_S
        length_s = min(max(2 * last.length_s * goes_on, MIN_PAUSE_S), MAX_PAUSE_S)
        self._pauses[rule.tenant] = _Pause(length_s, now + length_s)
        if len(self._pauses) > MAX_TENANTS:
            self._pauses.popitem(last=False)


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
