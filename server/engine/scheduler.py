"""Plans each step: one token for each decoding sequence, then chunks of prompts, fairly among tenants and variants.

Plain Python without tensors, threads or a clock: times are seconds and are passed in. `FairQueue` chooses the sequence
to admit next, `SlotPolicy` the variants that have slots; this file owns the tokens of a step, the number of running
sequences and the preemption for pages.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from server.deltas.residency import Residency
from server.engine.kv_cache_manager import KVCacheManager
from server.engine.sequence import FairQueue, Sequence, TenantQueue
from server.engine.slot_policy import SchedulerConstants, SlotPolicy

# Tokens of prompts whose logits one step computes for their log-probabilities. As many rows as a full batch has by
# default: with 128,256 tokens, 33 MB in float32, where a long prompt in one step would have gigabytes.
MAX_SCORED_TOKENS = 64
# Arrival numbers that each request reserves for its sequences.
MAX_SEQUENCES = 1 << 20
# Part of a step's tokens that one prompt may have whatever its context: with fewer, a long prompt would mostly read its
# context.
MIN_CHUNK = 1 / 8
# A sequence whose tokens take longer to sample, in argmaxes, is one of the slow ones. While several tenants are served,
# those of a step take at most so many, decoding sequences and completed prompts each: some 15 ms with 128k tokens.
SLOW_SAMPLING, MAX_SLOW_SAMPLING = 20.0, 250.0
# Tenants whose next sequences find too few pages in one step, and how long such a tenant is passed over: looking at all
# of them in each step would take longer than the step.
MAX_PASSED, PASSED_S = 16, 0.1
# So long, and so often, nothing begins before a sequence that has waited for pages for `cold_wait_s`: else others would
# take each page that comes free.
ROOM_S, ROOM_EVERY_S = 5.0, 50.0
# In so long all pages may be recomputed, however few tokens are computed meanwhile. And so long after a sequence within
# its tenant's share found too few pages, none above its tenant's begins while more than may be is recomputed already.
MAX_PAGE_DEBT_S, SHORT_S = 60.0, 10.0
# Weight of the steps before, in the estimate of what a step takes, after each further one.
DECAY = 0.98
# A step counts as at most so many times the estimate, or as a second, and all that is between two steps as a second: no
# tenant pays for a machine that was paused.
MAX_FACTOR, MIN_BOUND_S = 10.0, 1.0


@dataclass(slots=True)
class StepCost:
    """The cost of a sequence in a step, in prompt tokens without context."""

    total: float = 0.0  # its part of the step
    charged: float = 0.0  # of it, charged by estimate while the step was planned
    free: float = 0.0  # of it, computed a second time, or charged before the step


class StepSeconds:
    """Tells what a step will take by what the steps before took for each unit of cost."""

    def __init__(self) -> None:
        # Until the first step there is none: a guess below any machine's, because a charge is never taken back.
        self._seconds, self._cost = 1e-6, 1.0

    @property
    def per_cost(self) -> float:
        return self._seconds / self._cost

    def took(self, seconds: float, cost: float) -> float:
        """Take in a step; return the seconds that count."""
        seconds = min(max(0.0, seconds), max(MIN_BOUND_S, MAX_FACTOR * cost * self.per_cost))
        self._seconds = DECAY * self._seconds + seconds
        self._cost = DECAY * self._cost + cost
        return seconds


@dataclass(slots=True)
class StepPlan:
    """The sequences that one step computes, and those that were preempted or refused while it was planned."""

    batch: dict[Sequence, int] = field(default_factory=dict)  # number of tokens to compute
    num_tokens: int = 0  # of the whole batch
    num_prompt_tokens: int = 0
    num_scored: int = 0  # of prompts whose log-probabilities were asked for
    # What the step takes, and the parts of it that prompts and each tenant take, in tokens without context.
    load: float = 0.0
    prompt_load: float = 0.0
    tenant_loads: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    num_passed: int = 0  # tenants whose next sequences found too few pages
    slow_sampling: float = 0.0  # that the slow sequences of complete prompts take, in argmaxes
    decoding: set[str] = field(default_factory=set)  # tenants of the sequences that decode
    preempted: list[Sequence] = field(default_factory=list)  # waiting again without pages, not in the batch
    # Removed: the KV cache cannot hold them even alone.
    too_long: list[Sequence] = field(default_factory=list)
    costs: dict[Sequence, StepCost] = field(default_factory=dict)
    admits: bool = True  # False once no further sequence may be admitted

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Compute that many more tokens of a sequence."""
        self.batch[sequence] = self.batch.get(sequence, 0) + num_tokens
        self.num_tokens += num_tokens

    def add_load(self, tenant: str, load: float) -> None:
        """Count what a tenant's tokens take, in tokens without context."""
        self.load += load
        self.tenant_loads[tenant] += load

    def preempt(self, sequence: Sequence) -> None:
        self.num_tokens -= self.batch.pop(sequence, 0)
        self.costs.pop(sequence, None)
        self.preempted.append(sequence)


