"""An engine without a model: simulated time, slots with load times, pages, steps that cost what they hold.

`simulate` runs jobs through a scheduler and checks after every plan what must hold of each.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from server.engine.scheduling.scheduler import Plan, Scheduler, SchedulerLimits

Times = list[float]
IDLE_S = 0.005  # until an engine without work looks again
STUCK_S = 2000.0


@dataclass(slots=True, eq=False)
class SimJob:
    """A job, how long it will be, and what happened to it."""

    id: str
    tenant: str
    digest: str | None
    num_prompt: int
    num_output: int
    arrived_at: float
    cancel_at: float = float("inf")
    num_tokens: int = 0
    num_computed_tokens: int = 0
    num_pages: int = 0
    num_preempted: int = 0
    num_ends: int = 0
    token_times: Times = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt

    @property
    def first_token_s(self) -> float:
        return self.token_times[0] - self.arrived_at

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt


class SimPages:
    """Counts pages. No prefix is ever known."""

    def __init__(self, num_pages: int, page_tokens: int = 16) -> None:
        self.num_pages = self.num_available = num_pages
        self.page_tokens = page_tokens

    def attach(self, job: SimJob) -> None:
        assert job.num_pages == 0, "a job that begins holds pages already"
        job.num_computed_tokens = 0

    def grow(self, job: SimJob, num_tokens: int) -> bool:
        more = -(-(job.num_computed_tokens + num_tokens) // self.page_tokens) - job.num_pages
        if more > self.num_available:
            return False
        job.num_pages += max(0, more)
        self.num_available -= max(0, more)
        return True

    def release(self, job: SimJob) -> None:
        self.num_available += job.num_pages
        job.num_pages = job.num_computed_tokens = 0


class SimSlots:
    """Slots under least-recently-used eviction; a load takes `load_s`, at most `num_loads` at a time."""

    def __init__(self, num_slots: int, load_s: float, num_loads: int = 4) -> None:
        self.num_slots = num_slots
        self.load_s = load_s
        self.now = 0.0
        self.num_loaded = 0
        self.pinned: set[str] = set()
        self.holds: Counter[str] = Counter()
        self._resident: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self._ready_at: dict[str, float] = {}
        self._loader_free_at = [0.0] * num_loads

    def is_resident(self, digest: str) -> bool:
        return digest in self._resident

    def is_loading(self, digest: str) -> bool:
        return digest in self._ready_at

    def is_pinned(self, digest: str) -> bool:
        return digest in self.pinned

    def hold(self, digest: str) -> None:
        self._resident.move_to_end(digest)
        self.holds[digest] += 1

    def let_go(self, digest: str) -> None:
        assert self.holds[digest] > 0
        self.holds[digest] -= 1
        self._resident.move_to_end(digest)

    def load(self, digest: str) -> bool:
        if digest in self._resident or digest in self._ready_at:
            return True
        if len(self._resident) + len(self._ready_at) >= self.num_slots:
            idle = [d for d in self._resident if not self.holds[d] and d not in self.pinned]
            if not idle:
                return False
            del self._resident[idle[0]]
        begins = max(self.now, heapq.heappop(self._loader_free_at))
        self._ready_at[digest] = begins + self.load_s
        heapq.heappush(self._loader_free_at, begins + self.load_s)
        self.num_loaded += 1
        return True

    def fail(self, digest: str) -> None:
        """End a load without a delta."""
        del self._ready_at[digest]

    def adopt(self, now: float) -> None:
        """Make visible what has been loaded by now."""
        self.now = now
        for digest in [d for d, ready_at in self._ready_at.items() if ready_at <= now]:
            del self._ready_at[digest]
            self._resident[digest] = None


class AnyScheduler(Protocol):
    """The real one, or one to compare it with."""

    def add(self, job: SimJob, now: float) -> None: ...
    def remove(self, job: SimJob) -> None: ...
    def plan(self, now: float) -> Plan[SimJob]: ...
    def charge(self, plan: Plan[SimJob], now: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds: of a step, of each of its tokens, and of each delta in it."""

    step_s: float = 0.010
    token_s: float = 0.0001
    delta_s: float = 0.0006

    def of(self, plan: Plan[SimJob]) -> float:
        num_tokens = sum(n for _, n in plan.batch)
        num_deltas = len({job.digest for job, _ in plan.batch} - {None})
        return self.step_s + self.token_s * num_tokens + self.delta_s * num_deltas


@dataclass(slots=True)
class World:
    """What one simulation has: limits, pages, slots, costs."""

    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    pages: SimPages = field(default_factory=lambda: SimPages(100_000))
    slots: SimSlots = field(default_factory=lambda: SimSlots(8, load_s=0.02))
    costs: Costs = field(default_factory=Costs)
    on_step: Callable[[Plan[SimJob], float], None] = lambda plan, now: None
    num_steps: int = 0
    num_tokens: int = 0  # computed, those that were computed again too
    end_s: float = 0.0

    def scheduler(self) -> Scheduler[SimJob]:
        return Scheduler(self.limits, self.pages, self.slots)


