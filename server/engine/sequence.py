"""One sequence of a request: its tokens, its KV cache pages, the scheduler's record of it, and the queue for it."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from server.engine.scheduling.least_served import LeastServed
from server.protocol.request import Request


@dataclass(slots=True)
class PageTable:
    """The KV cache pages of one sequence, in order, and the prefix cache keys of those that are full."""

    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
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
        # Until the prompt's log-probabilities are complete, the logits of all its tokens are computed.
        self.needs_prompt_logits = request.sampling_params.prompt_logprobs is not None and index == 0
        self.arrival = -1  # its place among all sequences ever added to the scheduler; -1 before
        self.waiting_since = 0.0
        self.num_tokens_at_admission = 0
        self.num_charged_tokens = 0  # prompt tokens charged so far; recomputing them costs nothing

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
    counter: float = 0.0  # tokens served
    num_waiting: int = 0
    num_running: int = 0
    variants: LeastServed[str | None, VariantQueue] = field(init=False)

    def __post_init__(self) -> None:
        self.variants = LeastServed(lambda version: VariantQueue(self, version, is_open=version is None))

    @property
    def is_ready(self) -> bool:
        return self.variants.first() is not None

    @property
    def is_idle(self) -> bool:
        return not self.num_waiting and not self.num_running


@dataclass(slots=True, eq=False)
class VariantQueue:
    """The waiting sequences of one tenant for one variant, admitted only while it is open."""

    tenant: TenantQueue
    version: str | None  # None is the base
    is_open: bool
    counter: float = 0.0  # tokens served
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

    def charge(self, num_tokens: float) -> None:
        """Count tokens served to this queue and its tenant."""
        self.counter += num_tokens
        self.tenant.counter += num_tokens

    def count_running(self, change: int) -> None:
        """Count a sequence of this queue that starts (1) or stops (-1) running."""
        self.num_running += change
        self.tenant.num_running += change
