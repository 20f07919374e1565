"""Who is next: jobs wait in lanes, one per tenant and variant, and whoever got least goes first.

Virtual token counters on two levels: tenants among each other, and the lanes of one tenant among each other. A member
that begins to wait is lifted to the least of those that wait already, so that nobody saves up idle time (Sheng et al.,
"Fairness in Serving Large Language Models", 2024; the lift is the start tag of start-time fair queueing). Knows
nothing of slots, pages or steps.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

SWEEP_SLACK = (
    64  # members more than twice those that were worth keeping, before the idle ones are looked through
)


class Job(Protocol):
    """One sample of a request. Ids are unique among the jobs that have not ended."""

    @property
    def id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def digest(self) -> str | None: ...  # of the variant; None is the base
    @property
    def num_tokens(self) -> int: ...  # prompt, and what was generated
    @property
    def num_computed_tokens(self) -> int: ...  # how many of them the KV cache holds


J = TypeVar("J", bound=Job)


class Member(Protocol):
    """One of those who take turns."""

    counter: float  # what it got so far; never falls

    @property
    def is_ready(self) -> bool: ...  # it has something that could go now
    @property
    def is_idle(self) -> bool: ...  # nothing of it waits or runs


K = TypeVar("K", bound=Hashable)
M = TypeVar("M", bound=Member)


class Turns(Generic[K, M]):
    """Members by key, and the ready one with the least counter. All operations are O(log members), amortized.

    The heap is put right lazily: a member whose counter grew or that is not ready any more is noticed at the top.
    """

    def __init__(self, make: Callable[[K], M]) -> None:
        self._make = make
        self._members: dict[K, M] = {}
        self._heap: list[tuple[float, int, M]] = []
        self._in_heap: set[int] = set()  # by identity: a member is there once
        self._ticks = itertools.count()
        self._floor = 0.0  # what the least of the ready had, the last time somebody looked
        self._sweep_at = SWEEP_SLACK

    def member(self, key: K) -> M:
        """The member of that key; made when it is new."""
        found = self._members.get(key)
        if found is None:
            if len(self._members) >= self._sweep_at:
                self._sweep()
            found = self._members[key] = self._make(key)
        return found

    def enter(self, member: M) -> None:
        """A member has become ready: it begins where the least of the others is, or further. Harmless if it was."""
        self.least()
        member.counter = max(member.counter, self._floor)
        if id(member) not in self._in_heap:
            self._in_heap.add(id(member))
            heapq.heappush(self._heap, (member.counter, next(self._ticks), member))

    def least(self) -> M | None:
        """The ready member that got least; among equals, the one that has been there longest."""
        while self._heap:
            counter, _, member = self._heap[0]
            self._floor = max(self._floor, counter)
            if not member.is_ready:
                heapq.heappop(self._heap)
                self._in_heap.remove(id(member))
            elif member.counter != counter:
                heapq.heapreplace(self._heap, (member.counter, next(self._ticks), member))
            else:
                return member
        return None

    def _sweep(self) -> None:
        """Forget who would come back at the floor anyway."""
        kept = {k: m for k, m in self._members.items() if not m.is_idle or m.counter > self._floor}
        self._members = kept
        self._sweep_at = 2 * len(kept) + SWEEP_SLACK


@dataclass(slots=True, eq=False)
class Tenant(Generic[J]):
    """What a tenant got, and its lanes."""

    name: str
    counter: float = 0.0
    num_waiting: int = 0
    num_running: int = 0
    lanes: Turns[str | None, Lane[J]] = field(init=False)

    def __post_init__(self) -> None:
        self.lanes = Turns(lambda digest: Lane(self, digest, is_open=digest is None))

    @property
    def is_ready(self) -> bool:
        return self.lanes.least() is not None

    @property
    def is_idle(self) -> bool:
        return not self.num_waiting and not self.num_running


@dataclass(slots=True, eq=False)
class Lane(Generic[J]):
    """The jobs of one tenant for one variant. Only those of an open lane may begin."""

    tenant: Tenant[J]
    digest: str | None
    is_open: bool
    counter: float = 0.0
    num_waiting: int = 0
    num_running: int = 0
    heap: list[tuple[int, Entry[J]]] = field(default_factory=list)  # those that waited, the most senior first

    @property
    def is_ready(self) -> bool:
        return self.is_open and self.num_waiting > 0

    @property
    def is_idle(self) -> bool:
        return not self.num_waiting and not self.num_running

    def head(self) -> Entry[J]:
        """The most senior job that waits; somebody does."""
        while not self.heap[0][1].is_waiting:
            heapq.heappop(self.heap)
        return self.heap[0][1]


@dataclass(slots=True, eq=False)
class Entry(Generic[J]):
    """A job as the scheduler keeps it, from `add` to `remove`."""

    job: J
    order: int  # seniority: its place among all jobs ever added
    lane: Lane[J]
    num_prompt: int
    is_waiting: bool = False
    waits_since: float = 0.0
    num_charged: int = 0  # of its tokens, those that were paid for: what is computed again is not paid again
    num_at_start: int = 0  # its tokens when it was admitted last

    @property
    def has_progressed(self) -> bool:
        """Whether it has made a token since it was admitted, so that preempting it does not undo all its seat gave."""
        return self.job.num_tokens > self.num_at_start


class FairQueue(Generic[J]):
    """All waiting jobs. `first` is whose turn it is."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self._tenants: Turns[str, Tenant[J]] = Turns(Tenant)

    def lane(self, tenant: str, digest: str | None) -> Lane[J]:
        return self._tenants.member(tenant).lanes.member(digest)

    def push(self, entry: Entry[J]) -> None:
        """Let a job wait in its lane, before those that were added later."""
        lane = entry.lane
        heapq.heappush(lane.heap, (entry.order, entry))
        entry.is_waiting = True
        self._count(lane, 1)
        if lane.is_open and lane.num_waiting == 1:
            self._enter(lane)

    def take(self, entry: Entry[J]) -> None:
        """A job waits no longer: it runs, or has ended."""
        lane = entry.lane
        entry.is_waiting = False
        self._count(lane, -1)
        if len(lane.heap) > 2 * lane.num_waiting + 16:  # mostly of jobs that ended while they waited
            lane.heap = [item for item in lane.heap if item[1].is_waiting]
            heapq.heapify(lane.heap)

    def open(self, lane: Lane[J]) -> None:
        """Let the jobs of a closed lane begin."""
        lane.is_open = True
        if lane.num_waiting:
            self._enter(lane)

    def first(self) -> Entry[J] | None:
        """The job whose turn it is; it goes on waiting until `take`."""
        tenant = self._tenants.least()
        lane = None if tenant is None else tenant.lanes.least()
        return None if lane is None else lane.head()

    def _enter(self, lane: Lane[J]) -> None:
        lane.tenant.lanes.enter(lane)
        self._tenants.enter(lane.tenant)

    def _count(self, lane: Lane[J], change: int) -> None:
        lane.num_waiting += change
        lane.tenant.num_waiting += change
        self.num_waiting += change


def charge(lane: Lane[J], cost: float) -> None:
    """Count what a lane and its tenant got, in tokens."""
    lane.counter += cost
    lane.tenant.counter += cost
