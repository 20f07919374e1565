"""Which sequences vLLM has, and what is known of its KV cache.

vLLM computes the prompts that it has in order of arrival, and knows no tenants. So it gets few of them at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from server.deltas.residency import Residency
from server.engine.kv_cache_manager import KVCacheManager
from server.engine.scheduler import MAX_SLOW_SAMPLING, Scheduler, StepCost, StepPlan, is_slow
from server.engine.sequence import Sequence, TenantQueue

# vLLM's on the CPU; those on CUDA are smaller.
PAGE_TOKENS = 128
# Share of the KV cache in use from which a sequence that waits in vLLM waits for pages.
FULL = 0.9
# Steps whose prompt tokens vLLM has.
NUM_STEPS = 2


def longest_chunk(max_batch_tokens: int) -> int:
    """Return how many tokens of one prompt a step of vLLM computes."""
    return max(1, max_batch_tokens // 2)


class VllmPages(KVCacheManager):
    """Stands for the KV cache, which is vLLM's: any sequence has pages. The figures are those of vLLM's last step."""

    def __init__(self) -> None:
        super().__init__(2, PAGE_TOKENS)
        self.longest = 0  # tokens of a sequence
        self._usage = 0.0
        self._prefix_counts = 0, 0
        self.num_preempted = 0  # sequences that vLLM has preempted since `take_preempted`
        self.is_short = False  # vLLM has sequences that wait for pages

    @property
    def max_tokens(self) -> int:
        return self.longest

    @property
    def usage(self) -> float:
        return self._usage

    def take_prefix_counts(self) -> tuple[int, int]:
        counts, self._prefix_counts = self._prefix_counts, (0, 0)
        return counts

    def take_preempted(self) -> int:
        """Return how many sequences vLLM has preempted since the last call."""
        number, self.num_preempted = self.num_preempted, 0
        return number

    def cache_full_pages(self, sequence: Sequence) -> None:
        pass

    def emptied(self) -> None:
        """Note that vLLM has no sequences, which it does not tell by itself when the last one is aborted."""
        self._usage, self.is_short = 0.0, False

    def record(self, scheduler: Any, iteration: Any) -> None:
        """Take the figures of a step: vLLM's SchedulerStats and IterationStats, each None if there are none."""
        if scheduler is not None:
            found, before = scheduler.prefix_cache_stats, self._prefix_counts
            self._usage = scheduler.kv_cache_usage
            self._prefix_counts = before[0] + found.queries, before[1] + found.hits
            # With few pages, a part of them may be too small for the one that waits.
            is_stuck = self._usage > FULL or scheduler.num_running_reqs == 0
            self.is_short = scheduler.num_waiting_reqs > 0 and is_stuck
        if iteration is not None:
            self.num_preempted += iteration.num_preempted_reqs


