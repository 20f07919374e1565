"""Seconds of the engine's thread: how a step's are divided, what bounds a step, and that a debt ends."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from server.engine.sampler import PromptHistory, Sampler, divided
from server.engine.scheduler import MAX_SLOW_SAMPLING, MIN_BOUND_S, Scheduler, StepPlan, StepSeconds
from server.engine.sequence import MAX_DEBT_S
from server.protocol.request import SamplingParams, token_ids_of
from server.protocol.rules import GenerationRules, id_list
from tests.server.helpers.simulation import SimSequence, Simulation, StepLimits, simulate, step_limits


def decoding(scheduler: Scheduler, name: str, num_context: int = 10, **more: str) -> SimSequence:
    """Add a sequence and compute its prompt."""
    made = sequence(name, num_context, **more)
    scheduler.add(made, 0.0)
    while not made.generated_ids:
        plan = scheduler.plan(0.0)
        made.num_computed_tokens += plan.batch[made]
        if made.num_computed_tokens == made.num_tokens:
            made.generated_ids.append(1)
    return made


def sequence(name: str, num_prompt: int, tenant: str = "a", digest: str | None = None) -> SimSequence:
    return SimSequence(name, tenant, digest, num_prompt, 10, 0.0)


def test_the_seconds_of_a_step_are_those_of_its_sequences_by_tokens_context_and_deltas() -> None:
    limits = step_limits(max_batch_tokens=100, max_num_seqs=8, context_tokens=100.0, delta_cost_tokens=8.0)
    sim = Simulation(limits)
    sim.residency.load_s = 0.0
    scheduler = sim.scheduler()
    decoding(scheduler, "short", 0 + 1)
    decoding(scheduler, "long", 75, tenant="b")
    # A generated token counts as two; behind 75 others, which it reads alone, four times as much.
    assert scheduler.charge(scheduler.plan(0.0), 0.1, 1.0) == pytest.approx({"a": 0.2, "b": 0.8}, abs=0.01)
    scheduler.add(sequence("with a delta", 1, tenant="c", digest="v"), 0.1)
    scheduler.plan(0.1)
    sim.end_loads(scheduler, 0.2)
    seconds = scheduler.charge(scheduler.plan(0.2), 0.3, 1.0)
    assert seconds == pytest.approx({"a": 2 / 21, "b": 8 / 21, "c": 11 / 21}, abs=0.01)


def test_no_tenant_pays_for_a_machine_that_was_paused() -> None:
    seconds = StepSeconds()
    for _ in range(100):
        assert seconds.took(0.02, 100.0) == 0.02
    assert seconds.took(3600.0, 100.0) == MIN_BOUND_S
    assert seconds.took(-5.0, 100.0) == 0.0
    assert seconds.per_cost < 0.001


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_clock_that_jumps_while_tokens_are_sampled_or_messages_read_leaves_no_debt_and_no_credit(
    jump_s: float,
) -> None:
    scheduler = Simulation(step_limits(max_batch_tokens=100, max_num_seqs=8)).scheduler()
    first, second = decoding(scheduler, "first"), decoding(scheduler, "second", tenant="b")
    before = first.queue.tenant.counter, second.queue.tenant.counter
    for seconds in [*[0.02] * 100, jump_s]:
        own = scheduler.charge_sampling([(first, 3.0), (second, 1.0)], seconds)
        assert own["a"] == pytest.approx(3 * own["b"])
    assert scheduler.charge_sampling([(first, 0.0)], jump_s) == {"a": 0.0}
    jumped = max(0.0, min(jump_s, MIN_BOUND_S))
    assert first.queue.tenant.counter - before[0] == pytest.approx(0.75 * (2.0 + jumped))
    assert scheduler.charge_tenant("b", jump_s) == jumped
    assert second.queue.tenant.counter - before[1] == pytest.approx(0.25 * (2.0 + jumped) + jumped)


def test_a_step_of_a_slow_machine_counts_whole() -> None:
    seconds = StepSeconds()
    for _ in range(100):
        seconds.took(2.0, 100.0)
    assert seconds.took(15.0, 100.0) == 15.0


def test_a_tenant_that_had_the_engine_for_itself_waits_for_a_bounded_time() -> None:
    alone = [SimSequence(f"long {i}", "owner", None, 10, 5000, 0.0) for i in range(4)]
    flood = [SimSequence(f"flood {i}", "late", None, 20, 20, 40.0) for i in range(3000)]
    later = SimSequence("later", "owner", None, 20, 20, 41.0)
    simulate(
        Simulation(step_limits(max_num_seqs=8, max_batch_tokens=128)), [*alone, *flood, later], until_s=80
    )
    # The steps' other half is the owner's own.
    assert later.token_times
    assert later.first_token_s < 3 * MAX_DEBT_S


def test_a_debt_is_forgotten_while_its_tenant_rests() -> None:
    sim = Simulation(step_limits(max_num_seqs=8, max_batch_tokens=128))
    scheduler = sim.scheduler()
    for _ in range(3600):
        scheduler.charge_tenant("debtor", 1.0)
    scheduler.add(sequence("first", 10, tenant="other"), 0.0)
    scheduler.add(sequence("second", 10, tenant="debtor"), 0.0)
    assert [each.queue.tenant.counter for each in scheduler.plan(0.0).batch] == pytest.approx(
        [0.0, MAX_DEBT_S], abs=0.1
    )


@pytest.mark.parametrize("num_context", [0, 100, 300])
def test_a_step_has_fewer_tokens_of_a_prompt_behind_more_context(num_context: int) -> None:
    limits = step_limits(max_batch_tokens=100, max_num_seqs=8, context_tokens=100.0)
    plan = plan_behind(limits, num_context)
    seconds = sum(1 + (num_context + token) / 100 for token in range(plan.num_tokens))
    assert seconds == pytest.approx(100, rel=0.16)


def test_a_prompt_behind_any_context_goes_on_by_an_eighth_of_a_step() -> None:
    assert (
        plan_behind(
            step_limits(max_batch_tokens=100, max_num_seqs=8, context_tokens=100.0), 10_000
        ).num_tokens
        == 12
    )


def plan_behind(limits: StepLimits, num_context: int) -> StepPlan:
    """Plan a step of a prompt of which so many tokens are computed."""
    scheduler = Simulation(limits).scheduler()
    long = sequence("long", 20_000)
    scheduler.add(long, 0.0)
    scheduler.plan(0.0)
    long.num_computed_tokens = num_context
    return scheduler.plan(0.0)


@pytest.mark.parametrize(("tenant", "num_tokens"), [("a", 99), ("b", 50)])
def test_prompts_leave_a_part_of_each_step_to_decoding_sequences_of_others(
    tenant: str, num_tokens: int
) -> None:
    scheduler = Simulation(step_limits(max_batch_tokens=100, max_num_seqs=8)).scheduler()
    decoding(scheduler, "decoding")
    prompts = [sequence(f"prompt {i}", 500, tenant) for i in range(3)]
    for each in prompts:
        scheduler.add(each, 0.0)
    plan = scheduler.plan(0.0)
    assert sum(plan.batch.get(each, 0) for each in prompts) == num_tokens


@pytest.mark.parametrize(("tenant", "num_tokens"), [("crowd", 20), ("other", 50)])
def test_what_a_tenant_decodes_is_in_its_part_of_a_step_beside_decoding_sequences_of_others(
    tenant: str, num_tokens: int
) -> None:
    scheduler = Simulation(step_limits(max_batch_tokens=100, max_num_seqs=40)).scheduler()
    decoding(scheduler, "decoding", tenant="owner")
    for number in range(30):
        decoding(scheduler, f"row {number}", 1, tenant="crowd")
    prompts = [sequence(f"prompt {i}", 500, tenant) for i in range(3)]
    for each in prompts:
        scheduler.add(each, 0.0)
    plan = scheduler.plan(0.0)
    assert sum(plan.batch.get(each, 0) for each in prompts) == num_tokens
    assert plan.num_tokens == 31 + num_tokens


def test_prompts_go_on_beside_more_rows_of_one_tenant_than_its_part_of_a_step() -> None:
    scheduler = Simulation(step_limits(max_batch_tokens=200, max_num_seqs=140)).scheduler()
    decoding(scheduler, "decoding", tenant="owner")
    for number in range(120):
        decoding(scheduler, f"row {number}", 1, tenant="crowd")
    own = [sequence(f"prompt {i}", 500, "crowd") for i in range(3)]
    other = sequence("other", 500, "other")
    for each in [*own, other]:
        scheduler.add(each, 0.0)
    # The crowd's come first, and those without room keep none of another tenant's from beginning.
    scheduler.charge_tenant("other", 9.0)
    plan = scheduler.plan(0.0)
    assert [plan.batch.get(each, 0) for each in [*own, other]] == [25, 0, 0, 74]
    scheduler.remove(other)
    assert [scheduler.plan(0.0).batch.get(each, 0) for each in own] == [25, 0, 0]


def test_beside_others_that_decode_a_tenant_s_rows_beyond_half_of_a_step_take_turns() -> None:
    scheduler = Simulation(step_limits(max_batch_tokens=100, max_num_seqs=80)).scheduler()
    own = decoding(scheduler, "own", tenant="owner")
    crowd = [decoding(scheduler, f"row {number}", 1, tenant="crowd") for number in range(70)]
    steps = decoded(scheduler, 7)
    for names in steps:
        assert (len(names), own.id in names) == (51, True)
    # Each as often as any other, but for the last turns.
    times = Counter(itertools.chain(*steps))
    assert {times[each.id] for each in crowd} == {5}
    scheduler.remove(own)
    assert len(scheduler.plan(0.0).batch) == 70


def test_long_contexts_count_in_a_tenant_s_part_and_one_row_always_decodes() -> None:
    limits = step_limits(max_batch_tokens=100, max_num_seqs=80, context_tokens=100.0)
    scheduler = Simulation(limits).scheduler()
    decoding(scheduler, "own", tenant="owner")
    for number in range(3):
        decoding(scheduler, f"row {number}", 575, tenant="crowd")
    assert [len(names) for names in decoded(scheduler, 3)] == [3, 3, 3]
    longest = [decoding(scheduler, f"longest {number}", 2250, tenant="third") for number in range(2)]
    steps = decoded(scheduler, 4)
    assert [sum(each.id in names for each in longest) for names in steps] == [1, 1, 1, 1]
    assert Counter(itertools.chain(*steps))[longest[0].id] == 2


def test_each_row_pays_for_its_rules_whatever_they_were_estimated_to_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count()
    monkeypatch.setattr("server.engine.sampler.time.monotonic", lambda: float(next(clock)))
    prompt = PromptHistory(token_ids_of([1]))
    ruled = SamplingParams(temperature=0.0, rules=GenerationRules(no_repeat_ngram_size=3))
    samplers = [Sampler(SamplingParams(temperature=0.0), 0, prompt), Sampler(ruled, 0, prompt)]
    for each in samplers[1:] * 2:
        each.scores(torch.zeros(8))
    # Each call took a second by this clock.
    assert divided(samplers, 3.0) == [0.5, 2.5]
    assert divided(samplers, 3.0) == [1.5, 1.5]
    samplers[1].scores(torch.zeros(8))
    assert divided(samplers, 0.5) == [0.0, 1.0]


def slow(scheduler: Scheduler, name: str, tenant: str) -> SimSequence:
    made = decoding(scheduler, name, 1, tenant=tenant)
    made.sampling_cost = MAX_SLOW_SAMPLING / 2.5
    return made


def decoded(scheduler: Scheduler, num_steps: int) -> list[list[str]]:
    """Return the ids of the sequences of each step; each is charged what it takes to sample."""
    steps = []
    for _ in range(num_steps):
        plan = scheduler.plan(0.0)
        scheduler.charge_sampling([(each, each.sampling_cost) for each in plan.batch], 1e-4 * len(plan.batch))
        for each in plan.batch:
            each.num_computed_tokens += 1
            each.generated_ids.append(1)
        steps.append([each.id for each in plan.batch])
    return steps


def test_of_sequences_that_take_long_to_sample_a_step_has_a_few_while_others_are_served() -> None:
    scheduler = Simulation(step_limits(max_batch_tokens=100, max_num_seqs=16)).scheduler()
    for number in range(6):
        slow(scheduler, f"slow {number}", "a")
    # A tenant alone has them all in each step.
    assert all(len(each) == 6 for each in decoded(scheduler, 3))
    decoding(scheduler, "honest", 1, tenant="b")
    steps = decoded(scheduler, 30)
    assert all("honest" in each and len(each) == 3 for each in steps)
    times = Counter(name for each in steps for name in each)
    assert {times[f"slow {number}"] for number in range(6)} == {10}
    # Of two tenants with such sequences, each has about as many, however many it sends.
    slow(scheduler, "few", "c")
    steps = decoded(scheduler, 30)
    assert sum("few" in each for each in steps) >= 25


def test_a_step_completes_a_few_prompts_of_sequences_that_take_long_to_sample() -> None:
    scheduler = Simulation(step_limits(max_batch_tokens=100, max_num_seqs=16)).scheduler()
    decoding(scheduler, "honest", 1, tenant="b")
    prompts = [sequence(f"prompt {number}", 3) for number in range(6)]
    for each in prompts:
        each.sampling_cost = MAX_SLOW_SAMPLING / 2.5
        scheduler.add(each, 0.0)
    num_completed = list[int]()
    while any(each.num_missing_tokens > 1 for each in prompts) and len(num_completed) < 10:
        plan = scheduler.plan(0.0)
        done = [each for each in prompts if plan.batch.get(each, 0) == each.num_missing_tokens > 1]
        num_completed.append(len(done))
        for one, num_tokens in plan.batch.items():
            one.num_computed_tokens += num_tokens
            if one.num_computed_tokens == one.num_tokens:
                one.generated_ids.append(1)
    assert num_completed[0] == 2
    assert max(num_completed) <= 2


def test_what_a_token_takes_to_sample_grows_with_what_is_asked() -> None:
    prompt = PromptHistory(token_ids_of([1]))
    suppressed = GenerationRules(suppress_tokens=id_list([3]))
    asked = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(temperature=0.0, rules=suppressed),
        SamplingParams(temperature=1.0, top_k=5, top_p=0.9),
        SamplingParams(temperature=1.0, top_k=5, top_p=0.9, rules=suppressed),
        SamplingParams(temperature=1.0, top_k=5, top_p=0.9, logprobs=20),
        SamplingParams(temperature=1.0, rules=GenerationRules(typical_p=0.9)),
        SamplingParams(temperature=1.0, top_k=5, rules=GenerationRules(typical_p=0.9)),
    ]
    costs = [Sampler(params, 0, prompt).cost for params in asked]
    assert costs == sorted(set(costs))
    assert costs[0] == 1


def test_penalties_of_many_tokens_are_paid_by_the_sequence_that_has_seen_them() -> None:
    """With 128k of them, a token takes as long as with eight argmaxes more."""
    vocab, params = 60_000, SamplingParams(temperature=1.0, repetition_penalty=1.1)
    few = Sampler(params, 0, PromptHistory(token_ids_of([1] * vocab)))
    many = Sampler(params, 0, PromptHistory(token_ids_of(range(vocab))))
    for sampler in (few, many):
        sampler.plan(vocab)
    own = divided([few, many], 1.0)
    assert own[1] > 2 * own[0]
    assert sum(own) == pytest.approx(1.0)
