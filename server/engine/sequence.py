"""One sequence of a request, and the fair queues in which it waits.

The sequences of one tenant for one variant wait in a `VariantQueue`; the variant queues of a tenant are its
`TenantQueue`. Both count the seconds of the engine's thread that they were served (as the virtual token counters of
Sheng et al., "Fairness in Serving Large Language Models", 2024, count tokens). A queue that becomes ready is raised to
the smallest counter of the ready queues, so idle time is not saved up (the start tag of start-time fair queueing); one
that had the engine for itself stands at most `MAX_DEBT_S` behind the others.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from server.protocol.request import Request

# A sweep for idle members runs when there are more members than twice those that the last sweep kept, plus this number.
SWEEP_SLACK = 64
# Seconds that a queue may have been served more than those that become ready now: what a tenant took while nobody else
# waited, or in a step that a paused machine made long, does not keep it waiting for longer.
MAX_DEBT_S = 10.0


class Member(Protocol):
    """A member of `LeastServed`."""

    counter: float  # served so far; decreases in `activate` alone

    @property
    def is_ready(self) -> bool: ...  # can be served now
    @property
    def is_idle(self) -> bool: ...  # has nothing waiting or running


K = TypeVar("K", bound=Hashable)
M = TypeVar("M", bound=Member)


class LeastServed(Generic[K, M]):
    """Members by key, and the ready member with the smallest counter. All operations take amortized O(log members).

    The heap is corrected lazily: a member whose counter grew or that is no longer ready is noticed at the top.

    Args:
        make: makes the member of a key.
        max_debt: how far above the floor a member's counter may be when it is activated.
    """

    def __init__(self, make: Callable[[K], M], max_debt: float = math.inf) -> None:
        self._make = make
        self._max_debt = max_debt
        self._members: dict[K, M] = {}
        self._heap: list[tuple[float, int, M]] = []
        # By id of a member in the heap: the counter of its entry. Its other entries count no more.
        self._entered: dict[int, float] = {}
        self._ticks = itertools.count()
        # The smallest counter of the ready members when the heap was last looked at.
        self._floor = 0.0
        self._sweep_at = SWEEP_SLACK

    def get(self, key: K) -> M:
        """Return the member with that key, made on first use."""
        found = self._members.get(key)
        if found is None:
            if len(self._members) >= self._sweep_at:
                self._sweep()
            found = self._members[key] = self._make(key)
        return found

    def activate(self, member: M) -> None:
        """Enter a member that has become ready, raised to the floor and lowered to `max_debt` above it."""
        self.first()
        member.counter = min(max(member.counter, self._floor), self._floor + self._max_debt)
        self.enter(member)

    def enter(self, member: M) -> None:
        """Enter a member with the counter that it has; no effect on one that is there with one no higher."""
        if self._entered.get(id(member), math.inf) > member.counter:
            self._push(member)

    def first(self) -> M | None:
        """Return the ready member with the smallest counter; among equals, the one in the heap for longest."""
        while self._heap:
            counter, _, member = self._heap[0]
            if self._entered.get(id(member)) != counter:
                heapq.heappop(self._heap)
                continue
            self._floor = max(self._floor, counter)
            if not member.is_ready:
                heapq.heappop(self._heap)
                del self._entered[id(member)]
            elif member.counter != counter:
                heapq.heappop(self._heap)
                self._push(member)
            else:
                return member
        return None

    def _push(self, member: M) -> None:
        self._entered[id(member)] = member.counter
        heapq.heappush(self._heap, (member.counter, next(self._ticks), member))

    def _sweep(self) -> None:
        """Drop idle members at or below the floor; returning members are raised to it."""
        kept = {k: m for k, m in self._members.items() if not m.is_idle or m.counter > self._floor}
        self._members = kept
        self._sweep_at = 2 * len(kept) + SWEEP_SLACK


@dataclass(slots=True)
class PageTable:
    """The KV cache pages of one sequence, in order."""

    pages: list[int] = field(default_factory=list)
    num_hashed: int = 0  # full pages that came from the prefix cache or were offered to it
    is_counted: bool = True  # in the hits and queries of the prefix cache


class Sequence:
    """The tokens of one sequence and the scheduler's record of it.

    The sequences of a request share its prompt; each has a list of the tokens that it generated.

    Only the engine thread uses it. The KV cache owns `page_table` and resets `num_computed_tokens`; the scheduler owns
    `queue` and all below it.
    """

    # Counts the sequences of its tenant and variant, and has those that wait; set by `Scheduler.add`.
    queue: VariantQueue

    def __init__(self, request: Request, index: int) -> None:
        self.request_id = request.id
        self.index = index  # among the request's `n` sequences
        self.id = f"{request.id}/{index}"
        self.tenant = request.tenant
        self.digest = request.digest
        self.version = request.version
        self.prompt_ids = request.prompt_ids
        self.generated_ids: list[int] = []
        self.num_prompt_tokens = len(request.prompt_ids)
        self.num_computed_tokens = 0
        self.page_table = PageTable()
        self.page_hashes = request.page_hashes
        # Those of the pages that end in generated tokens. Like the prompt's they are kept while the sequence waits.
        self.own_hashes = bytearray()
        # Until the prompt's log-probabilities are complete, the logits of all its tokens are computed.
        self.needs_prompt_logits = request.sampling_params.prompt_logprobs is not None and index == 0
        self.arrival = -1  # its place among all sequences ever added to the scheduler; -1 before
        self.waiting_since = 0.0
        self.num_tokens_at_admission, self.running_since = 0, 0.0
        self.num_charged_tokens = 0  # prompt tokens charged so far; recomputing them costs nothing
        self.sampling_cost = 1.0  # what a token takes about to sample, in argmaxes
        self.slow_turn = 0  # when its turn was among those with a great one
        self.turn = 0  # when its turn was among its tenant's, in a step that others decode in
        self.too_few_pages = -1  # available when it last found too few to be admitted; -1 before

    def resume(self, token_ids: Iterable[int]) -> None:
        """Take tokens that an engine before this one has generated and charged."""
        self.generated_ids.extend(token_ids)
        if self.generated_ids:
            self.num_charged_tokens = self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.generated_ids)

    @property
    def num_generated(self) -> int:
        return len(self.generated_ids)

    @property
    def num_missing_tokens(self) -> int:
        """Number of tokens that the KV cache does not hold; 1 for a sequence that decodes."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def awaits_mask(self) -> bool:
        """True if all tokens are computed and the next one cannot be sampled: no step computes the sequence."""
        return self.num_computed_tokens == self.num_tokens

    @property
    def is_waiting(self) -> bool:
        return self.arrival in self.queue.waiting

    @property
    def has_progressed(self) -> bool:
        """True once it has generated a token since it was admitted; preempting earlier wastes the prefill.

        A sequence that waits for its mask is treated the same, so it may be preempted for one that can run.
        """
        return self.num_tokens > self.num_tokens_at_admission or self.awaits_mask

    @property
    def reuses_prefix(self) -> bool:
        """False when prompt logprobs are requested: a cached prefix would skip those logits."""
        return not self.needs_prompt_logits

    def num_logits(self, num_tokens: int) -> int:
        """Return how many of the next `num_tokens` to be computed, counted from the last, have their logits read."""
        if self.needs_prompt_logits:
            return num_tokens
        return int(self.num_computed_tokens + num_tokens == self.num_tokens)

    def token_ids(self, start: int, end: int) -> list[int]:
        """Return the tokens of positions `start` to `end` - 1. Costs no more than these, whatever the context."""
        num_prompt = self.num_prompt_tokens
        if start >= num_prompt:
            return self.generated_ids[start - num_prompt : end - num_prompt]
        return [*self.prompt_ids[start:end], *self.generated_ids[: max(0, end - num_prompt)]]


