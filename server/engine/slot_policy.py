"""Chooses which waiting variant is loaded next, and which resident variant gives up its slot for it.

A resident variant without sequences can be evicted whenever a slot is needed, the least recently used first, but for
`keep_idle_s` after its last sequence not by a tenant that holds as many slots as that sequence's tenant. One that has
sequences keeps its slot for `min_resident_s`, and then:

- Once other variants have waited for half of `cold_wait_s`, it is closed: no sequence of it is admitted any more, and
  its slot is free when its running sequences have ended.
- Once a variant has waited for `cold_wait_s`, a slot is freed at once: the running sequences of the resident variant
  that loses the fewest tokens are preempted. Recomputation is charged to a budget refilled by recompute_share; no
  forced eviction while it is overdrawn, so throughput cannot collapse.

A tenant's waiting variants take slots from its own variants, and from those of tenants that hold more slots than it
does. So a tenant with one variant keeps its slot while another one has a hundred waiting. A tenant that holds none need
not wait for `cold_wait_s` to take one of a tenant with several. What a tenant takes from itself is charged to a budget
of its own, which has half of the refill, so that it delays no other tenant's turn.

Loads go to the tenant that had the fewest, and few of one tenant are under way at a time (`Residency.may_load`), so one
tenant's hundred waiting variants do not delay another tenant's one.

The first sequence of a variant that waits for a slot can therefore start after at most

    cold_wait_s + ceil((ahead + 1) / slots) * (min_resident_s + load + first_token) + (ahead + 1) * refill

where `ahead` is the number of variants loaded before it, `slots` the number of slots that are not pinned, `load`
the time of one load, `first_token` the time from the end of a load to the first token of the variant, and `refill` the
time in which `recompute_share` of the computed tokens equals the tokens that one variant's running sequences hold in
the KV cache.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain, islice, takewhile

from server.deltas.residency import Residency
from server.engine.sequence import FairQueue, LeastServed, Sequence, VariantQueue


@dataclass(frozen=True, slots=True)
class SchedulerConstants:
    """Shares of a step, costs of its tokens, and the waiting times after which a sequence preempts another.

    Raises:
        ValueError: a value is out of its range; names the field.
    """

    # What divides a step's seconds among its sequences: the cost of one token without context, ...
    prompt_token_cost: float = 1.0
    generated_token_cost: float = 2.0
    # ... the tokens of context to which attention takes as long as all else of a prompt's token, ...
    context_tokens: float = math.inf
    # ... how many times as long it takes for a decoded token, which reads keys and values alone, ...
    decode_attention: float = 4.0
    # ... and the cost of reading one delta, in tokens; its sequences share it.
    delta_cost_tokens: float = 8.0
    # Share of a step's tokens that one prompt may take while another waits for them.
    prefill_share: float = 0.25
    # Share of a step that one tenant may take while others decode in it, and that all prompts together may.
    tenant_share: float = 0.5
    # Free KV cache tokens that admission leaves for each running sequence to grow.
    reserve_tokens: int = 32
    # Waiting time after which a sequence may preempt one of a tenant or variant that has several running.
    preempt_wait_s: float = 1.0
    # Time for which a loaded variant keeps its slot, ...
    min_resident_s: float = 1.0
    # ... and for which one without sequences counts as held by the tenant that used it last.
    keep_idle_s: float = 5.0
    # Waiting time after which a variant may take another variant's slot by preempting its sequences.
    cold_wait_s: float = 5.0
    # Tokens recomputed after such preemptions and after those for a share of rows, as a share of all computed tokens.
    recompute_share: float = 0.25

    def __post_init__(self) -> None:
        for name in ("prefill_share", "tenant_share", "recompute_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, got {getattr(self, name)}")
        for name in self.__slots__:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


# Share of `cold_wait_s` after which resident variants are closed. Closing earlier reloads busy variants again and again
# for waits that would have ended without it.
CLOSE_AFTER = 0.5
# Tenants that take a slot, or try to, in one step.
MAX_TAKING = 8


class SlotPolicy:
    """Moves each variant that has sequences through the states of `SlotState`.

    `_variants` has every variant that has sequences; `_in_state` has the same by state, in order of entry. The two slot
    queues have those that wait for a slot by tenant. The time of a step depends on the number of
    slots and of variants that change state in it, not on how many wait.

    `Scheduler` reports each sequence that begins to wait, is admitted, stops or leaves, and each load that has ended.
    """

    def __init__(self, residency: Residency, queue: FairQueue, constants: SchedulerConstants) -> None:
        self._residency = residency
        self._queue = queue
        self._constants = constants
        # Tokens that may be recomputed because of forced evictions and of shares of rows; none while it is negative.
        self._recompute_budget = 0.0
        # The same for what tenants take from themselves; those that may not are here.
        self._own_budgets: dict[str, float] = {}
        # Slots that each tenant has sequences for, or had until a moment ago, ...
        self._num_held: Counter[str] = Counter()
        # ... and the variants of the latter, the first to expire first.
        self._recent: dict[str, RecentUse] = {}
        self._variants: dict[str, ScheduledVariant] = {}
        self._in_state: dict[SlotState, dict[str, ScheduledVariant]] = {state: {} for state in SlotState}
        self._waiting_by_tenant = SlotQueue(residency.may_load)
        self._overdue_by_tenant = SlotQueue(residency.may_load)
        # Variants to open at the end of the next update if they still wait and are resident then.
        self._maybe_resident: list[ScheduledVariant] = []

    def enqueue(self, sequence: Sequence, now: float) -> None:
        """Take in a sequence that begins to wait, before it enters the fair queue."""
        queue = sequence.queue
        if queue.version is None:
            return
        variant = self._variants.get(queue.version) or self._add(queue.version, now)
        variant.num_waiting += 1
        self._count_tenant(sequence.tenant, variant, 1)
        queue.is_open = variant.state is SlotState.OPEN
        if queue not in variant.queues:
            variant.queues[queue] = None
            if variant.state.is_waiting:
                self._await_slot(queue, variant)

    def admit(self, sequence: Sequence) -> None:
        """Count a waiting sequence as running."""
        if sequence.queue.version is not None:
            variant = self._variants[sequence.queue.version]
            variant.running[sequence.arrival] = sequence
            variant.was_used = True
            self._stop_waiting(sequence, variant)

    def stop(self, sequence: Sequence, now: float) -> None:
        """Remove a running sequence that has ended, or that waits again and was enqueued before this call."""
        if sequence.queue.version is not None:
            variant = self._variants[sequence.queue.version]
            self._residency.note_use(variant.version, sequence.tenant)
            del variant.running[sequence.arrival]
            self._count_tenant(sequence.tenant, variant, -1)
            self._release_unused(variant, now)

    def leave(self, sequence: Sequence, now: float) -> None:
        """Remove a waiting sequence that has ended."""
        if sequence.queue.version is not None:
            variant = self._variants[sequence.queue.version]
            self._stop_waiting(sequence, variant)
            self._count_tenant(sequence.tenant, variant, -1)
            self._release_unused(variant, now)

    def load_ended(self, version: str, now: float) -> None:
        """Note the end of a load, whether this policy began it and whether it failed or not."""
        self._waiting_by_tenant.look_again()
        self._overdue_by_tenant.look_again()
        variant = self._variants.get(version)
        if variant is None:
            return
        if variant.state.is_waiting:
            self._maybe_resident.append(variant)
        elif variant.state is SlotState.LOADING:
            if self._residency.is_resident(version):
                self._open(variant, now)
            else:
                self._become_waiting(variant, now)

    def update(self, now: float, preempt: Callable[[Sequence], None]) -> None:
        """Begin the loads for which a slot is free or can be freed.

        Args:
            now: seconds on the clock of all other calls.
            preempt: makes a running sequence wait again; it calls `enqueue` and `stop`.
        """
        self._forget_recent(now)
        self._mark_overdue(now)
        self._reopen()
        self._begin_loads(self._waiting_by_tenant, now, preempt, is_overdue=False)
        self._begin_loads(self._overdue_by_tenant, now, preempt, is_overdue=True)
        self._open_resident(now)
        self._close_for_waiting(now)

    @property
    def may_recompute(self) -> bool:
        """False while more tokens have been preempted than may be recomputed."""
        return self._recompute_budget >= 0

    def charge_recompute_budget(self, sequence: Sequence) -> None:
        """Take the tokens of a sequence that is about to be preempted from the budget."""
        self._recompute_budget -= sequence.num_computed_tokens

    def refill_recompute_budget(self, num_tokens: int) -> None:
        """Refill the budget for recomputation by its share of the tokens that a step computed."""
        refill = self._constants.recompute_share * num_tokens
        if self._recompute_budget < 0 and self._own_budgets:
            refill /= 2
        self._recompute_budget = min(0.0, self._recompute_budget + refill)
        if self._own_budgets:
            part = refill / len(self._own_budgets)
            left = {tenant: budget + part for tenant, budget in self._own_budgets.items()}
            self._own_budgets = {tenant: budget for tenant, budget in left.items() if budget < 0}

    def _begin_loads(
        self, waiting: SlotQueue, now: float, preempt: Callable[[Sequence], None], *, is_overdue: bool
    ) -> None:
        """Begin loads in tenants' turns until `MAX_TAKING` tenants have found no slot."""
        num_refused = 0
        while num_refused < MAX_TAKING:
            if (loads := waiting.first()) is None:
                # Those that found none are asked again in the next step.
                waiting.look_again()
                return
            # Also for the second try, which gets the slot that was freed.
            kept = self._kept_from(loads.tenant)
            may_free = is_overdue or not self._num_held[loads.tenant]
            if self._load(loads, now, kept) or (
                may_free
                and self._free_slot(loads.tenant, now, preempt, is_overdue)
                and self._load(loads, now, kept)
            ):
                loads.counter += 1
            else:
                waiting.set_aside(loads)
                num_refused += 1

    def _forget_recent(self, now: float) -> None:
        """Forget variants that have been idle for `keep_idle_s`, or that have lost their slots."""
        for version, use in list(self._recent.items()):
            if use.kept_until <= now or not self._residency.is_resident(version):
                self._forget(version)

    def _forget(self, version: str) -> None:
        if (use := self._recent.pop(version, None)) is not None:
            self._count_held([use.tenant], -1)

    def _kept_from(self, tenant: str) -> set[str]:
        """Return the idle variants whose slots a tenant may not take: those of tenants that hold no more than it."""
        own = self._num_held[tenant]
        return {
            version
            for version, use in self._recent.items()
            if use.tenant != tenant and self._num_held[use.tenant] <= own
        }

    def _mark_overdue(self, now: float) -> None:
        waiting = self._in_state[SlotState.WAITING]
        while waiting:
            variant = next(iter(waiting.values()))
            if now - variant.waiting_since < self._constants.cold_wait_s:
                break
            self._move(variant, SlotState.OVERDUE)
            for queue in variant.queues:
                self._overdue_by_tenant.add(queue.tenant.name, variant)

    def _open_resident(self, now: float) -> None:
        """Open waiting variants that are resident: prefetched, or closed before and not evicted since."""
        candidates, self._maybe_resident = self._maybe_resident, []
        for variant in candidates:
            is_current = self._variants.get(variant.version) is variant and variant.state.is_waiting
            if is_current and self._residency.is_resident(variant.version):
                self._open(variant, now)

    def _load(self, loads: TenantLoads, now: float, kept: Set[str]) -> bool:
        """Begin to load the variant that a tenant has waited for longest; False if there is no slot."""
        variant = loads.oldest
        if self._residency.is_resident(variant.version):
            self._open(variant, now)
            return True
        if not self._residency.load(variant.version, loads.tenant, kept):
            return False
        self._move(variant, SlotState.LOADING)
        return True

    def _close_for_waiting(self, now: float) -> None:
        """Close one open variant per variant that has waited `CLOSE_AFTER * cold_wait_s`, less those closed already."""
        num_closed = len(self._in_state[SlotState.CLOSED])
        num_held = len(self._in_state[SlotState.OPEN]) + num_closed
        latest = now - self._constants.cold_wait_s * CLOSE_AFTER
        waiting_for_long = takewhile(lambda variant: variant.waiting_since <= latest, self._longest_waiting())
        missing = list(islice(waiting_for_long, num_held))[num_closed:]
        if not missing:
            return
        still_open = [variant for variant in self._evictable(now) if variant.state is SlotState.OPEN]
        still_open.sort(key=lambda variant: (variant.num_sequences, variant.opened_at))
        # As it will be when closed variants have given their slots to those that wait.
        num_held_by, refused = self._num_held.copy(), set[str]()
        for waiting in missing:
            tenant = min(waiting.tenants, key=num_held_by.__getitem__)
            if tenant in refused:
                continue
            victim = next((v for v in still_open if _gives(v, tenant, num_held_by)), None)
            if victim is None:
                refused.add(tenant)
                continue
            still_open.remove(victim)
            num_held_by.subtract(victim.tenants.keys())
            num_held_by.update(waiting.tenants.keys())
            self._close(victim)
            self._release_unused(victim, now)

    @property
    def _num_waiting(self) -> int:
        """Number of variants that wait for a slot."""
        return len(self._in_state[SlotState.WAITING]) + len(self._in_state[SlotState.OVERDUE])

    def _longest_waiting(self) -> Iterator[ScheduledVariant]:
        """Variants that wait for a slot, the longest waiting first."""
        return chain(self._in_state[SlotState.OVERDUE].values(), self._in_state[SlotState.WAITING].values())

    def _reopen(self) -> None:
        """Open closed variants whose slots no waiting variant needs any more."""
        closed = self._in_state[SlotState.CLOSED]
        while len(closed) > self._num_waiting:
            variant = closed[next(reversed(closed))]
            self._move(variant, SlotState.OPEN)
            for queue in variant.queues:
                self._queue.open(queue)

    def _is_overdrawn(self, victim: ScheduledVariant, tenant: str) -> bool:
        """Return whether a tenant that takes its own variant's slot has recomputed too much for such turns."""
        return _is_own(victim, tenant) and tenant in self._own_budgets

    def _free_slot(
        self, tenant: str, now: float, preempt: Callable[[Sequence], None], is_overdue: bool
    ) -> bool:
        """Free a slot for a tenant by preempting the sequences that lose fewest tokens; False if it may not now.

        A tenant whose variants are not overdue may take one of a tenant that keeps more slots than it then has.
        """
        lead = 1 if is_overdue else 2
        candidates = (
            variant
            for variant in self._evictable(now)
            if variant.has_progressed
            and _gives(variant, tenant, self._num_held, lead)
            and not self._is_overdrawn(variant, tenant)
            and (self.may_recompute or _is_own(variant, tenant))
        )
        victim = min(
            candidates,
            key=lambda variant: (
                variant.state is SlotState.OPEN,
                variant.num_computed_tokens,
                variant.opened_at,
            ),
            default=None,
        )
        if victim is None:
            return False
        self._close(victim)
        if not _is_own(victim, tenant):
            self._recompute_budget -= victim.num_computed_tokens
        elif victim.num_computed_tokens:
            self._own_budgets[tenant] = -float(victim.num_computed_tokens)
        for sequence in list(victim.running.values()):
            preempt(sequence)
        self._release_unused(victim, now)
        return True

    def _evictable(self, now: float) -> Iterator[ScheduledVariant]:
        """Held variants that are not pinned and had their slots for long enough, with a sequence admitted."""
        held = chain(self._in_state[SlotState.CLOSED].values(), self._in_state[SlotState.OPEN].values())
        for variant in held:
            long_enough = now - variant.opened_at >= self._constants.min_resident_s
            if long_enough and variant.was_used and not self._residency.is_pinned(variant.version):
                yield variant

    def _add(self, version: str, now: float) -> ScheduledVariant:
        """Add a variant that had no sequences.

        While others wait for a slot it waits behind them even if it is resident. Otherwise a variant with short
        sequences would never be idle when a slot is looked for.
        """
        others_wait = self._num_waiting > 0
        variant = self._variants[version] = ScheduledVariant(version, SlotState.WAITING, now)
        self._in_state[SlotState.WAITING][version] = variant
        if self._residency.is_loading(version):
            self._move(variant, SlotState.LOADING)
        elif self._residency.is_resident(version) and not others_wait:
            self._open(variant, now)
        else:
            self._maybe_resident.append(variant)
        return variant

    def _open(self, variant: ScheduledVariant, now: float) -> None:
        """Hold a resident variant and let its sequences be admitted."""
        self._forget(variant.version)
        self._residency.acquire(variant.version)
        self._move(variant, SlotState.OPEN)
        variant.opened_at, variant.was_used = now, False
        for queue in variant.queues:
            self._queue.open(queue)

    def _close(self, variant: ScheduledVariant) -> None:
        """Admit no more sequences of an open variant."""
        self._move(variant, SlotState.CLOSED)
        for queue in variant.queues:
            queue.is_open = False

    def _become_waiting(self, variant: ScheduledVariant, now: float) -> None:
        """Let a variant wait for a slot, behind those that wait already."""
        self._move(variant, SlotState.WAITING)
        variant.waiting_since = now
        for queue in variant.queues:
            self._await_slot(queue, variant)

    def _count_tenant(self, tenant: str, variant: ScheduledVariant, change: int) -> None:
        """Count a sequence of a tenant to a variant, or uncount it."""
        before = variant.tenants[tenant]
        variant.tenants[tenant] = before + change
        variant.last_tenant = tenant
        if not variant.tenants[tenant]:
            del variant.tenants[tenant]
        if not (before and variant.tenants[tenant]) and not variant.state.is_waiting:
            self._count_held([tenant], change)

    def _count_held(self, tenants: Iterable[str], change: int) -> None:
        """Count a slot that tenants have sequences for, or uncount it."""
        for tenant in tenants:
            self._num_held[tenant] += change
            if not self._num_held[tenant]:
                del self._num_held[tenant]

    def _await_slot(self, queue: VariantQueue, variant: ScheduledVariant) -> None:
        self._waiting_by_tenant.add(queue.tenant.name, variant)
        if variant.state is SlotState.OVERDUE:
            self._overdue_by_tenant.add(queue.tenant.name, variant)

    def _stop_waiting(self, sequence: Sequence, variant: ScheduledVariant) -> None:
        """Uncount a waiting sequence that has left its queue."""
        variant.num_waiting -= 1
        queue = sequence.queue
        if not queue.waiting:
            del variant.queues[queue]
            self._remove_waiting(queue, variant)

    def _remove_waiting(self, queue: VariantQueue, variant: ScheduledVariant) -> None:
        self._waiting_by_tenant.remove(queue.tenant.name, variant.version)
        self._overdue_by_tenant.remove(queue.tenant.name, variant.version)

    def _release_unused(self, variant: ScheduledVariant, now: float) -> None:
        """Drop a variant without sequences, and free the slot of a closed one without running sequences."""
        if not variant.num_sequences:
            if variant.was_used and variant.state.is_held:
                kept_until = now + self._constants.keep_idle_s
                self._recent[variant.version] = RecentUse(variant.last_tenant, kept_until)
                self._count_held([variant.last_tenant], 1)
            self._move(variant, None)
        elif variant.state is SlotState.CLOSED and not variant.running:
            self._become_waiting(variant, now)
            self._maybe_resident.append(variant)

    def _move(self, variant: ScheduledVariant, state: SlotState | None) -> None:
        """Put a variant at the end of another state's collection; None drops it."""
        version, old = variant.version, variant.state
        del self._in_state[old][version]
        if state is None:
            del self._variants[version]
        else:
            self._in_state[state][version] = variant
            variant.state = state
        was_waiting, is_waiting = old.is_waiting, state is None or state.is_waiting
        if was_waiting and (state is None or not is_waiting):
            for queue in variant.queues:
                self._remove_waiting(queue, variant)
        if was_waiting != is_waiting:
            self._count_held(variant.tenants, -1 if is_waiting else 1)
        if old.is_held and (state is None or not state.is_held):
            self._residency.release(version)


