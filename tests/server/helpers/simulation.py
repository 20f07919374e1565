"""An engine without a model: simulated time, slots with load times, steps that cost what they hold.

Sequences, scheduler and KV cache are the real ones; `SimResidency` and the step are simulated. `simulate` runs
sequences through a scheduler and checks each plan.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import Protocol

from deltastore.registry.records import VersionRecord
from server.deltas.residency import MAX_LOADS, Residency
from server.engine.kv_cache_manager import KVCacheManager
from server.engine.scheduler import Scheduler, StepPlan
from server.engine.sequence import Sequence
from server.engine.slot_policy import SchedulerConstants
from server.protocol.request import Request, token_ids_of

Times = list[float]
IDLE_S = 0.005  # until an engine without work looks again
STUCK_S = 2000.0
TOKEN = 7  # what every prompt consists of, and every step generates


class SimSequence(Sequence):
    """A sequence, how long it will be, and what happened to it."""

    def __init__(
        self,
        id: str,
        tenant: str,
        digest: str | None,
        num_prompt_tokens: int,
        num_output_tokens: int,
        arrived_at: float,
        cancel_at: float = math.inf,
        mask_s: float = 0.0,
    ) -> None:
        record = None if digest is None else version(digest)
        super().__init__(
            Request(id, tenant, digest, record, token_ids_of([TOKEN]) * num_prompt_tokens, TOKEN + 1), 0
        )
        self.version = digest
        self.id = id
        self.arrived_at = arrived_at
        self.num_output_tokens = num_output_tokens
        self.cancel_at = cancel_at
        # How long after each token the next mask comes; 0 for a sequence that is not constrained.
        self.mask_s = mask_s
        self.mask_at = 0.0
        self.num_preempted = 0
        self.num_ends = 0
        self.token_times: Times = []

    @property
    def first_token_s(self) -> float:
        return self.token_times[0] - self.arrived_at


def version(digest: str) -> VersionRecord:
    """Make a record of a version without a file."""
    return VersionRecord("public", digest, 1, digest, 0, 0, 0, "", (), "", "per-axis", True, "0" * 32)


class SimResidency(Residency):
    """Slots under least-recently-used eviction; a load takes `load_s`, at most `num_loads` at a time."""

    def __init__(self, num_slots: int, load_s: float, num_loads: int = 4) -> None:
        self.num_sim_slots = num_slots
        self.load_s = load_s
        self.now = 0.0
        self.num_loaded = 0
        self.pinned: set[str] = set()
        self.holds: Counter[str] = Counter()
        self.used: set[tuple[str, str]] = set()  # versions and tenants that have used them
        self._lru: OrderedDict[str, None] = OrderedDict()  # resident, least recently used first
        self._ready_at: dict[str, float] = {}
        self._tenant_of: dict[str, str] = {}  # whom each load began for
        self._loader_free_at = [0.0] * num_loads

    def is_resident(self, digest: str) -> bool:
        return digest in self._lru

    def is_loading(self, digest: str) -> bool:
        return digest in self._ready_at

    def is_pinned(self, digest: str) -> bool:
        return digest in self.pinned

    def acquire(self, digest: str) -> None:
        self._lru.move_to_end(digest)
        self.holds[digest] += 1

    def release(self, digest: str) -> None:
        assert self.holds[digest] > 0
        self.holds[digest] -= 1
        self._lru.move_to_end(digest)

    def note_use(self, digest: str, tenant: str) -> None:
        assert self.holds[digest] > 0
        self.used.add((digest, tenant))

    def may_load(self, tenant: str) -> bool:
        return sum(loading == tenant for loading in self._tenant_of.values()) < MAX_LOADS

    def load(self, digest: str, tenant: str, kept: Set[str] = frozenset()) -> bool:
        if digest in self._lru or digest in self._ready_at:
            return True
        if len(self._lru) + len(self._ready_at) >= self.num_sim_slots:
            idle = [d for d in self._lru if not self.holds[d] and d not in self.pinned and d not in kept]
            if not idle:
                return False
            del self._lru[idle[0]]
        begins = max(self.now, heapq.heappop(self._loader_free_at))
        self._ready_at[digest] = begins + self.load_s
        self._tenant_of[digest] = tenant
        heapq.heappush(self._loader_free_at, begins + self.load_s)
        self.num_loaded += 1
        return True

    def fail_load(self, digest: str) -> None:
        """End a load without a delta."""
        del self._ready_at[digest], self._tenant_of[digest]

    def end_loads(self, now: float) -> list[str]:
        """Make resident what has been loaded by now, and return it."""
        self.now = now
        ended = [digest for digest, ready_at in self._ready_at.items() if ready_at <= now]
        for digest in ended:
            del self._ready_at[digest], self._tenant_of[digest]
            self._lru[digest] = None
        return ended


class AnyScheduler(Protocol):
    """The scheduler, or one to compare it with."""

    def add(self, sequence: SimSequence, now: float) -> None: ...
    def remove(self, sequence: SimSequence) -> None: ...
    def load_ended(self, digest: str, now: float) -> None: ...
    def plan(self, now: float) -> StepPlan: ...
    def charge(self, plan: StepPlan, now: float, seconds: float) -> object: ...


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds: of a step, of each of its tokens, and of each delta in it."""

    step_s: float = 0.010
    token_s: float = 0.0001
    delta_s: float = 0.0006

    def of(self, plan: StepPlan) -> float:
        num_deltas = len({sequence.digest for sequence in plan.batch} - {None})
        return self.step_s + self.token_s * sum(plan.batch.values()) + self.delta_s * num_deltas


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The settings that a scheduler is given, and its constants."""

    max_num_seqs: int = 64
    max_batch_tokens: int = 512
    constants: SchedulerConstants = field(default_factory=SchedulerConstants)


def step_limits(max_num_seqs: int = 64, max_batch_tokens: int = 512, **constants: float) -> StepLimits:
    """Make limits with some constants changed."""
    return StepLimits(max_num_seqs, max_batch_tokens, SchedulerConstants(**constants))  # type: ignore[arg-type]


def pages(num_pages: int, page_tokens: int = 16) -> KVCacheManager:
    """Make a KV cache of so many pages beside the padding page. No full page is cached, so no prefix is found."""
    return KVCacheManager(num_pages + 1, page_tokens)


@dataclass(slots=True)
class Simulation:
    """The limits, pages, slots and costs of a simulation, and what it computed."""

    limits: StepLimits = field(default_factory=StepLimits)
    kv_cache: KVCacheManager = field(default_factory=lambda: pages(100_000))
    residency: SimResidency = field(default_factory=lambda: SimResidency(8, load_s=0.02))
    costs: Costs = field(default_factory=Costs)
    on_step: Callable[[StepPlan, float], None] = lambda plan, now: None
    num_steps: int = 0
    num_tokens: int = 0  # computed, the recomputed ones included
    end_s: float = 0.0

    def scheduler(self) -> Scheduler:
        return Scheduler(
            self.kv_cache,
            self.residency,
            self.limits.max_num_seqs,
            self.limits.max_batch_tokens,
            self.limits.constants,
        )

    def end_loads(self, scheduler: AnyScheduler, now: float) -> None:
        """Make resident what has been loaded by now, as the engine does between steps."""
        for digest in self.residency.end_loads(now):
            scheduler.load_ended(digest, now)

    def fail_load(self, scheduler: AnyScheduler, digest: str, now: float) -> None:
        """End a load without a delta, as the engine does between steps."""
        self.residency.fail_load(digest)
        scheduler.load_ended(digest, now)


def simulate(
    sim: Simulation,
    sequences: Iterable[SimSequence],
    scheduler: AnyScheduler | None = None,
    until_s: float = 1e9,
) -> None:
    """Run until every sequence has ended, or until `until_s`."""
    scheduler = scheduler or sim.scheduler()
    arrivals = sorted(sequences, key=lambda sequence: sequence.arrived_at)[::-1]  # the first one last
    live: dict[str, SimSequence] = {}
    now = 0.0
    while (arrivals or live) and now < until_s:
        sim.end_loads(scheduler, now)
        while arrivals and arrivals[-1].arrived_at <= now:
            sequence = arrivals.pop()
            live[sequence.id] = sequence
            scheduler.add(sequence, now)
        for sequence in [sequence for sequence in live.values() if sequence.cancel_at <= now]:
            end(sequence, live)
            scheduler.remove(sequence)
        for sequence in [sequence for sequence in live.values() if sequence.awaits_mask]:
            generate(sequence, live, scheduler, now)
        plan = scheduler.plan(now)
        check(sim, plan, live)
        if plan.batch:
            seconds = sim.costs.of(plan)
            now += seconds
            finish(sim, plan, live, scheduler, now)
            scheduler.charge(plan, now, seconds)
            sim.on_step(plan, now)
        else:
            now = max(now + IDLE_S, 0.0 if live or not arrivals else arrivals[-1].arrived_at)
        assert now < STUCK_S, f"{len(live)} sequences never end"
    sim.end_s = now


def end(sequence: SimSequence, live: dict[str, SimSequence]) -> None:
    sequence.num_ends += 1
    del live[sequence.id]


def check(sim: Simulation, plan: StepPlan, live: dict[str, SimSequence]) -> None:
    """Check what must hold of every plan."""
    assert len({sequence.id for sequence in plan.batch}) == len(plan.batch) <= sim.limits.max_num_seqs
    assert sum(plan.batch.values()) == plan.num_tokens <= sim.limits.max_batch_tokens
    for sequence in plan.preempted:
        live[sequence.id].num_preempted += 1
        assert not sequence.page_table.pages
        assert sequence not in plan.batch
    for sequence in plan.too_long:
        end(live[sequence.id], live)
    for sequence, num_tokens in plan.batch.items():
        assert sequence.id in live
        assert 0 < num_tokens <= sequence.num_tokens - sequence.num_computed_tokens
        num_held = len(sequence.page_table.pages) * sim.kv_cache.page_tokens
        assert num_held >= sequence.num_computed_tokens + num_tokens
        digest = sequence.digest
        assert digest is None or (sim.residency.is_resident(digest) and sim.residency.holds[digest])


def finish(
    sim: Simulation, plan: StepPlan, live: dict[str, SimSequence], scheduler: AnyScheduler, now: float
) -> None:
    """Do what a step does to its sequences."""
    sim.num_steps += 1
    sim.kv_cache.take_pages_to_zero()
    for sequence in [live[sequence.id] for sequence in plan.batch]:
        sim.num_tokens += plan.batch[sequence]
        sequence.num_computed_tokens += plan.batch[sequence]
        if sequence.num_computed_tokens == sequence.num_tokens:
            generate(sequence, live, scheduler, now)


def generate(
    sequence: SimSequence, live: dict[str, SimSequence], scheduler: AnyScheduler, now: float
) -> None:
    """Append a token to a computed sequence if its mask has come."""
    if sequence.mask_at > now:
        return
    sequence.generated_ids.append(TOKEN)
    sequence.token_times.append(now)
    sequence.mask_at = now + sequence.mask_s
    if sequence.num_generated == sequence.num_output_tokens:
        end(sequence, live)
        scheduler.remove(sequence)


class FifoScheduler:
    """A simple server: first come, first served.

    A delta is loaded when its sequence is the next to begin, into the slot that was used least recently; only running
    sequences keep a slot. The others wait behind it, unless `skips`.
    """

    def __init__(self, sim: Simulation, *, skips: bool) -> None:
        self._limits, self._kv_cache, self._residency = sim.limits, sim.kv_cache, sim.residency
        self._skips = skips
        self._waiting: OrderedDict[str, SimSequence] = OrderedDict()
        self._running: OrderedDict[str, SimSequence] = OrderedDict()

    def add(self, sequence: SimSequence, now: float) -> None:
        self._waiting[sequence.id] = sequence

    def remove(self, sequence: SimSequence) -> None:
        self._waiting.pop(sequence.id, None)
        if self._running.pop(sequence.id, None) is not None:
            self._kv_cache.release(sequence)
            if sequence.digest is not None:
                self._residency.release(sequence.digest)

    def load_ended(self, digest: str, now: float) -> None:
        pass

    def plan(self, now: float) -> StepPlan:
        for sequence in list(self._waiting.values()):
            if not self._begin(sequence) and not self._skips:
                break
        plan, running = StepPlan(), list(self._running.values())
        for sequence in running:
            if sequence.num_missing_tokens == 1:
                plan.add(sequence, 1)
        for sequence in running:
            num_tokens = min(self._limits.max_batch_tokens - plan.num_tokens, sequence.num_missing_tokens)
            if sequence.num_missing_tokens > 1 and num_tokens:
                plan.add(sequence, num_tokens)
        return plan

    def charge(self, plan: StepPlan, now: float, seconds: float) -> None:
        pass

    def _begin(self, sequence: SimSequence) -> bool:
        if len(self._running) >= self._limits.max_num_seqs:
            return False
        if sequence.digest is not None and not self._residency.is_resident(sequence.digest):
            self._residency.load(sequence.digest, sequence.tenant)
            return False
        num_tokens = sequence.num_prompt_tokens + sequence.num_output_tokens
        if not self._kv_cache.allocate(sequence, num_tokens):
            return False
        if sequence.digest is not None:
            self._residency.acquire(sequence.digest)
        self._running[sequence.id] = self._waiting.pop(sequence.id)
        return True


def poisson(rng: random.Random, per_s: float, seconds: float) -> Times:
    """Draw arrival times."""
    times: Times = []
    now = rng.expovariate(per_s)
    while now < seconds:
        times.append(now)
        now += rng.expovariate(per_s)
    return times


def zipf(rng: random.Random, num_variants: int, num: int, exponent: float = 1.0) -> list[str]:
    """Draw digests, the first ones often."""
    weights = [1 / (rank + 1) ** exponent for rank in range(num_variants)]
    return [f"v{index}" for index in rng.choices(range(num_variants), weights, k=num)]
