"""Simulate 64 replicas and 10,000 variants under Zipf, with the server's routing code beside random and hashing ones.

Requests come as a Poisson process, and their times alone are exponential. Reports of the replicas reach the routers at
intervals; consistent hashing with bounded loads knows every replica's open requests at every moment. Times of requests
and loads are parameters: nothing here is a measurement of a GPU.

Times are seconds of simulated time. A replica runs at most `capacity` requests; a request takes its own time multiplied
by one plus the share of the batch that is occupied when it starts. It starts when its variant is in a slot. The slot
that was used least recently, and that no request uses, is evicted; if all are in use, the request waits.
"""

from __future__ import annotations

import heapq
import random
import sys
from abc import ABC, abstractmethod
from argparse import Namespace
from bisect import bisect
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, count, cycle
from statistics import mean, median, quantiles
from typing import Any, Literal

from bench.harness import Bench, Columns, Report, fixed, percent, say, table_of, text
from server.scale.routing import Costs, ReplicaReport, VariantRouter

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


class Policy(ABC):
    """Chooses replicas. `observe` is called at every report, and `ended` at the end of each request."""

    @abstractmethod
    def choose(self, variant: str) -> Replica:
        """Return the replica of the next request of a variant."""

    def observe(self, replicas: Sequence[Replica]) -> None:  # noqa: B027
        """Take in a report; most policies read none."""

    def ended(self, replica: Replica) -> None:  # noqa: B027
        """Take in the end of a request; most policies count none."""


class Random(Policy):
    """Every replica is as likely as any other."""

    def __init__(self, replicas: Sequence[Replica], generator: random.Random) -> None:
        self._replicas = replicas
        self._generator = generator

    def choose(self, variant: str) -> Replica:
        return self._generator.choice(self._replicas)


class BoundedHashing(Policy):
    """Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016), by rendezvous hashing.

    A variant has an order of replicas. Its requests go to the first whose open requests are at most `bound` times the
    mean of all; an infinite bound is plain consistent hashing. Open requests are known exactly.
    """

    def __init__(self, replicas: Sequence[Replica], bound: float) -> None:
        self._replicas = replicas
        self._bound = bound
        self._orders: dict[str, list[Replica]] = {}

    def choose(self, variant: str) -> Replica:
        if variant not in self._orders:
            # A generator seeded by the variant is a hash of variant and replica.
            self._orders[variant] = random.Random(variant).sample(self._replicas, len(self._replicas))
        most = self._bound * (sum(one.num_open for one in self._replicas) + 1) / len(self._replicas)
        order = self._orders[variant]
        return next((one for one in order if one.num_open < most), order[0])


