"""Shares of tenants among each other, and of one tenant's variants, in simulated time."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest

from server.engine.scheduler import StepPlan
from server.engine.sequence import FairQueue, LeastServed, Sequence, TenantQueue, VariantQueue
from tests.server.helpers.simulation import SimSequence, Simulation, poisson, simulate, step_limits

Key = Callable[[Sequence], str]
FEW_SEQUENCES = step_limits(max_num_seqs=8, max_batch_tokens=128)


def backlog(
    tenant: str, num: int, num_prompt: int, num_output: int, digest: str | None = None, at: float = 0.0
) -> list[SimSequence]:
    return [
        SimSequence(f"{tenant}-{digest}-{i}", tenant, digest, num_prompt, num_output, at) for i in range(num)
    ]


def seconds_until(
    sim: Simulation, sequences: list[SimSequence], until_s: float, key: Key
) -> dict[str, float]:
    """Count the seconds of steps that each was served in that time; a generated token takes two parts, others one."""
    got: defaultdict[str, float] = defaultdict(float)

    def count(plan: StepPlan, now: float) -> None:
        parts = {s: float(n if _is_prompt(s, n) else 2) for s, n in plan.batch.items()}
        for sequence, part in parts.items():
            got[key(sequence)] += sim.costs.of(plan) * part / sum(parts.values())

    sim.on_step = count
    simulate(sim, sequences, until_s=until_s)
    return got


def _is_prompt(sequence: Sequence, num_tokens: int) -> bool:
    """True if the step that has just been computed took tokens of the prompt."""
    return num_tokens > 1 and sequence.num_tokens - sequence.num_prompt_tokens <= 1


def by_tenant(sequence: Sequence) -> str:
    return sequence.tenant


def test_tenants_get_the_same_whatever_the_shape_and_number_of_their_requests() -> None:
    sequences = (
        backlog("many", 1000, 20, 20) + backlog("prompts", 300, 200, 5) + backlog("talks", 300, 10, 150)
    )
    got = seconds_until(Simulation(FEW_SEQUENCES), sequences, 20.0, by_tenant)
    assert max(got.values()) < 1.15 * min(got.values())


def test_a_tenant_that_asks_for_less_than_its_share_gets_all_of_it() -> None:
    rng = random.Random(0)
    flood = backlog("flood", 1500, 20, 20)
    light = [SimSequence(f"l{i}", "light", None, 20, 20, t) for i, t in enumerate(poisson(rng, 2.0, 20.0))]
    simulate(Simulation(FEW_SEQUENCES), flood + light)
    assert max(sequence.first_token_s for sequence in light) < 0.5
    assert max(sequence.first_token_s for sequence in flood) > 20


def test_one_request_does_not_wait_behind_another_tenants_thousand() -> None:
    one = SimSequence("one", "light", None, 50, 10, 1.0)
    simulate(Simulation(FEW_SEQUENCES), [*backlog("flood", 1000, 50, 50), one])
    assert one.first_token_s < 0.6


def test_variants_of_one_tenant_get_the_same() -> None:
    sequences = backlog("a", 600, 20, 20, "v1") + backlog("a", 200, 100, 10, "v2") + backlog("a", 300, 20, 20)
    limits = step_limits(max_num_seqs=8, max_batch_tokens=128, delta_cost_tokens=0.0)
    got = seconds_until(Simulation(limits), sequences, 12.0, lambda sequence: sequence.digest or "base")
    assert max(got.values()) < 1.2 * min(got.values())


def test_a_tenant_with_many_variants_gets_no_more_than_one_with_one() -> None:
    sequences = backlog("single", 600, 20, 20, "s") + [
        sequence for index in range(7) for sequence in backlog("many", 100, 20, 20, f"v{index}")
    ]
    got = seconds_until(Simulation(FEW_SEQUENCES), sequences, 12.0, by_tenant)
    assert got["many"] < 1.05 * got["single"]


def test_reading_many_deltas_is_charged() -> None:
    limits = step_limits(max_num_seqs=16, max_batch_tokens=128, delta_cost_tokens=8.0)
    sequences = backlog("single", 900, 20, 20, "s") + [
        sequence for index in range(7) for sequence in backlog("many", 100, 20, 20, f"v{index}")
    ]
    got = seconds_until(Simulation(limits), sequences, 12.0, by_tenant)
    assert got["many"] < 0.7 * got["single"]


def test_idle_time_is_not_saved_up() -> None:
    sequences = (
        backlog("steady", 1000, 20, 20) + backlog("returns", 1, 20, 20) + backlog("late", 500, 20, 20, at=8.0)
    )
    sequences += backlog("returns", 500, 20, 20, digest=None, at=8.0)[1:]
    got: Counter[str] = Counter()

    def count(plan: StepPlan, now: float) -> None:
        if now > 8.0:
            got.update(sequence.tenant for sequence in plan.batch)

    sim = Simulation(FEW_SEQUENCES, on_step=count)
    simulate(sim, sequences, until_s=14.0)
    assert max(got.values()) < 1.2 * min(got.values())


def test_a_tenant_that_runs_alone_does_not_pay_for_it_later() -> None:
    early = [SimSequence(f"e{i}", "early", None, 20, 20, i * 0.1) for i in range(200)]
    late = backlog("late", 500, 20, 20, at=10.0)
    simulate(Simulation(FEW_SEQUENCES), early + late)
    assert max(sequence.first_token_s for sequence in early) < 0.5


def test_a_long_sequence_is_preempted_for_a_tenant_that_has_none_running() -> None:
    limits = step_limits(max_num_seqs=8, max_batch_tokens=128, preempt_wait_s=2.0)
    one = SimSequence("one", "light", None, 50, 10, 1.0)
    flood = backlog("flood", 20, 50, 2000)
    simulate(Simulation(limits), [*flood, one])
    assert 2.0 <= one.first_token_s < 2.2
    assert sum(sequence.num_preempted for sequence in flood) == 1


def test_a_tenants_only_running_sequence_is_not_preempted() -> None:
    limits = step_limits(max_num_seqs=4, max_batch_tokens=64, preempt_wait_s=0.5)
    sequences = [SimSequence(f"j{i}", f"t{i}", None, 20, 500, 0.0) for i in range(12)]
    simulate(Simulation(limits), sequences)
    assert sum(sequence.num_preempted for sequence in sequences) == 0


def test_variants_of_one_tenant_share_the_sequences_that_may_run() -> None:
    limits = step_limits(max_num_seqs=8, max_batch_tokens=128, preempt_wait_s=2.0)
    one = SimSequence("one", "a", "quiet", 50, 10, 1.0)
    simulate(Simulation(limits), [*backlog("a", 20, 50, 2000, "loud"), one])
    assert 2.0 <= one.first_token_s < 2.3


def test_no_tenant_is_first_twice_in_one_step() -> None:
    sim = Simulation(step_limits(max_num_seqs=6, max_batch_tokens=128))
    scheduler = sim.scheduler()
    for tenant in ("a", "b", "c"):
        for sequence in backlog(tenant, 5, 10, 10):
            scheduler.add(sequence, 0.0)
    assert Counter(sequence.tenant for sequence in scheduler.plan(0.0).batch) == {"a": 2, "b": 2, "c": 2}


def test_counters_of_idle_tenants_are_dropped_when_they_are_not_above_the_floor() -> None:
    members: LeastServed[int, TenantQueue] = LeastServed(lambda number: TenantQueue(str(number)))
    steady = members.get(-1)
    queue = steady.variants.get(None)
    steady.num_waiting = 1
    queue.waiting[0] = SimSequence("one", "-1", None, 1, 1, 0.0)
    steady.variants.activate(queue)
    members.activate(steady)
    for number in range(10_000):
        members.get(number).counter = float(number)
        steady.counter = float(number)
        members.first()
    assert len(members._members) < 1000
    assert members.get(-1) is steady


def test_sequences_that_leave_while_they_wait_do_not_pile_up() -> None:
    sim = Simulation()
    scheduler = sim.scheduler()
    scheduler.add(SimSequence("stays", "a", "cold", 10, 10, 0.0), 0.0)
    for sequence in backlog("a", 5000, 10, 10, "cold"):
        scheduler.add(sequence, 0.0)
        scheduler.remove(sequence)
    queue = scheduler._queue.variant_queue("a", "cold")
    assert len(queue.waiting) == 1
    assert len(queue.heap) < 50


@pytest.mark.parametrize("seed", range(3))
def test_the_first_is_always_of_the_tenant_and_the_variant_that_were_served_least(seed: int) -> None:
    rng = random.Random(seed)
    fair_queue = FairQueue()
    queues: dict[str, VariantQueue] = {}
    for arrival in range(400):
        tenant = f"t{rng.randrange(9)}"
        sequence = SimSequence(str(arrival), tenant, None, 1, 1, 0.0)
        sequence.arrival = arrival
        sequence.queue = queues[tenant] = fair_queue.variant_queue(tenant, None)
        fair_queue.push(sequence)
        queues[rng.choice(sorted(queues))].charge(rng.randrange(50))
        if rng.random() < 0.7 and (first := fair_queue.first()) is not None:
            ready = [queue.tenant.counter for queue in queues.values() if queue.is_ready]
            assert queues[first.tenant].tenant.counter == min(ready)
            fair_queue.remove(first)


def test_a_tenant_gets_its_share_of_rows_beside_long_answers() -> None:
    limits = step_limits(max_num_seqs=8, max_batch_tokens=128, preempt_wait_s=0.5)
    long = backlog("greedy", 16, 50, 2000)
    burst = [SimSequence(f"chat{i}", "good", None, 20, 200, 1.0) for i in range(4)]
    simulate(Simulation(limits), [*long, *burst])
    # With one row, the second would wait for the answer to the first, and so on.
    assert sorted(chat.first_token_s for chat in burst)[1] < 0.5 + 0.2
    assert max(chat.first_token_s for chat in burst) < 3
    assert sum(sequence.num_preempted for sequence in long) <= 4


def test_rows_are_shared_within_the_budget_of_recomputed_tokens() -> None:
    def num_preempted(recompute_share: float) -> int:
        limits = step_limits(8, 128, preempt_wait_s=0.1, recompute_share=recompute_share)
        long = backlog("greedy", 16, 500, 500)
        # One is always there, so that none is preempted for a tenant without a row.
        chats = [SimSequence("steady", "good", None, 20, 2000, 0.0)]
        chats += [SimSequence(f"chat{i}", "good", None, 20, 5, 1.0 + 0.3 * (i // 3)) for i in range(60)]
        simulate(Simulation(limits), [*long, *chats])
        return sum(sequence.num_preempted for sequence in long)

    assert 0 < num_preempted(0.001) < num_preempted(1.0) / 2


def test_tenants_at_their_shares_of_rows_do_not_preempt_each_other() -> None:
    limits = step_limits(max_num_seqs=8, max_batch_tokens=128, preempt_wait_s=0.1)
    every = [sequence for tenant in "abc" for sequence in backlog(tenant, 8, 10, 400)]
    simulate(Simulation(limits), every)
    # No tenant has fewer than two rows for long, and the other two rows go to those who came first.
    assert sum(sequence.num_preempted for sequence in every) <= 8


def test_a_queue_counts_the_tenants_that_have_sequences() -> None:
    sim = Simulation(FEW_SEQUENCES)
    scheduler = sim.scheduler()
    sequences = [*backlog("a", 2, 10, 10), *backlog("b", 1, 10, 10)]
    for sequence in sequences:
        scheduler.add(sequence, 0.0)
    assert sequences[0].queue.tenant is sequences[1].queue.tenant
    counted = [scheduler._queue.num_tenants]
    scheduler.plan(0.0)
    for sequence in sequences:
        scheduler.remove(sequence)
        counted.append(scheduler._queue.num_tenants)
    assert counted == [2, 2, 1, 0]