@dataclass(slots=True, eq=False)
class TenantQueue:
    """The variant queues of one tenant."""

    name: str
    counter: float = 0.0  # seconds served
    num_waiting: int = 0
    num_running: int = 0
    is_paused: bool = False  # not served now, whatever waits
    variants: LeastServed[str | None, VariantQueue] = field(init=False)

    def __post_init__(self) -> None:
        self.variants = LeastServed(
            lambda version: VariantQueue(self, version, is_open=version is None), MAX_DEBT_S
        )

    @property
    def is_ready(self) -> bool:
        return not self.is_paused and self.variants.first() is not None

    @property
    def is_idle(self) -> bool:
        return not self.num_waiting and not self.num_running


@dataclass(slots=True, eq=False)
class VariantQueue:
    """The waiting sequences of one tenant for one variant, admitted only while it is open."""

    tenant: TenantQueue
    version: str | None  # None is the base
    is_open: bool
    counter: float = 0.0  # seconds served
    owed: float = 0.0  # seconds charged before a step that took less; no more are counted until it is used up
    num_running: int = 0
    waiting: dict[int, Sequence] = field(default_factory=dict)  # by arrival
    heap: list[int] = field(default_factory=list)  # all of `waiting`, and some that no longer wait

    @property
    def is_ready(self) -> bool:
        return self.is_open and bool(self.waiting)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.num_running

    def first(self) -> Sequence:
        """Return the earliest waiting sequence; at least one must wait."""
        while self.heap[0] not in self.waiting:
            heapq.heappop(self.heap)
        return self.waiting[self.heap[0]]

    def charge(self, seconds: float) -> None:
        """Count seconds served to this queue and its tenant; negative ones reduce what is counted next."""
        seconds -= self.owed
        if seconds < 0.0:
            self.owed = -seconds
            return
        self.owed = 0.0
        self.counter += seconds
        self.tenant.counter += seconds


