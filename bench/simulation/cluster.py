"""The simulated replicas: slots, a host cache, loads one after another, and a batch.

Times are seconds of simulated time. A replica runs at most `capacity` requests; a request takes its own time multiplied
by one plus the share of the batch that is occupied when it starts. It starts when its variant is in a slot. The slot
that was used least recently, and that no request uses, is evicted; if all are in use, the request waits.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from server.scale.routing import ReplicaReport

Found = Literal["slot", "loading", "host", "disk"]


@dataclass(frozen=True, slots=True)
class ReplicaScope:
    """Sizes of one replica and times of its loads."""

    capacity: int = 64
    num_slots: int = 32
    num_host: int = 200
    load_from_host_s: float = 0.02
    load_from_disk_s: float = 0.3


@dataclass(slots=True)
class SimulatedRequest:
    """One request and what became of it."""

    variant: str
    alone_s: float  # its time in an empty batch
    arrived_s: float
    found: Found = "disk"  # where its variant was at its arrival
    started_s: float = -1.0


class Clock:
    """Events in the order of their times."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._numbers), event))

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()


@dataclass(slots=True)
class Replica:
    """One replica; `on_end` is called at the end of each request."""

    name: str
    scope: ReplicaScope
    clock: Clock
    on_end: Callable[[Replica, SimulatedRequest], None]
    # The least recently used first.
    slots: OrderedDict[str, None] = field(default_factory=OrderedDict)
    host: OrderedDict[str, None] = field(default_factory=OrderedDict)
    loading: str | None = None
    waiting: deque[SimulatedRequest] = field(default_factory=deque)
    num_running: int = 0
    running: Counter[str] = field(default_factory=Counter)

    @property
    def num_open(self) -> int:
        return self.num_running + len(self.waiting)

    def report(self) -> ReplicaReport:
        resident = frozenset(self.slots) | ({self.loading} if self.loading else set())
        num_loads = len({one.variant for one in self.waiting} - resident)
        return ReplicaReport(
            self.name,
            self.scope.capacity,
            self.scope.num_slots,
            self.num_open,
            num_loads,
            resident,
            frozenset(self.host),
        )

    def submit(self, request: SimulatedRequest) -> None:
        request.found = self._where(request.variant)
        self.waiting.append(request)
        self._advance()

    def _where(self, variant: str) -> Found:
        if variant in self.slots:
            return "slot"
        if variant == self.loading:
            return "loading"
        return "host" if variant in self.host else "disk"

    def _advance(self) -> None:
        """Start what can run, and begin the load that the first of the others waits for."""
        held: deque[SimulatedRequest] = deque()
        while self.waiting and self.num_running < self.scope.capacity:
            request = self.waiting.popleft()
            if request.variant in self.slots:
                self._start(request)
            else:
                held.append(request)
        self.waiting.extendleft(reversed(held))
        if self.loading is None and held:
            self._load(held[0].variant)

    def _start(self, request: SimulatedRequest) -> None:
        self.slots.move_to_end(request.variant)
        self.num_running += 1
        self.running[request.variant] += 1
        request.started_s = self.clock.now_s
        slowdown = 1 + self.num_running / self.scope.capacity
        self.clock.after(request.alone_s * slowdown, lambda: self._end(request))

    def _end(self, request: SimulatedRequest) -> None:
        self.num_running -= 1
        self.running[request.variant] -= 1
        self.on_end(self, request)
        self._advance()

    def _load(self, variant: str) -> None:
        if len(self.slots) == self.scope.num_slots:
            victim = next((held for held in self.slots if not self.running[held]), None)
            if victim is None:
                return
            del self.slots[victim]
        is_cached = variant in self.host
        self.loading = variant
        seconds = self.scope.load_from_host_s if is_cached else self.scope.load_from_disk_s
        self.clock.after(seconds, self._loaded)

    def _loaded(self) -> None:
        assert self.loading is not None
        self.slots[self.loading] = None
        self.host[self.loading] = None
        self.host.move_to_end(self.loading)
        if len(self.host) > self.scope.num_host:
            self.host.popitem(last=False)
        self.loading = None
        self._advance()