class Admission(Scheduler):
    """Chooses the sequences that vLLM has: in fair order, each when its delta is in a slot.

    vLLM has prompts for `NUM_STEPS` steps in all, and one long prompt while tenants compete: it gets at most half of a
    step, so that the prompts of others advance beside it.

    Args:
        max_batch_tokens: of a step of vLLM.
    """

    def __init__(
        self, pages: VllmPages, residency: Residency, max_num_seqs: int, max_batch_tokens: int
    ) -> None:
        super().__init__(pages, residency, max_num_seqs, max(max_batch_tokens, max_num_seqs + 1))
        self._max_chunk = longest_chunk(max_batch_tokens)
        self._max_prompt_tokens = NUM_STEPS * max_batch_tokens
        self._stopped: list[Sequence] = []

    def plan(self, now: float, on_admit: Callable[[Sequence], None] = lambda sequence: None) -> StepPlan:
        plan = StepPlan()
        self._now = now
        self._slot_policy.update(now, lambda sequence: self._preempt(sequence, plan))
        passed: list[TenantQueue] = []
        for extra in self._too_slow():
            self._preempt(extra, plan)
        while (first := self._queue.first()) is not None:
            if len(self._running) >= self._max_num_seqs and not self._preempt_for(first, plan):
                break
            prompts = self._prompts
            is_alone = not passed and all(prompt.tenant == first.tenant for prompt in prompts)
            long = [prompt for prompt in prompts if self._is_long(prompt)]
            if not is_alone:
                for prompt in long[1:]:
                    self._preempt(prompt, plan)
            is_blocked = not is_alone and bool(long) and self._is_long(first)
            is_blocked |= first in self._too_slow(first)
            if not is_blocked and self._make_room(first, plan):
                self._start(first)
                on_admit(first)
            elif is_blocked or any(prompt.tenant == first.tenant for prompt in prompts):
                self._queue.pause(first.queue.tenant)
                passed.append(first.queue.tenant)
            else:
                # The next one of a tenant without a prompt: it waits for room, and no other is admitted before it.
                break
        for tenant in passed:
            self._queue.resume(tenant)
        for sequence in self.running:
            if not sequence.awaits_mask:
                plan.add(sequence, 1)
        return plan

    @property
    def _prompts(self) -> list[Sequence]:
        """The running sequences whose first token here has not come, in order of arrival."""
        return [sequence for sequence in self.running if sequence.num_missing_tokens > 1]

    def _is_long(self, sequence: Sequence) -> bool:
        return sequence.num_missing_tokens > self._max_chunk

    def _too_slow(self, *more: Sequence) -> list[Sequence]:
        """Return the slow sequences, running ones and `more`, that a step has no time to sample beside other tenants'.

        vLLM samples all that it has in each step. The first of each tenant goes before the second ones, so that none
        stops for a tenant that has as many.
        """
        if self._queue.num_tenants < 2:
            return []
        places, order = Counter[str](), list[tuple[int, int, Sequence]]()
        for sequence in sorted((*self.running, *more), key=lambda each: each.arrival):
            if is_slow(sequence):
                order.append((places[sequence.tenant], sequence.arrival, sequence))
                places[sequence.tenant] += 1
        total, beyond = 0.0, list[Sequence]()
        for *_, sequence in sorted(order, key=lambda one: one[:2]):
            total += sequence.sampling_cost
            if total > max(MAX_SLOW_SAMPLING, sequence.sampling_cost):
                beyond.append(sequence)
        return beyond

    def _make_room(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Return whether vLLM has room for a prompt. What is preempted for it stays in vLLM's prefix cache."""
        while not self._fits(sequence):
            extra = self._extra_prompts(sequence)
            if not extra:
                return False
            self._preempt(extra[-1], plan)
        return True

    def _fits(self, sequence: Sequence) -> bool:
        prompts = self._prompts
        num_tokens = sum(min(prompt.num_missing_tokens, self._max_chunk) for prompt in [*prompts, sequence])
        return not prompts or num_tokens <= self._max_prompt_tokens

    def _extra_prompts(self, sequence: Sequence) -> list[Sequence]:
        """Return all prompts but the first of each tenant; none if the tenant of `sequence` has one."""
        prompts = self._prompts
        if any(prompt.tenant == sequence.tenant for prompt in prompts):
            return []
        firsts = {prompt.tenant: prompt for prompt in reversed(prompts)}
        return [prompt for prompt in prompts if firsts[prompt.tenant] is not prompt]

    def preempt_one_that_awaits_its_mask(self) -> Sequence | None:
        """Preempt one of the sequences that hold pages without using them, of the tenant that was served most."""
        waiting = [sequence for sequence in self._running.values() if sequence.awaits_mask]
        if not waiting:
            return None
        victim = max(waiting, key=lambda sequence: (sequence.queue.tenant.counter, sequence.num_tokens))
        self._preempt(victim, StepPlan())
        return victim

    def add_costs(self, plan: StepPlan, num_generated: Counter[Sequence]) -> None:
        """Note what a step of vLLM gave each sequence, and its share of reading its delta.

        How much of a prompt it computed is not known: a prompt was charged by estimate when vLLM got it.
        """
        num_sharing = Counter(sequence.version for sequence in plan.batch)
        for sequence in plan.batch:
            cost = plan.costs[sequence] = StepCost(
                self._constants.generated_token_cost * num_generated[sequence]
            )
            if not num_generated[sequence] and sequence.num_missing_tokens > 1:
                num_tokens = min(sequence.num_missing_tokens, self._max_chunk)
                cost.total = cost.free = self._prompt_token_cost(sequence) * num_tokens
            if sequence.version is not None:
                cost.total += self._constants.delta_cost_tokens / num_sharing[sequence.version]

    def take_stopped(self) -> list[Sequence]:
        """Return the sequences that ran and run no more since the last call."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def _start(self, sequence: Sequence) -> None:
        super()._start(sequence)
        num_tokens = sequence.num_prompt_tokens - sequence.num_charged_tokens
        sequence.queue.charge(self._prompt_token_cost(sequence) * num_tokens * self._step_seconds.per_cost)
        sequence.num_charged_tokens = sequence.num_prompt_tokens

    def _stop(self, sequence: Sequence) -> None:
        super()._stop(sequence)
        self._stopped.append(sequence)
