"""What the next step computes: running jobs first, then prompts, fairly among tenants and variants.

Plain Python: no tensors, no clock (`now` is passed in, in seconds), no threads. `fairness.py` says whose turn it is,
`tenure.py` which variants have slots; here are seats, pages and the tokens of a step.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from server.engine.scheduling.fair_queue import Entry, FairQueue, J, Job, Lane, charge
from server.engine.scheduling.slot_policy import Slots, Tenure, TenurePolicy

PROMPT_COST = 1.0  # of one token, in the fairness counters
GENERATED_COST = 2.0

Held = TypeVar("Held", bound=Job, contravariant=True)


class Pages(Protocol[Held]):
    """The key-value cache; `server/engine/scheduling/kv_cache.py`."""

    page_tokens: int

    @property
    def num_available(self) -> int: ...  # pages that can be given away now
    def attach(self, job: Held, /) -> None: ...  # the pages of a known prefix, for a job that begins (again)
    def grow(
        self, job: Held, num_tokens: int, /
    ) -> bool: ...  # pages for so many tokens more; False: too few, no change
    def release(self, job: Held, /) -> None: ...  # takes them all back; num_computed becomes 0


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a step may hold, and who may make whom wait."""

    max_num_seqs: int = 64  # jobs that run at a time
    max_batch_tokens: int = 512  # of one step
    prefill_share: float = 0.25  # of a step's tokens, what one prompt may take while another waits for them
    reserve_tokens: int = 32  # per running job, room for which admission leaves in the cache
    delta_cost_tokens: float = 8.0  # what reading one delta costs in a step; its jobs share it
    tenure_s: float = 1.0  # for which a loaded variant keeps its slot
    cold_wait_s: float = 5.0  # after which a variant may displace another from its slot
    seat_wait_s: float = 1.0  # after which a job may take a seat from those who have many
    recompute_share: float = (
        0.25  # of what is computed, what those displaced for a slot may have to compute again
    )

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if self.max_batch_tokens <= self.max_num_seqs:
            raise ValueError(
                f"max_batch_tokens must be above max_num_seqs, so that prompts move while all seats decode; "
                f"got {self.max_batch_tokens} and {self.max_num_seqs}"
            )
        if not 0 < self.prefill_share <= 1:
            raise ValueError(f"prefill_share must be above 0 and at most 1, got {self.prefill_share}")
        if not 0 < self.recompute_share <= 1:
            raise ValueError(f"recompute_share must be above 0 and at most 1, got {self.recompute_share}")
        for name in ("reserve_tokens", "delta_cost_tokens", "tenure_s", "cold_wait_s", "seat_wait_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Plan(Generic[J]):
    """One step."""

    batch: list[tuple[J, int]]  # jobs, and how many of their tokens are computed
    preempted: list[J]  # they wait again, without pages; none of them is in the batch
    unfit: list[J]  # too large for the cache even alone; the scheduler has forgotten them
    wants: tuple[str, ...]  # digests that somebody waits for: those that load, then the longest waiting first
    costs: list[tuple[Lane[J], float]]  # what `charge` counts when the step is done


@dataclass(slots=True)
class _Draft(Generic[J]):
    """A plan in the making."""

    max_tokens: int
    batch: dict[Entry[J], int] = field(default_factory=dict)
    preempted: list[J] = field(default_factory=list)
    unfit: list[J] = field(default_factory=list)
    admits: bool = True

    @property
    def budget(self) -> int:
        """Tokens that are left."""
        return self.max_tokens - sum(self.batch.values())


class Scheduler(Generic[J]):
    """Takes jobs in, and plans a step at a time. One thread calls it."""

    def __init__(self, limits: SchedulerLimits, pages: Pages[J], slots: Slots) -> None:
        self._limits = limits
        self._pages = pages
        self._queue = FairQueue[J]()
        self._tenure = Tenure[J](
            slots, self._queue, TenurePolicy(limits.tenure_s, limits.cold_wait_s, limits.recompute_share)
        )
        self._entries: dict[str, Entry[J]] = {}
        self._running: dict[int, Entry[J]] = {}  # by order
        self._too_few = -1, -1  # the order of the job that found too few pages last, and how many there were
        self._num_added = 0
        self._now = 0.0  # what the caller said last

    @property
    def running(self) -> list[J]:
        """Jobs that have a seat, the most senior first."""
        return [entry.job for entry in self._seniors()]

    @property
    def waiting(self) -> list[J]:
        """Jobs that have none, the most senior first; O(jobs)."""
        return [entry.job for entry in self._entries.values() if entry.is_waiting]

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting

    @property
    def num_waiting_for_load(self) -> int:
        """Of those that wait, the jobs whose delta is not there or must go; O(variants that wait)."""
        return self._tenure.num_waiting

    def add(self, job: J, now: float) -> None:
        """Let a job wait for its turn."""
        assert job.id not in self._entries, f"job {job.id} is scheduled already"
        self._now = now
        lane = self._queue.lane(job.tenant, job.digest)
        entry = Entry(job, self._num_added, lane, job.num_tokens)
        self._num_added += 1
        self._entries[job.id] = entry
        self._wait(entry)

    def remove(self, job: J) -> None:
        """Forget a job that has ended in whatever way, its pages too; unknown ones are ignored."""
        entry = self._entries.pop(job.id, None)
        if entry is None:
            return
        if entry.is_waiting:
            self._queue.take(entry)
            self._tenure.leave(entry, self._now)
        else:
            self._pages.release(entry.job)
            self._unseat(entry)

    def plan(self, now: float) -> Plan[J]:
        """The next step. Whoever is preempted has given its pages back and waits again."""
        draft = _Draft[J](self._limits.max_batch_tokens)
        self._now = now
        self._tenure.turn(now, lambda entry: self._preempt(entry, draft))
        self._decode(draft)
        self._prefill(draft)
        self._fill_up(draft)
        batch = [(entry.job, num_tokens) for entry, num_tokens in draft.batch.items()]
        return Plan(batch, draft.preempted, draft.unfit, self._tenure.wants, self._costs(draft))

    def charge(self, plan: Plan[J], now: float) -> None:
        """Count what the step of a plan gave, beside the prompts, which were counted when they were planned."""
        self._now = now
        self._tenure.computed(sum(num_tokens for _, num_tokens in plan.batch))
        for lane, cost in plan.costs:
            charge(lane, cost)

    def _decode(self, draft: _Draft[J]) -> None:
        """One token for every running job whose prompt is computed, the most senior first."""
        for entry in self._seniors():
            if entry.is_waiting or _num_missing(entry) != 1:
                continue
            if self._grow(entry, draft):
                draft.batch[entry] = 1

    def _grow(self, entry: Entry[J], draft: _Draft[J]) -> bool:
        """Room for one token more. The most senior running job always gets it, so jobs always end."""
        while not self._pages.grow(entry.job, 1):
            draft.admits = False
            if len(self._running) == 1:
                self._give_up(entry, draft)
                return False
            senior = min(self._running)
            victim = max((e for e in self._running.values() if e.order != senior), key=_harmless)
            self._preempt(victim, draft)
            if victim is entry:
                return False
        return True

    def _prefill(self, draft: _Draft[J]) -> None:
        """Chunks of prompts: those that are under way and those that begin, in the order of fairness."""
        under_way = deque(
            sorted((e for e in self._running.values() if _num_missing(e) > 1), key=_entitlement)
        )
        while draft.budget > 0:
            first = self._queue.first() if draft.admits else None
            if under_way and (first is None or _entitlement(under_way[0]) <= _entitlement(first)):
                self._chunk(under_way.popleft(), draft)
            elif first is None:
                return
            elif self._admit(first, draft):
                self._chunk(first, draft)

    def _chunk(self, entry: Entry[J], draft: _Draft[J]) -> None:
        share = max(1, int(self._limits.prefill_share * self._limits.max_batch_tokens))
        self._take_tokens(entry, min(share, _num_missing(entry), draft.budget), draft)

    def _fill_up(self, draft: _Draft[J]) -> None:
        """What prompts leave over goes to those that could use more than their share."""
        for entry, num_tokens in list(draft.batch.items()):
            more = min(_num_missing(entry) - num_tokens, draft.budget)
            if more > 0:
                self._take_tokens(entry, more, draft)

    def _take_tokens(self, entry: Entry[J], num_tokens: int, draft: _Draft[J]) -> None:
        """Put tokens of a prompt into the batch; counted at once, lest the tenant's next prompt be first again."""
        draft.batch[entry] = draft.batch.get(entry, 0) + num_tokens
        reached = min(entry.job.num_computed_tokens + draft.batch[entry], entry.num_prompt)
        begun = max(entry.job.num_computed_tokens + draft.batch[entry] - num_tokens, entry.num_charged)
        if reached > begun:
            charge(entry.lane, PROMPT_COST * (reached - begun))
            entry.num_charged = reached

    def _costs(self, draft: _Draft[J]) -> list[tuple[Lane[J], float]]:
        """What generated tokens and the reading of deltas cost, per job."""
        sharers = Counter(entry.lane.digest for entry in draft.batch)
        costs = []
        for entry, num_tokens in draft.batch.items():
            cost = GENERATED_COST if num_tokens == _num_missing(entry) else 0.0
            if entry.lane.digest is not None:
                cost += self._limits.delta_cost_tokens / sharers[entry.lane.digest]
            costs.append((entry.lane, cost))
        return costs

    def _admit(self, entry: Entry[J], draft: _Draft[J]) -> bool:
        """Give the job whose turn it is a seat and pages for all its tokens; else nobody is admitted in this step."""
        displaced = False
        if len(self._running) >= self._limits.max_num_seqs:
            displaced = self._displace(entry, draft)
            if not displaced:
                draft.admits = False
                return False
        fits = self._take_pages(entry)
        if not fits and not self._running:
            self._give_up(entry, draft)
            return False
        if not fits and not displaced and self._displace(entry, draft):
            displaced, fits = True, self._take_pages(entry)
        draft.admits = fits and not displaced
        if fits:
            self._seat(entry)
        return fits

    def _take_pages(self, entry: Entry[J]) -> bool:
        """Pages for all tokens of a job, where enough are left over for the running ones to grow."""
        order, num_available = self._too_few
        if self._running and order == entry.order and num_available >= self._pages.num_available:
            return False  # a prefix is not looked for in every step
        self._pages.attach(entry.job)
        reserve = self._limits.reserve_tokens * len(self._running)
        free = self._pages.num_available * self._pages.page_tokens
        missing = _num_missing(entry)
        if missing + reserve <= free and self._pages.grow(entry.job, missing):
            return True
        self._pages.release(entry.job)
        self._too_few = entry.order, self._pages.num_available
        return False

    def _displace(self, entry: Entry[J], draft: _Draft[J]) -> bool:
        """Preempt a job for one that has waited too long: a tenant's second for another's first, or inside a tenant a
        variant's second for another's first. It never comes back the same way, because the other way round there is
        no second.
        """
        if self._now - entry.waits_since < self._limits.seat_wait_s:
            return False
        lane, senior = entry.lane, min(self._running)
        if not lane.tenant.num_running:
            victims = [e for e in self._running.values() if e.lane.tenant.num_running > 1]
        elif not lane.num_running:
            victims = [
                e for e in self._running.values() if e.lane.tenant is lane.tenant and e.lane.num_running > 1
            ]
        else:
            return False
        victims = [e for e in victims if e.order != senior and e.has_progressed]
        if victims:
            self._preempt(max(victims, key=_harmless), draft)
        return bool(victims)

    def _wait(self, entry: Entry[J]) -> None:
        entry.waits_since = self._now
        self._tenure.wait(entry, self._now)
        self._queue.push(entry)

    def _seat(self, entry: Entry[J]) -> None:
        self._queue.take(entry)
        self._running[entry.order] = entry
        entry.num_at_start = entry.job.num_tokens
        entry.lane.num_running += 1
        entry.lane.tenant.num_running += 1
        self._tenure.start(entry)

    def _unseat(self, entry: Entry[J]) -> None:
        del self._running[entry.order]
        entry.lane.num_running -= 1
        entry.lane.tenant.num_running -= 1
        self._tenure.stop(entry, self._now)

    def _preempt(self, entry: Entry[J], draft: _Draft[J]) -> None:
        """Let a running job wait again: its tokens stay, what was computed of them is lost."""
        draft.batch.pop(entry, None)
        draft.preempted.append(entry.job)
        self._pages.release(entry.job)
        self._wait(entry)
        self._unseat(entry)

    def _give_up(self, entry: Entry[J], draft: _Draft[J]) -> None:
        draft.unfit.append(entry.job)
        self.remove(entry.job)

    def _seniors(self) -> list[Entry[J]]:
        return [self._running[order] for order in sorted(self._running)]


def _num_missing(entry: Entry[J]) -> int:
    """Tokens that the cache does not hold; a job that decodes has one."""
    return entry.job.num_tokens - entry.job.num_computed_tokens


def _entitlement(entry: Entry[J]) -> tuple[float, bool, float, int]:
    """The least goes first; of one tenant, prompts under way before those that wait."""
    return entry.lane.tenant.counter, entry.is_waiting, entry.lane.counter, entry.order


def _harmless(entry: Entry[J]) -> tuple[float, int]:
    """The greatest is preempted first: of the tenant that got most, the most junior."""
    return entry.lane.tenant.counter, entry.order