def _is_own(victim: ScheduledVariant, tenant: str) -> bool:
    """Return whether a tenant alone uses a variant."""
    return victim.tenants.keys() == {tenant}


def _gives(victim: ScheduledVariant, tenant: str, num_held: Mapping[str, int], lead: int = 1) -> bool:
    """Return whether a variant may lose its slot to a tenant: its own, or one of tenants that hold `lead` more each."""
    own = num_held.get(tenant, 0)
    return all(other == tenant or num_held[other] >= own + lead for other in victim.tenants)


class SlotState(Enum):
    """The state of a variant that has sequences."""

    # Waiting for a slot; it may still be resident, since a slot keeps its delta until another needs it.
    WAITING = auto()
    OVERDUE = auto()  # has waited for `cold_wait_s`
    LOADING = auto()
    OPEN = auto()  # resident and held; its sequences may be admitted
    CLOSED = auto()  # resident and held until its running sequences have ended

    @property
    def is_waiting(self) -> bool:
        return self in (SlotState.WAITING, SlotState.OVERDUE)

    @property
    def is_held(self) -> bool:
        return self in (SlotState.OPEN, SlotState.CLOSED)


@dataclass(slots=True, eq=False)
class ScheduledVariant:
    """A variant that has waiting or running sequences, and its state on the way to a slot."""

    version: str
    state: SlotState
    waiting_since: float  # when it began to wait for a slot
    opened_at: float = 0.0
    was_used: bool = False  # one of its sequences was admitted since it was opened
    num_waiting: int = 0  # sequences
    running: dict[int, Sequence] = field(default_factory=dict)  # by arrival
    queues: dict[VariantQueue, None] = field(default_factory=dict)  # those with waiting sequences
    tenants: Counter[str] = field(default_factory=Counter)  # of the sequences
    last_tenant: str = ""  # of the sequence that came or ended last

    @property
    def num_sequences(self) -> int:
        return self.num_waiting + len(self.running)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that its running sequences would compute again."""
        return sum(sequence.num_computed_tokens for sequence in self.running.values())

    @property
    def has_progressed(self) -> bool:
        """True if each of its running sequences has."""
        return all(sequence.has_progressed for sequence in self.running.values())


@dataclass(frozen=True, slots=True)
class RecentUse:
    """The use of a variant that has no sequences any more: whose it was, and until when its slot counts as theirs."""

    tenant: str
    kept_until: float


class SlotQueue:
    """Variants that wait for a slot; the next one goes to the oldest of the tenant with the fewest loads.

    Args:
        may_load: whether one more load of a tenant may begin; asked again after `look_again`.
    """

    def __init__(self, may_load: Callable[[str], bool]) -> None:
        self._tenants: LeastServed[str, TenantLoads] = LeastServed(TenantLoads)
        self._may_load = may_load
        self._aside: list[TenantLoads] = []

    def add(self, tenant: str, variant: ScheduledVariant) -> None:
        loads = self._tenants.get(tenant)
        loads.variants[variant.version] = variant
        if len(loads.variants) == 1:
            self._tenants.activate(loads)

    def remove(self, tenant: str, version: str) -> None:
        self._tenants.get(tenant).variants.pop(version, None)

    def first(self) -> TenantLoads | None:
        """Return the tenant that had the fewest loads and may begin one; at least one variant of it waits."""
        while (loads := self._tenants.first()) is not None and not self._may_load(loads.tenant):
            self.set_aside(loads)
        return loads

    def set_aside(self, loads: TenantLoads) -> None:
        """Leave a tenant out until `look_again`."""
        loads.may_load = False
        self._aside.append(loads)

    def look_again(self) -> None:
        """Take in the tenants that were set aside."""
        aside, self._aside = self._aside, []
        for loads in aside:
            loads.may_load = True
            # With their own counters, because they have waited.
            if loads.is_ready:
                self._tenants.enter(loads)


@dataclass(slots=True, eq=False)
class TenantLoads:
    """The variants without a slot that one tenant waits for, the longest waiting first."""

    tenant: str
    counter: float = 0.0  # loads so far
    may_load: bool = True  # False while it is set aside
    variants: dict[str, ScheduledVariant] = field(default_factory=dict)  # by version

    @property
    def is_ready(self) -> bool:
        return self.may_load and bool(self.variants)

    @property
    def is_idle(self) -> bool:
        return not self.variants

    @property
    def oldest(self) -> ScheduledVariant:
        return next(iter(self.variants.values()))
