"""Which variants have slots: the cold one that is loaded next, and the resident one that makes place.

A resident variant that nobody wants makes place at once, the least recently used first. One that has jobs keeps its
slot for a tenure. Then, where others have waited for half of `cold_wait_s`, it is closed: none of its jobs begins any
more, and when the running ones have ended, its slot is free. Where a variant has waited for all of `cold_wait_s`, a
slot is freed at once: the running jobs of the variant that suffers least are preempted. What they have to compute
again is paid for by a share of what all steps compute, before another one is treated so; hence throughput cannot
collapse. Cold variants are loaded in turns of the tenants that want them: one tenant's hundred do not stand before
another's one.

So the first job of a cold variant has its delta, and with it a turn, after at most

    cold_wait_s + ceil((ahead + 1) / slots) * (tenure_s + load time + first token) + (ahead + 1) * payback

`ahead`: cold variants whose turn comes before; `slots`: those that are not pinned; first token: the time in which the
first job of a loaded variant makes one; payback: the time in which `recompute_share` of what is computed is as much as
the running jobs of one variant have in the cache. Plain data: what a slot is, and when a load has ended, `Slots` knows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, Protocol

from server.engine.scheduling.fair_queue import Entry, FairQueue, J, Lane, Turns

CLOSE_AFTER = (
    0.5  # of `cold_wait_s`: earlier, and hot variants are loaded again and again for what would have passed
)
POLLED_PER_PLAN = 16  # cold variants of which one plan asks whether somebody else has made them resident


class Slots(Protocol):
    """The places of deltas; `server/deltas/residency.py`."""

    def is_resident(self, digest: str) -> bool: ...
    def is_loading(self, digest: str) -> bool: ...
    def is_pinned(self, digest: str) -> bool: ...
    def load(
        self, digest: str
    ) -> bool: ...  # begin; evicts what nobody holds, least recently used; False: no place
    def hold(self, digest: str) -> None: ...  # a held delta is never evicted
    def let_go(self, digest: str) -> None: ...


@dataclass(frozen=True, slots=True)
class TenurePolicy:
    """See the module."""

    tenure_s: float
    cold_wait_s: float
    recompute_share: float


class State(Enum):
    COLD = auto()  # not resident
    LOADING = auto()
    OPEN = auto()  # resident and held: its jobs may begin
    CLOSED = auto()  # resident and held until its running jobs have ended


@dataclass(slots=True, eq=False)
class Variant(Generic[J]):
    """A variant that has jobs. One that has none is forgotten, and its delta let go."""

    digest: str
    state: State
    since: float  # when it began to wait for a slot
    opened_at: float = 0.0
    has_started: bool = False  # one of its jobs has, since it was opened
    num_waiting: int = 0
    running: dict[int, Entry[J]] = field(default_factory=dict)  # by order
    lanes: dict[Lane[J], None] = field(default_factory=dict)  # those with jobs that wait

    @property
    def num_jobs(self) -> int:
        return self.num_waiting + len(self.running)


@dataclass(slots=True, eq=False)
class Wants(Generic[J]):
    """The cold variants of one tenant, the longest waiting first, and how many loads it had."""

    counter: float = 0.0
    variants: dict[str, Variant[J]] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        return bool(self.variants)

    @property
    def is_idle(self) -> bool:
        return not self.variants

    @property
    def oldest(self) -> Variant[J]:
        return next(iter(self.variants.values()))


class ColdQueue(Generic[J]):
    """Cold variants by the turns of the tenants that wait for them."""

    def __init__(self) -> None:
        self._turns: Turns[str, Wants[J]] = Turns(lambda name: Wants())

    def add(self, tenant: str, variant: Variant[J]) -> None:
        wants = self._turns.member(tenant)
        wants.variants[variant.digest] = variant
        if len(wants.variants) == 1:
            self._turns.enter(wants)

    def drop(self, tenant: str, digest: str) -> None:
        self._turns.member(tenant).variants.pop(digest, None)

    def first(self) -> Wants[J] | None:
        """The tenant whose turn it is; it has wants."""
        return self._turns.least()


class Tenure(Generic[J]):
    """See the module. The scheduler tells it of every job that begins to wait, starts, stops and leaves."""

    def __init__(self, slots: Slots, queue: FairQueue[J], policy: TenurePolicy) -> None:
        self._slots = slots
        self._queue = queue
        self._policy = policy
        self._debt = 0.0  # tokens to be computed again because of variants that had to make place at once
        self._variants: dict[str, Variant[J]] = {}
        self._cold: dict[str, Variant[J]] = {}  # since when they wait, ascending
        self._young: dict[str, Variant[J]] = {}  # of them, those that have not waited for `cold_wait_s`
        self._all = ColdQueue[J]()
        self._overdue = ColdQueue[J]()
        self._loading: dict[str, Variant[J]] = {}
        self._held: dict[str, Variant[J]] = {}  # open or closed
        self._closed: dict[str, Variant[J]] = {}
        self._polled = 0

    @property
    def wants(self) -> tuple[str, ...]:
        """The variants that wait for a slot or are being loaded, the longest waiting first."""
        return (*self._loading, *self._cold)

    @property
    def num_waiting(self) -> int:
        """Jobs that wait because of their delta: it is not there, or its turn is over."""
        absent = (self._loading, self._cold, self._closed)
        return sum(variant.num_waiting for variants in absent for variant in variants.values())

    def wait(self, entry: Entry[J], now: float) -> None:
        """A job begins to wait, before it stands in the queue."""
        lane = entry.lane
        if lane.digest is None:
            return
        variant = self._variants.get(lane.digest) or self._meet(lane.digest, now)
        variant.num_waiting += 1
        lane.is_open = variant.state is State.OPEN
        if lane not in variant.lanes:
            variant.lanes[lane] = None
            if variant.state is State.COLD:
                self._want(lane, variant)

    def start(self, entry: Entry[J]) -> None:
        """A job that waited runs."""
        if entry.lane.digest is not None:
            variant = self._variants[entry.lane.digest]
            variant.running[entry.order] = entry
            variant.has_started = True
            self._wait_no_longer(entry, variant)

    def stop(self, entry: Entry[J], now: float) -> None:
        """A job that ran has ended, or waits again: `wait` comes first."""
        if entry.lane.digest is not None:
            variant = self._variants[entry.lane.digest]
            del variant.running[entry.order]
            self._settle(variant, now)

    def leave(self, entry: Entry[J], now: float) -> None:
        """A job that waited has ended."""
        if entry.lane.digest is not None:
            variant = self._variants[entry.lane.digest]
            self._wait_no_longer(entry, variant)
            self._settle(variant, now)

    def turn(self, now: float, preempt: Callable[[Entry[J]], None]) -> None:
        """See which loads have ended, and begin those for which there is, or can be made, a place."""
        self._see_loads(now)
        self._see_overdue(now)
        self._reopen()
        while (wants := self._all.first()) is not None and self._load(wants.oldest, now):
            wants.counter += 1
        while (wants := self._overdue.first()) is not None and self._free_one(now, preempt):
            if not self._load(wants.oldest, now):
                break
            wants.counter += 1
        self._see_resident(now)
        self._close(now)

    def computed(self, num_tokens: int) -> None:
        """A step has computed so many tokens: a share of them pays for what is computed again."""
        self._debt = max(0.0, self._debt - self._policy.recompute_share * num_tokens)

    def _see_loads(self, now: float) -> None:
        for variant in list(self._loading.values()):
            if self._slots.is_resident(variant.digest):
                self._open(variant, now)
            elif not self._slots.is_loading(variant.digest):
                self._leave_state(variant)
                self._become_cold(variant, now)

    def _see_overdue(self, now: float) -> None:
        while self._young:
            variant = next(iter(self._young.values()))
            if now - variant.since < self._policy.cold_wait_s:
                break
            del self._young[variant.digest]
            for lane in variant.lanes:
                self._overdue.add(lane.tenant.name, variant)

    def _see_resident(self, now: float) -> None:
        """Open some of the cold variants that are resident all the same: prefetched, or let go and not evicted yet."""
        cold = list(self._cold.values())
        self._polled = self._polled % len(cold) if cold else 0
        for variant in cold[self._polled : self._polled + POLLED_PER_PLAN]:
            if self._slots.is_resident(variant.digest):
                self._open(variant, now)
        self._polled += POLLED_PER_PLAN

    def _load(self, variant: Variant[J], now: float) -> bool:
        """Begin to load a cold variant; False where there is no place."""
        if self._slots.is_resident(variant.digest):
            self._open(variant, now)
            return True
        if not self._slots.load(variant.digest):
            return False
        self._leave_state(variant)
        variant.state = State.LOADING
        self._loading[variant.digest] = variant
        return True

    def _close(self, now: float) -> None:
        """Close as many variants as others wait for a slot, if so many have had their tenure."""
        patience = self._policy.cold_wait_s * CLOSE_AFTER
        impatient = itertools.takewhile(lambda variant: now - variant.since >= patience, self._cold.values())
        num_missing = sum(1 for _ in impatient) - len(self._closed)
        if num_missing > 0:
            still_open = [v for v in self._had_tenure(now) if v.state is State.OPEN]
            for victim in sorted(still_open, key=_harm)[:num_missing]:
                self._shut(victim)
                self._settle(victim, now)

    def _reopen(self) -> None:
        """Those who waited may have gone meanwhile: open what was closed for them."""
        while len(self._closed) > len(self._cold):
            _, variant = self._closed.popitem()
            variant.state = State.OPEN
            for lane in variant.lanes:
                self._queue.open(lane)

    def _free_one(self, now: float, preempt: Callable[[Entry[J]], None]) -> bool:
        """Take the slot of the variant that suffers least, its running jobs with it, unless too much is due already."""
        if self._debt > 0:
            return False
        progressed = (v for v in self._had_tenure(now) if all(e.has_progressed for e in v.running.values()))
        victim = min(progressed, key=_harm, default=None)
        if victim is None:
            return False
        self._shut(victim)
        for entry in list(victim.running.values()):
            self._debt += entry.job.num_computed_tokens
            preempt(entry)
        self._settle(victim, now)
        return True

    def _had_tenure(self, now: float) -> Iterator[Variant[J]]:
        """Those that had their slots for long enough, and some use of them."""
        for variant in self._held.values():
            long_enough = now - variant.opened_at >= self._policy.tenure_s
            if long_enough and variant.has_started and not self._slots.is_pinned(variant.digest):
                yield variant

    def _shut(self, variant: Variant[J]) -> None:
        variant.state = State.CLOSED
        self._closed[variant.digest] = variant
        for lane in variant.lanes:
            lane.is_open = False

    def _meet(self, digest: str, now: float) -> Variant[J]:
        """A variant that nobody wanted until now. Where others wait for a slot, it waits behind them even if resident:
        else a variant whose jobs are short would never be idle when a slot is looked for.
        """
        variant = self._variants[digest] = Variant[J](digest, State.COLD, now)
        if self._slots.is_loading(digest):
            variant.state = State.LOADING
            self._loading[digest] = variant
        elif self._slots.is_resident(digest) and not self._cold:
            self._open(variant, now)
        else:
            self._become_cold(variant, now)
        return variant

    def _open(self, variant: Variant[J], now: float) -> None:
        self._leave_state(variant)
        self._slots.hold(variant.digest)
        variant.state, variant.opened_at, variant.has_started = State.OPEN, now, False
        self._held[variant.digest] = variant
        for lane in variant.lanes:
            self._queue.open(lane)

    def _become_cold(self, variant: Variant[J], now: float) -> None:
        variant.state, variant.since = State.COLD, now
        self._cold[variant.digest] = self._young[variant.digest] = variant
        for lane in variant.lanes:
            self._want(lane, variant)

    def _want(self, lane: Lane[J], variant: Variant[J]) -> None:
        self._all.add(lane.tenant.name, variant)
        if variant.digest not in self._young:
            self._overdue.add(lane.tenant.name, variant)

    def _wait_no_longer(self, entry: Entry[J], variant: Variant[J]) -> None:
        variant.num_waiting -= 1
        lane = entry.lane
        if not lane.num_waiting:
            del variant.lanes[lane]
            self._want_no_longer(lane, variant)

    def _want_no_longer(self, lane: Lane[J], variant: Variant[J]) -> None:
        self._all.drop(lane.tenant.name, variant.digest)
        self._overdue.drop(lane.tenant.name, variant.digest)

    def _settle(self, variant: Variant[J], now: float) -> None:
        """Let go of a variant that nobody wants, and of a closed one whose jobs have stopped."""
        if not variant.num_jobs:
            self._leave_state(variant)
            del self._variants[variant.digest]
        elif variant.state is State.CLOSED and not variant.running:
            self._leave_state(variant)
            self._become_cold(variant, now)

    def _leave_state(self, variant: Variant[J]) -> None:
        """Take a variant out of everything that its state put it into."""
        digest = variant.digest
        if variant.state is State.COLD:
            self._cold.pop(digest, None)
            self._young.pop(digest, None)
            for lane in variant.lanes:
                self._want_no_longer(lane, variant)
        elif variant.state is State.LOADING:
            del self._loading[digest]
        else:
            del self._held[digest]
            self._closed.pop(digest, None)
            self._slots.let_go(digest)


def _harm(variant: Variant[J]) -> tuple[bool, int, float]:
    """The least goes first: closed already, the fewest jobs, the longest in its slot."""
    return variant.state is State.OPEN, variant.num_jobs, variant.opened_at