class Scheduler:
    """Takes sequences in and plans one step at a time. Called by the engine thread only."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        residency: Residency,
        max_num_seqs: int,
        max_batch_tokens: int,
        constants: SchedulerConstants | None = None,
    ) -> None:
        """Plan steps of at most `max_num_seqs` sequences and `max_batch_tokens` tokens.

        Raises:
            ValueError: a step cannot hold a sequence, or no prompt could advance while all running sequences decode.
        """
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
        if max_batch_tokens <= max_num_seqs:
            raise ValueError(
                "max_batch_tokens must be above max_num_seqs, so that prompts advance while all sequences decode; "
                f"got {max_batch_tokens} and {max_num_seqs}"
            )
        self.kv_cache = kv_cache
        self._max_num_seqs, self._max_batch_tokens = max_num_seqs, max_batch_tokens
        self._constants = constants or SchedulerConstants()
        self._queue = FairQueue()
        self._slot_policy = SlotPolicy(residency, self._queue, self._constants)
        self._running: dict[int, Sequence] = {}  # by arrival
        # Tenants that are passed over, until when.
        self._passed_over: deque[tuple[float, TenantQueue]] = deque()
        # Tokens that may be recomputed because of pages; none while it is negative. It is not the budget of slots and
        # rows: tenants with long contexts that preempt each other would leave nothing of that one to others.
        self._page_budget = 0.0
        # By arrival: tokens of waiting sequences that were taken from it.
        self._page_charges: dict[int, int] = {}
        # When a sequence within its tenant's share of pages last found too few, by tenant, the latest last.
        self._short_at: dict[str, float] = {}
        # Until when, and from when on again, nothing begins before a sequence that waits for pages.
        self._room_until = self._next_room_at = -math.inf
        self._num_added = self._num_turns = 0
        self._step_seconds, self._sampling_seconds = StepSeconds(), StepSeconds()
        # The time of the last call that passed one.
        self._now = 0.0

    @property
    def running(self) -> list[Sequence]:
        """Running sequences in order of arrival."""
        return [self._running[arrival] for arrival in sorted(self._running)]

    def add(self, sequence: Sequence, now: float, first: int | None = None) -> None:
        """Let a new sequence wait to be admitted.

        Args:
            first: the arrival of its request's first sequence. Later ones stand behind it and before those of later
                requests, so that only about as many requests have begun as there are rows.

        Raises:
            ValueError: the sequence was added before.
        """
        if sequence.arrival >= 0:
            raise ValueError(f"sequence {sequence.id} was scheduled before")
        self._now = now
        if first is None:
            first, self._num_added = self._num_added * MAX_SEQUENCES, self._num_added + 1
        sequence.arrival = first + sequence.index
        sequence.queue = self._queue.variant_queue(sequence.tenant, sequence.version)
        self._enqueue(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended and release its pages; no effect if it is not scheduled."""
        if sequence.arrival in self._running:
            self.kv_cache.release(sequence)
            self._stop(sequence)
        elif sequence.arrival >= 0 and sequence.is_waiting:
            self._return_page_charge(sequence)
            self._queue.remove(sequence)
            self._slot_policy.leave(sequence, self._now)

    def go_on(self, sequence: Sequence, now: float) -> None:
        """Let a sequence that was removed and has not ended wait again, in its old place."""
        self._now = now
        self._enqueue(sequence)

    def load_ended(self, version: str, now: float) -> None:
        """Note that a load has ended, whether the delta is resident now or the load failed."""
        self._now = now
        self._slot_policy.load_ended(version, now)

    def plan(self, now: float, on_admit: Callable[[Sequence], None] = lambda sequence: None) -> StepPlan:
        """Plan the next step. Preempted sequences have released their pages and wait again.

        Args:
            now: seconds on the clock of all other calls.
            on_admit: called with each sequence that begins to run; may `add` and `remove` sequences.
        """
        plan = StepPlan()
        self._now = now
        self._slot_policy.update(now, lambda sequence: self._preempt(sequence, plan))
        self._forget_short()
        while self._passed_over and (self._passed_over[0][0] <= now or not self._running):
            self._queue.resume(self._passed_over.popleft()[1])
        self._decode(plan)
        self._prefill(plan, on_admit)
        self._use_rest(plan)
        self._add_costs(plan)
        return plan

    def charge(self, plan: StepPlan, now: float, seconds: float) -> dict[str, float]:
        """Divide what a step took among its sequences by their costs, and charge their variant queues.

        Args:
            plan: the step.
            now: seconds on the clock of all other calls.
            seconds: that the step took.

        Returns:
            The seconds of each tenant.
        """
        self._now = now
        self._slot_policy.refill_recompute_budget(plan.num_tokens)
        by_tenant: dict[str, float] = {}
        total = sum(cost.total for cost in plan.costs.values())
        if not total:
            return by_tenant
        estimate = self._step_seconds.per_cost
        counted = self._step_seconds.took(seconds, total)
        # Few tokens of streams alone would keep it negative for long.
        refill = self._constants.recompute_share * plan.num_tokens
        refill = max(refill, self.kv_cache.max_tokens * counted / MAX_PAGE_DEBT_S)
        self._page_budget = min(0.0, self._page_budget + refill)
        rate = counted / total
        for sequence, cost in plan.costs.items():
            sequence.queue.charge((cost.total - cost.free) * rate - cost.charged * estimate)
            by_tenant[sequence.tenant] = by_tenant.get(sequence.tenant, 0.0) + cost.total * rate
        return by_tenant

    def charge_sampling(self, costs: list[tuple[Sequence, float]], seconds: float) -> dict[str, float]:
        """Divide what a call that has sampled took among its sequences, and charge their variant queues.

        Args:
            costs: sequences, each with what its token took beside those of others.
            seconds: that the call took.

        Returns:
            The seconds of each tenant.
        """
        total = sum(cost for _, cost in costs)
        rate = self._sampling_seconds.took(seconds, len(costs)) / total if total else 0.0
        by_tenant: dict[str, float] = {}
        for sequence, cost in costs:
            sequence.queue.charge(cost * rate)
            by_tenant[sequence.tenant] = by_tenant.get(sequence.tenant, 0.0) + cost * rate
        return by_tenant

    def charge_tenant(self, tenant: str, seconds: float) -> float:
        """Charge a tenant for what the engine's thread did for it outside of a step. Return the seconds that count."""
        counted = min(max(0.0, seconds), MIN_BOUND_S)
        self._queue.charge(tenant, counted)
        return counted

    def _decode(self, plan: StepPlan) -> None:
        """Plan one token for each running sequence whose prompt is computed, in order of arrival."""
        passed = self._passed()
        for sequence in self.running:
            if (
                sequence.arrival not in self._running
                or sequence.num_missing_tokens != 1
                or sequence in passed
            ):
                continue
            if self._allocate_next(sequence, plan):
                plan.add(sequence, 1)
                plan.add_load(sequence.tenant, self._decode_load(sequence))
                plan.decoding.add(sequence.tenant)

    def _passed(self) -> set[Sequence]:
        """Return the sequences whose next token waits for another step; none while one tenant is served alone."""
        if self._queue.num_tenants < 2:
            return set()
        decoding = [s for s in self._running.values() if s.num_missing_tokens == 1]
        slow = self._slow_beyond(decoding)
        return slow | self._beyond_parts([s for s in decoding if s not in slow])

    def _slow_beyond(self, decoding: list[Sequence]) -> set[Sequence]:
        """Return the slow sequences that a step has no time to sample.

        Those of the least-served tenants go first, and a tenant's take turns.
        """
        slow = [s for s in decoding if is_slow(s)]
        slow.sort(key=lambda sequence: (sequence.queue.tenant.counter, sequence.slow_turn, sequence.arrival))
        passed, total = set[Sequence](), 0.0
        for sequence in slow:
            total += sequence.sampling_cost
            if total > max(MAX_SLOW_SAMPLING, sequence.sampling_cost):
                passed.add(sequence)
            else:
                self._num_turns += 1
                sequence.slow_turn = self._num_turns
        return passed

    def _beyond_parts(self, decoding: list[Sequence]) -> set[Sequence]:
        """Return the sequences beyond their tenant's part of a step that it shares with others; they take turns."""
        if len({sequence.tenant for sequence in self._running.values()}) < 2:
            return set()
        by_tenant: defaultdict[str, list[Sequence]] = defaultdict(list)
        for sequence in decoding:
            by_tenant[sequence.tenant].append(sequence)
        part = self._constants.tenant_share * self._max_batch_tokens
        passed = set[Sequence]()
        for own in by_tenant.values():
            own.sort(key=lambda sequence: (sequence.turn, sequence.arrival))
            load = 0.0
            for sequence in own:
                load += self._decode_load(sequence)
                if load > part and sequence is not own[0]:
                    passed.add(sequence)
                else:
                    self._num_turns += 1
                    sequence.turn = self._num_turns
        return passed

    def _load(self, num_context: int) -> float:
        """Return what a token behind so many others takes, in tokens without context: attention reads all of them."""
        return 1.0 + num_context / self._constants.context_tokens

    def _decode_load(self, sequence: Sequence) -> float:
        """Return what a sequence's next token takes: it shares the keys that it reads with no token of a prompt."""
        return self._load(int(self._constants.decode_attention * sequence.num_computed_tokens))

    def _allocate_next(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Allocate the next token of a running sequence, by preempting others if pages are short.

        The earliest of the running sequences that wait for no mask is never preempted, so sequences always end.
        """
        while not self.kv_cache.allocate(sequence, 1):
            plan.admits = False
            if len(self._running) == 1:
                self._refuse(sequence, plan)
                return False
            victim = max(self._preemptible(self._running.values()), key=_preemption_key)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _prefill(self, plan: StepPlan, on_admit: Callable[[Sequence], None]) -> None:
        """Plan chunks of prompts, those begun before and those of sequences admitted now, in order of fairness."""
        begun = deque(
            sorted((s for s in self._running.values() if s.num_missing_tokens > 1), key=_fairness_key)
        )
        passed: list[TenantQueue] = []
        while plan.num_tokens < self._max_batch_tokens:
            first = self._queue.first() if plan.admits else None
            if begun and begun[0].is_waiting:
                # It was preempted just now.
                begun.popleft()
            elif begun and (first is None or _fairness_key(begun[0]) <= _fairness_key(first)):
                self._plan_chunk(begun.popleft(), plan)
            elif first is None:
                break
            elif self._room(first, plan) > 0:
                if self._admit(first, plan):
                    self._plan_chunk(first, plan)
                    on_admit(first)
            elif plan.tenant_loads[first.tenant] > plan.prompt_load and self._now >= self._room_until:
                # What it decodes takes the room, and another tenant may have some.
                self._queue.pause(first.queue.tenant)
                passed.append(first.queue.tenant)
            else:
                plan.admits = False
        for tenant in passed:
            self._queue.resume(tenant)

    def _plan_chunk(self, sequence: Sequence, plan: StepPlan) -> None:
        share = max(1, int(self._constants.prefill_share * self._max_batch_tokens))
        num_tokens = min(share, sequence.num_missing_tokens, self._num_left(sequence, plan))
        if num_tokens > 0:
            self._plan_prompt(sequence, num_tokens, plan)

    def _num_left(self, sequence: Sequence, plan: StepPlan) -> int:
        """Return how many more tokens of a sequence's prompt the step may compute."""
        room = self._room(sequence, plan)
        return min(room, MAX_SCORED_TOKENS - plan.num_scored) if sequence.needs_prompt_logits else room

    def _room(self, sequence: Sequence, plan: StepPlan) -> int:
        """Return how many more tokens of a sequence's prompt the step has time for.

        A step takes about as long as `max_batch_tokens` tokens without context. While other tenants decode, prompts
        take at most `tenant_share` of that, and so does a tenant with what it decodes. But the first prompt always
        advances by a few tokens.
        """
        left = self._max_batch_tokens - plan.load
        if plan.decoding - {sequence.tenant}:
            taken = max(plan.prompt_load, plan.tenant_loads[sequence.tenant])
            left = min(left, self._constants.tenant_share * self._max_batch_tokens - taken)
        num_context = sequence.num_computed_tokens + plan.batch.get(sequence, 0)
        least = max(1, int(MIN_CHUNK * self._max_batch_tokens)) - plan.num_prompt_tokens
        timely = max(least, int(left / self._load(num_context)))
        room = min(self._max_batch_tokens - plan.num_tokens, timely)
        if self._has_sampling_time(sequence, plan):
            return room
        # Behind its last token it would be sampled from.
        return min(room, sequence.num_missing_tokens - plan.batch.get(sequence, 0) - 1)

    def _has_sampling_time(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Return whether a prompt that the step completes may be sampled from in it."""
        return (
            not is_slow(sequence)
            or self._queue.num_tenants < 2
            or plan.slow_sampling + sequence.sampling_cost <= max(MAX_SLOW_SAMPLING, sequence.sampling_cost)
        )

    def _use_rest(self, plan: StepPlan) -> None:
        """Give the tokens that are left to prompts that could use more than their share."""
        for sequence, num_tokens in list(plan.batch.items()):
            missing = sequence.num_missing_tokens - num_tokens
            if missing > 0 and (more := min(missing, self._num_left(sequence, plan))) > 0:
                self._plan_prompt(sequence, more, plan)

    def _plan_prompt(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> None:
        """Add prompt tokens to the batch; charge an estimate, so that the tenant's next prompt is not first again."""
        begin = sequence.num_computed_tokens + plan.batch.get(sequence, 0)
        end = begin + num_tokens
        load = num_tokens * self._load((begin + end) // 2)
        plan.add(sequence, num_tokens)
        plan.num_prompt_tokens += num_tokens
        plan.num_scored += num_tokens if sequence.needs_prompt_logits else 0
        if is_slow(sequence) and plan.batch[sequence] == sequence.num_missing_tokens:
            plan.slow_sampling += sequence.sampling_cost
        plan.add_load(sequence.tenant, load)
        plan.prompt_load += load
        cost = plan.costs.setdefault(sequence, StepCost())
        cost.total += self._prompt_token_cost(sequence) * load
        reached = min(end, sequence.num_prompt_tokens)
        num_new = max(0, reached - max(begin, sequence.num_charged_tokens))
        cost.free += self._prompt_token_cost(sequence) * load * (1 - num_new / num_tokens)
        if num_new:
            charged = self._prompt_token_cost(sequence) * load * num_new / num_tokens
            cost.charged += charged
            sequence.queue.charge(charged * self._step_seconds.per_cost)
            sequence.num_charged_tokens = reached

    def _prompt_token_cost(self, sequence: Sequence) -> float:
        """Return the cost of a prompt's token: as of a generated one, if its logits are computed, too."""
        constants = self._constants
        return constants.generated_token_cost if sequence.needs_prompt_logits else constants.prompt_token_cost

    def _add_costs(self, plan: StepPlan) -> None:
        """Add to the prompts' costs those of each sequence's generated token and of its share of reading its delta."""
        num_sharing = Counter(sequence.version for sequence in plan.batch)
        for sequence, num_tokens in plan.batch.items():
            # The context of a prompt's last token is in the cost of the prompt.
            load = 1.0 if sequence in plan.costs else self._decode_load(sequence)
            cost = plan.costs.setdefault(sequence, StepCost())
            if num_tokens == sequence.num_missing_tokens:
                cost.total += self._constants.generated_token_cost * load
            if sequence.version is not None:
                cost.total += self._constants.delta_cost_tokens / num_sharing[sequence.version]

    def _admit(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Admit the next sequence with pages for all its tokens. If it does not fit, pass over its tenant for a moment.

        So that it keeps none waiting that needs less. Of one tenant, served alone, no other is admitted in this step.
        """
        preempted = False
        if len(self._running) >= self._max_num_seqs and not self._lacks_pages(sequence):
            preempted = self._preempt_for(sequence, plan)
            if not preempted:
                plan.admits = False
                return False
        fits = self._allocate_all(sequence)
        if not fits and not self._running:
            self._refuse(sequence, plan)
            return False
        if not fits and not preempted and self._preempt_for_pages(sequence, plan):
            preempted, fits = True, self._allocate_all(sequence)
        if fits:
            self._start(sequence)
        elif not preempted and self._queue.num_tenants > 1 and not self._makes_room_for(sequence):
            self._pass_over(sequence, plan)
            return False
        plan.admits = fits and not preempted
        return fits

    def _pass_over(self, sequence: Sequence, plan: StepPlan) -> None:
        """Admit no sequence of a tenant for a moment: the next one finds too few pages."""
        if not self._exceeds_share(sequence):
            self._short_at.pop(sequence.tenant, None)
            self._short_at[sequence.tenant] = self._now
        tenant = sequence.queue.tenant
        self._queue.pause(tenant)
        self._passed_over.append((self._now + PASSED_S, tenant))
        plan.num_passed += 1
        plan.admits = plan.num_passed < MAX_PASSED

    def _makes_room_for(self, sequence: Sequence) -> bool:
        """Return whether nothing begins before a sequence that waits for pages, a tenth of the time at most."""
        has_waited = self._now - sequence.waiting_since >= self._constants.cold_wait_s
        if not has_waited or self._is_overdrawn(sequence):
            return False
        if self._now >= self._next_room_at:
            self._room_until, self._next_room_at = self._now + ROOM_S, self._now + ROOM_EVERY_S
        return self._now < self._room_until

    def _allocate_all(self, sequence: Sequence) -> bool:
        """Allocate pages for all tokens of a sequence, if enough are left for the running sequences to grow."""
        if self._lacks_pages(sequence):
            return False
        self.kv_cache.attach_prefix(sequence)
        reserve = self._constants.reserve_tokens * len(self._running)
        num_free = self.kv_cache.num_available * self.kv_cache.page_tokens
        num_missing = sequence.num_missing_tokens
        if num_missing + reserve <= num_free and self.kv_cache.allocate(sequence, num_missing):
            return True
        self.kv_cache.release(sequence)
        sequence.too_few_pages = self.kv_cache.num_available
        return False

    def _lacks_pages(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence gets no pages now, without a look at the prefix cache.

        None has come free since it found too few. Or its tenant would use more than its share, others need pages for
        theirs, and they could not take them back, because too much is computed again already.
        """
        if not self._running:
            return False
        if sequence.too_few_pages >= self.kv_cache.num_available:
            return True
        return self._is_overdrawn(sequence) and any(tenant != sequence.tenant for tenant in self._short_at)

    def _is_overdrawn(self, sequence: Sequence) -> bool:
        """Return whether too much is computed again already for a sequence above its tenant's share of pages."""
        return self._page_budget < 0 and self._exceeds_share(sequence)

    def _exceeds_share(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence's tenant would use more than its share of pages with it."""
        return self._num_used_with(sequence) > self.kv_cache.num_pages // self._queue.num_tenants

    def _forget_short(self) -> None:
        """Forget the tenants whose sequences have found too few pages too long ago to count."""
        while self._short_at:
            tenant, at = next(iter(self._short_at.items()))
            if self._now - at < SHORT_S:
                return
            del self._short_at[tenant]

    def _num_used_with(self, sequence: Sequence) -> int:
        """Return how many pages a waiting sequence's tenant would use with it, if none is in the prefix cache."""
        num_pages = -(-sequence.num_tokens // self.kv_cache.page_tokens)
        return self.kv_cache.num_used(sequence.tenant) + num_pages

    def _preempt_for_pages(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Preempt a running sequence for one that has waited for `preempt_wait_s` for pages; False if there is none.

        Of tenants, those give way that use more pages than the sequence's would with it, so two never preempt each
        other in turn: one of several sequences for a tenant that has none, and one that has run for `cold_wait_s`,
        also the earliest, within the budget.
        """
        if self._now - sequence.waiting_since < self._constants.preempt_wait_s:
            return False
        tenant = sequence.queue.tenant
        others = [s for s in self._running.values() if s.queue.tenant is not tenant]
        larger = [s for s in others if self._uses_more_than(s, sequence)]
        victims = free = [
            s
            for s in larger
            if not tenant.num_running and s.queue.tenant.num_running > 1 and s.has_progressed
        ]
        if not free and self._page_budget >= 0:
            victims = [s for s in larger if self._now - s.running_since >= self._constants.cold_wait_s]
        if victims:
            victim = max(victims, key=_preemption_key)
            if victim not in free:
                self._page_budget -= victim.num_computed_tokens
                self._page_charges[victim.arrival] = victim.num_computed_tokens
            self._preempt(victim, plan)
            return True
        return self._preempt_own(sequence, plan)

    def _uses_more_than(self, running: Sequence, waiting: Sequence) -> bool:
        """Return whether a running sequence's tenant uses more pages than a waiting one's would with it.

        For a sequence that gave way itself, what the running one has grown by since does not count.
        """
        num_used = self.kv_cache.num_used(running.tenant)
        if waiting.arrival in self._page_charges:
            num_used -= (running.num_tokens - running.num_tokens_at_admission) // self.kv_cache.page_tokens
        return num_used > self._num_used_with(waiting)

    def _return_page_charge(self, sequence: Sequence, max_tokens: float = math.inf) -> None:
        """Give back to the budget what a sequence that waits no more need not compute again."""
        returned = min(self._page_charges.pop(sequence.arrival, 0), max_tokens)
        self._page_budget = min(0.0, self._page_budget + returned)

    def _preempt_own(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Preempt one of several running sequences of a tenant's variant for the first of another one."""
        queue = sequence.queue
        if queue.num_running:
            return False
        own = [
            s for s in self._running.values() if s.queue.tenant is queue.tenant and s.queue.num_running > 1
        ]
        own = [s for s in self._preemptible(own) if s.has_progressed]
        if own:
            self._preempt(max(own, key=_preemption_key), plan)
        return bool(own)

    def _preempt_for(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Preempt a running sequence for one that has waited for `preempt_wait_s`; False if there is none.

        Only from a tenant with two or more running sequences to one with none, from one above its share of rows to one
        below it, or between two variants of one tenant, so two sequences never preempt each other in turn.
        """
        if self._now - sequence.waiting_since < self._constants.preempt_wait_s:
            return False
        queue, running = sequence.queue, self._running.values()
        share = self._max_num_seqs // self._queue.num_tenants
        victims: list[Sequence] = []
        if not queue.tenant.num_running:
            victims = [s for s in running if s.queue.tenant.num_running > 1]
        elif queue.tenant.num_running < share and self._slot_policy.may_recompute:
            victims = [s for s in running if s.queue.tenant.num_running > share]
        if not victims:
            return self._preempt_own(sequence, plan)
        victims = [s for s in self._preemptible(victims) if s.has_progressed]
        if victims:
            victim = max(victims, key=_preemption_key)
            if queue.tenant.num_running:
                self._slot_policy.charge_recompute_budget(victim)
            self._preempt(victim, plan)
        return bool(victims)

    def _preemptible(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Return all of the sequences but the earliest of all running ones that wait for no mask."""
        advancing = [arrival for arrival, sequence in self._running.items() if not sequence.awaits_mask]
        first = min(advancing or self._running)
        return [sequence for sequence in sequences if sequence.arrival != first]

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.waiting_since, sequence.too_few_pages = self._now, -1
        self._slot_policy.enqueue(sequence, self._now)
        self._queue.push(sequence)

    def _start(self, sequence: Sequence) -> None:
        """Let a waiting sequence run."""
        self._return_page_charge(sequence, sequence.num_computed_tokens)
        self._running[sequence.arrival] = sequence
        self._queue.remove(sequence)
        sequence.num_tokens_at_admission, sequence.running_since = sequence.num_tokens, self._now
        sequence.turn = self._num_turns
        self._queue.count_running(sequence.queue, 1)
        self._slot_policy.admit(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """Let a running sequence run no more."""
        del self._running[sequence.arrival]
        self._queue.count_running(sequence.queue, -1)
        self._slot_policy.stop(sequence, self._now)

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        """Let a running sequence wait again. It keeps its tokens and loses its pages."""
        plan.preempt(sequence)
        self.kv_cache.release(sequence)
        self._enqueue(sequence)
        self._stop(sequence)

    def _refuse(self, sequence: Sequence, plan: StepPlan) -> None:
        plan.too_long.append(sequence)
        self.remove(sequence)


def is_slow(sequence: Sequence) -> bool:
    """True for a sequence of which a step samples few while several tenants are served."""
    return sequence.sampling_cost > SLOW_SAMPLING


def _fairness_key(sequence: Sequence) -> tuple[float, bool, float, int]:
    """Key whose minimum is computed first: of the least-served tenant, prompts begun before waiting ones."""
    queue = sequence.queue
    return queue.tenant.counter, sequence.is_waiting, queue.counter, sequence.arrival


def _preemption_key(sequence: Sequence) -> tuple[float, int]:
    """Key whose maximum is preempted first: the latest arrival of the most-served tenant."""
    return sequence.queue.tenant.counter, sequence.arrival