class Routers(Policy):
    """Several of the server's routers; each sees a part of the requests, and the reports of all replicas."""

    def __init__(self, replicas: Sequence[Replica], costs: Costs, num_routers: int) -> None:
        self._by_name = {one.name: one for one in replicas}
        self._routers = [VariantRouter(costs) for _ in range(num_routers)]
        self._turns = cycle(self._routers)
        # The router of each open request of a replica, the oldest first: requests of a replica are alike to it.
        self._open: dict[str, list[VariantRouter]] = {one.name: [] for one in replicas}
        self.observe(replicas)

    def observe(self, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            report = replica.report()
            for router in self._routers:
                router.observe(report)

    def choose(self, variant: str) -> Replica:
        router = next(self._turns)
        name = router.ranked(variant)[0]
        router.sent(name, variant)
        self._open[name].append(router)
        return self._by_name[name]

    def ended(self, replica: Replica) -> None:
        self._open[replica.name].pop(0).ended(replica.name)


@dataclass(frozen=True, slots=True)
class SimulationScope:
    """Sizes of a run."""

    num_replicas: int = 64
    num_variants: int = 10_000
    exponent: float = 1.0  # of Zipf's law
    # Of the requests that full batches could answer.
    load: float = 0.7
    mean_alone_s: float = 2.0
    warm_up_s: float = 60.0
    counted_s: float = 120.0
    num_routers: int = 8
    replica: ReplicaScope = field(default_factory=ReplicaScope)

    @property
    def requests_per_s(self) -> float:
        # In a full batch a request takes twice its time alone.
        return self.load * self.num_replicas * self.replica.capacity / (2 * self.mean_alone_s)


SMALL_SCOPE = SimulationScope(num_replicas=4, num_variants=200, warm_up_s=5, counted_s=10, num_routers=2)
PLACES: tuple[Found, ...] = ("slot", "loading", "host", "disk")
REPORT_INTERVAL_S = {"peraxis, reports every 0.25 s": 0.25, "peraxis, reports every 1 s": 1.0}
POLICIES: dict[str, Callable[[Sequence[Replica], SimulationScope], Policy]] = {
    "peraxis, reports every 0.25 s": lambda replicas, scope: _routers(replicas, scope),
    "peraxis, reports every 1 s": lambda replicas, scope: _routers(replicas, scope),
    "random": lambda replicas, scope: Random(replicas, random.Random(1)),
    "consistent hashing": lambda replicas, scope: BoundedHashing(replicas, float("inf")),
    "bounded hashing, 1.25": lambda replicas, scope: BoundedHashing(replicas, 1.25),
}
COLUMNS: Columns = {
    "": text("policy"),
    **{place: percent(f"found_{place}") for place in PLACES},
    "delay, median s": fixed("delay_median_s", 3),
    "p99, s": fixed("delay_p99_s", 3),
    "never started": text("not_started"),
    "most open / mean": fixed("most_open_to_mean", 2),
}


def simulate(name: str, scope: SimulationScope) -> dict[str, Any]:
    """Run one policy and return its figures, of the requests that came after the warm-up and have started."""
    clock, requests = Clock(), list[SimulatedRequest]()
    replicas = [
        Replica(f"replica-{number}", scope.replica, clock, lambda one, _: policy.ended(one))
        for number in range(scope.num_replicas)
    ]
    policy = POLICIES[name](replicas, scope)
    generator = random.Random(0)
    weights = list(accumulate(1 / rank**scope.exponent for rank in range(1, scope.num_variants + 1)))

    def arrive() -> None:
        variant = f"{bisect(weights, generator.random() * weights[-1]):08x}"
        request = SimulatedRequest(variant, generator.expovariate(1 / scope.mean_alone_s), clock.now_s)
        if clock.now_s >= scope.warm_up_s:
            requests.append(request)
        policy.choose(variant).submit(request)
        clock.after(generator.expovariate(scope.requests_per_s), arrive)

    def report() -> None:
        policy.observe(replicas)
        clock.after(REPORT_INTERVAL_S[name], report)

    arrive()
    if name in REPORT_INTERVAL_S:
        report()
    clock.run(scope.warm_up_s + scope.counted_s)
    return _figures(requests, replicas)


def _routers(replicas: Sequence[Replica], scope: SimulationScope) -> Policy:
    sizes = scope.replica
    costs = Costs(
        service_s=scope.mean_alone_s,
        load_from_host_s=sizes.load_from_host_s,
        load_from_disk_s=sizes.load_from_disk_s,
    )
    return Routers(replicas, costs, scope.num_routers)


def _figures(requests: Sequence[SimulatedRequest], replicas: Sequence[Replica]) -> dict[str, Any]:
    started = [one for one in requests if one.started_s >= 0]
    delays = [one.started_s - one.arrived_s for one in started]
    shares = Counter(one.found for one in requests)
    num_open = [one.num_open for one in replicas]
    return {
        "num_requests": len(requests),
        "not_started": len(requests) - len(started),
        **{f"found_{place}": round(shares[place] / len(requests), 4) for place in PLACES},
        "delay_median_s": round(median(delays), 4),
        "delay_p99_s": round(quantiles(delays, n=100)[-1], 4),
        "most_open_to_mean": round(max(num_open) / mean(num_open), 2),
    }


def report(args: Namespace) -> Report:
    scope, results = SMALL_SCOPE if args.small else SimulationScope(), {}
    for name in POLICIES:
        results[name] = simulate(name, scope)
        say(f"{name} is done")
    rows = [{"policy": name, **figures} for name, figures in results.items()]
    conditions = f"{scope.requests_per_s:.0f} requests/s"
    return Report(asdict(scope), results, [table_of(COLUMNS, rows)], conditions=conditions)


main = Bench("simulation", __doc__, report, small="four replicas")

if __name__ == "__main__":
    sys.exit(main())