def simulate(
    world: World, jobs: Iterable[SimJob], scheduler: AnyScheduler | None = None, until_s: float = 1e9
) -> None:
    """Run until every job has ended, or until `until_s`."""
    scheduler = scheduler or world.scheduler()
    arrivals = sorted(jobs, key=lambda job: job.arrived_at)[::-1]  # the first one last
    live: dict[str, SimJob] = {}
    now = 0.0
    while (arrivals or live) and now < until_s:
        world.slots.adopt(now)
        while arrivals and arrivals[-1].arrived_at <= now:
            job = arrivals.pop()
            live[job.id] = job
            scheduler.add(job, now)
        for job in [job for job in live.values() if job.cancel_at <= now]:
            end(job, live)
            scheduler.remove(job)
        plan = scheduler.plan(now)
        check(world, plan, live)
        if plan.batch:
            now += world.costs.of(plan)
            finish(world, plan, live, scheduler, now)
            scheduler.charge(plan, now)
            world.on_step(plan, now)
        else:
            now = max(now + IDLE_S, 0.0 if live or not arrivals else arrivals[-1].arrived_at)
        assert now < STUCK_S, f"{len(live)} jobs never end"
    world.end_s = now


def end(job: SimJob, live: dict[str, SimJob]) -> None:
    job.num_ends += 1
    del live[job.id]


def check(world: World, plan: Plan[SimJob], live: dict[str, SimJob]) -> None:
    """What holds of every plan."""
    batch = [job for job, _ in plan.batch]
    assert len({job.id for job in batch}) == len(batch) <= world.limits.max_num_seqs
    assert sum(n for _, n in plan.batch) <= world.limits.max_batch_tokens
    for job in plan.preempted:
        job.num_preempted += 1
        assert job.num_pages == 0
        assert job not in batch
    for job in plan.unfit:
        end(job, live)
    for job, num_tokens in plan.batch:
        assert job.id in live
        assert 0 < num_tokens <= job.num_tokens - job.num_computed_tokens
        assert job.num_pages * world.pages.page_tokens >= job.num_computed_tokens + num_tokens
        assert job.digest is None or (world.slots.is_resident(job.digest) and world.slots.holds[job.digest])


def finish(
    world: World, plan: Plan[SimJob], live: dict[str, SimJob], scheduler: AnyScheduler, now: float
) -> None:
    """What a step does to its jobs."""
    world.num_steps += 1
    for job, num_tokens in plan.batch:
        world.num_tokens += num_tokens
        job.num_computed_tokens += num_tokens
        if job.num_computed_tokens < job.num_tokens:
            continue
        job.num_tokens += 1
        job.token_times.append(now)
        if job.num_generated == job.num_output:
            end(job, live)
            scheduler.remove(job)


class FifoScheduler:
    """What simple servers do: first come, first served. A delta is loaded when its job is the next to begin, into the
    slot that was used least recently; only running jobs keep a slot. The others wait behind it, unless `skips`.
    """

    def __init__(self, world: World, *, skips: bool) -> None:
        self._limits, self._pages, self._slots = world.limits, world.pages, world.slots
        self._skips = skips
        self._waiting: OrderedDict[str, SimJob] = OrderedDict()
        self._running: OrderedDict[str, SimJob] = OrderedDict()

    def add(self, job: SimJob, now: float) -> None:
        self._waiting[job.id] = job

    def remove(self, job: SimJob) -> None:
        self._waiting.pop(job.id, None)
        if self._running.pop(job.id, None) is not None:
            self._pages.release(job)
            if job.digest is not None:
                self._slots.let_go(job.digest)

    def plan(self, now: float) -> Plan[SimJob]:
        for job in list(self._waiting.values()):
            if not self._begin(job) and not self._skips:
                break
        batch = [(job, 1) for job in self._running.values() if job.num_tokens - job.num_computed_tokens == 1]
        budget = self._limits.max_batch_tokens - len(batch)
        for job in self._running.values():
            num_tokens = min(budget, job.num_tokens - job.num_computed_tokens)
            if job.num_tokens - job.num_computed_tokens > 1 and num_tokens:
                batch.append((job, num_tokens))
                budget -= num_tokens
        return Plan(batch, [], [], (), [])

    def charge(self, plan: Plan[SimJob], now: float) -> None:
        pass

    def _begin(self, job: SimJob) -> bool:
        if len(self._running) >= self._limits.max_num_seqs:
            return False
        if job.digest is not None and not self._slots.is_resident(job.digest):
            self._slots.load(job.digest)
            return False
        if not self._pages.grow(job, job.num_prompt + job.num_output):
            return False
        if job.digest is not None:
            self._slots.hold(job.digest)
        self._running[job.id] = self._waiting.pop(job.id)
        return True


def poisson(rng: random.Random, per_s: float, seconds: float) -> Times:
    """Arrival times."""
    times: Times = []
    now = rng.expovariate(per_s)
    while now < seconds:
        times.append(now)
        now += rng.expovariate(per_s)
    return times


def zipf(rng: random.Random, num_variants: int, num: int, exponent: float = 1.0) -> list[str]:
    """Digests, the first ones often."""
    weights = [1 / (rank + 1) ** exponent for rank in range(num_variants)]
    return [f"v{index}" for index in rng.choices(range(num_variants), weights, k=num)]