# Entries of a heap whose sequences no longer wait, beyond as many as wait, before they are removed.
HEAP_SLACK = 16


class FairQueue:
    """All waiting sequences, in variant queues."""

    def __init__(self) -> None:
        self._tenants: LeastServed[str, TenantQueue] = LeastServed(TenantQueue, MAX_DEBT_S)
        self._active: set[str] = set()

    @property
    def num_tenants(self) -> int:
        """Number of tenants that have waiting or running sequences."""
        return len(self._active)

    def variant_queue(self, tenant: str, version: str | None) -> VariantQueue:
        """Return the queue of a tenant's sequences for one variant, made on first use."""
        return self._tenants.get(tenant).variants.get(version)

    def charge(self, tenant: str, seconds: float) -> None:
        """Count seconds served to a tenant that no sequence took, as for reading its messages."""
        self._tenants.get(tenant).counter += seconds

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait, ahead of those of its queue that arrived later."""
        queue = sequence.queue
        heapq.heappush(queue.heap, sequence.arrival)
        queue.waiting[sequence.arrival] = sequence
        queue.tenant.num_waiting += 1
        self._active.add(queue.tenant.name)
        if queue.is_open and len(queue.waiting) == 1:
            self._activate(queue)

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence that is admitted or has ended."""
        queue = sequence.queue
        del queue.waiting[sequence.arrival]
        queue.tenant.num_waiting -= 1
        self._drop_idle(queue.tenant)
        if len(queue.heap) > 2 * len(queue.waiting) + HEAP_SLACK:
            queue.heap = sorted(queue.waiting)

    def count_running(self, queue: VariantQueue, change: int) -> None:
        """Count a sequence of a queue that starts (1) or stops (-1) running."""
        queue.num_running += change
        queue.tenant.num_running += change
        self._active.add(queue.tenant.name)
        self._drop_idle(queue.tenant)

    def open(self, queue: VariantQueue) -> None:
        """Let the sequences of a closed queue be admitted."""
        queue.is_open = True
        if queue.waiting:
            self._activate(queue)

    def pause(self, tenant: TenantQueue) -> None:
        """Pass over a tenant until `resume`."""
        tenant.is_paused = True

    def resume(self, tenant: TenantQueue) -> None:
        """Let a tenant have its turn again, by what it was served until then."""
        tenant.is_paused = False
        self._tenants.enter(tenant)

    def first(self) -> Sequence | None:
        """Return the sequence to admit next; it keeps waiting until `remove`."""
        tenant = self._tenants.first()
        queue = None if tenant is None else tenant.variants.first()
        return None if queue is None else queue.first()

    def _drop_idle(self, tenant: TenantQueue) -> None:
        if tenant.is_idle:
            self._active.discard(tenant.name)

    def _activate(self, queue: VariantQueue) -> None:
        queue.tenant.variants.activate(queue)
        self._tenants.activate(queue.tenant)
