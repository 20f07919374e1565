"""The contents of a step: decodes, chunks of prompts, admissions, and preemption when pages are short."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from server.engine.kv_cache_manager import KVCacheManager
from server.engine.scheduler import MAX_SCORED_TOKENS, StepPlan
from server.engine.sequence import Sequence
from server.engine.slot_policy import SchedulerConstants
from tests.server.helpers.simulation import (
    TOKEN,
    SimResidency,
    SimSequence,
    Simulation,
    pages,
    simulate,
    step_limits,
)


def sequence(name: str, num_prompt: int = 10, num_output: int = 10, **more: Any) -> SimSequence:
    return SimSequence(
        name,
        more.pop("tenant", "a"),
        more.pop("digest", None),
        num_prompt,
        num_output,
        more.pop("arrived_at", 0.0),
        **more,
    )


def step(plan: StepPlan) -> None:
    """Compute a plan by hand: each sequence whose tokens are all computed generates another."""
    for each, num_tokens in plan.batch.items():
        each.num_computed_tokens += num_tokens
        if each.num_computed_tokens == each.num_tokens:
            each.generated_ids.append(TOKEN)


def planned(plan: StepPlan) -> dict[str, int]:
    return {each.id: num_tokens for each, num_tokens in plan.batch.items()}


def test_a_long_prompt_does_not_keep_running_sequences_from_decoding() -> None:
    sim = Simulation(step_limits(max_num_seqs=16, max_batch_tokens=64))
    decoding = [sequence(f"d{i}", 4, 100) for i in range(8)]
    simulate(sim, [*decoding, sequence("long", 2000, 5, arrived_at=0.2)])
    fullest_s = sim.costs.step_s + 64 * sim.costs.token_s
    for each in decoding:
        gaps = [after - before for before, after in zip(each.token_times, each.token_times[1:], strict=False)]
        assert max(gaps) <= fullest_s + 1e-9


def test_a_prompt_alone_takes_the_whole_step() -> None:
    sim = Simulation(step_limits(max_batch_tokens=100, max_num_seqs=8))
    scheduler = sim.scheduler()
    scheduler.add(sequence("long", 500), 0.0)
    assert planned(scheduler.plan(0.0)) == {"long": 100}


def test_of_two_prompts_neither_takes_the_other_ones_tokens() -> None:
    sim = Simulation(step_limits(max_batch_tokens=100, max_num_seqs=8))
    scheduler = sim.scheduler()
    scheduler.add(sequence("long", 500), 0.0)
    scheduler.add(sequence("short", 20, tenant="b"), 0.0)
    assert planned(scheduler.plan(0.0)) == {"long": 80, "short": 20}


def scored(name: str, num_prompt: int, **more: Any) -> SimSequence:
    """Make a sequence whose prompt's log-probabilities were asked for."""
    made = sequence(name, num_prompt, **more)
    made.needs_prompt_logits = True
    return made


def test_a_step_computes_few_logits_of_prompts_and_leaves_its_other_tokens_to_others() -> None:
    sim = Simulation(step_limits(max_batch_tokens=400, max_num_seqs=8, prefill_share=1.0))
    scheduler = sim.scheduler()
    for each in (scored("first", 100), scored("second", 100, tenant="b"), sequence("plain", 500, tenant="c")):
        scheduler.add(each, 0.0)
    plan = scheduler.plan(0.0)
    assert planned(plan) == {"first": MAX_SCORED_TOKENS, "plain": 400 - MAX_SCORED_TOKENS}
    step(plan)
    # In turns, by what each was served.
    assert planned(scheduler.plan(0.1))["second"] == MAX_SCORED_TOKENS


def test_a_prompt_whose_logits_are_computed_costs_as_much_as_generated_tokens() -> None:
    constants = SchedulerConstants()
    scheduler = Simulation(step_limits(max_batch_tokens=100, max_num_seqs=8)).scheduler()
    plain, with_logits = sequence("plain", 30), scored("scored", 30, tenant="b")
    for each in (plain, with_logits):
        scheduler.add(each, 0.0)
    scheduler.plan(0.0)
    assert with_logits.queue.counter == pytest.approx(
        plain.queue.counter * constants.generated_token_cost / constants.prompt_token_cost
    )


def test_another_tenants_prompt_does_not_wait_for_one_that_is_under_way() -> None:
    sim = Simulation(step_limits(max_batch_tokens=100, max_num_seqs=8, prefill_share=1.0))
    scheduler = sim.scheduler()
    scheduler.add(sequence("long", 5000), 0.0)
    step(scheduler.plan(0.0))
    scheduler.add(sequence("late", 30, tenant="b"), 0.0)
    scheduler.add(sequence("last", 30, tenant="a"), 0.0)
    assert planned(scheduler.plan(0.1)) == {"late": 30, "long": 70}


def test_prompts_under_way_share_the_steps_fairly() -> None:
    sim = Simulation(step_limits(max_batch_tokens=100, max_num_seqs=8, prefill_share=1.0))
    scheduler = sim.scheduler()
    early, late = sequence("early", 5000), sequence("late", 5000, tenant="b")
    scheduler.add(early, 0.0)
    step(scheduler.plan(0.0))
    scheduler.add(late, 0.1)
    for _ in range(21):
        step(scheduler.plan(0.1))
    assert (early.num_computed_tokens, late.num_computed_tokens) == (1100, 1100)


def test_a_sequence_that_waits_for_its_delta_blocks_no_other() -> None:
    sim = Simulation()
    scheduler = sim.scheduler()
    cold = sequence("cold", digest="v")
    scheduler.add(cold, 0.0)
    scheduler.add(sequence("same tenant"), 0.0)
    scheduler.add(sequence("another", tenant="b"), 0.0)
    plan = scheduler.plan(0.0)
    assert planned(plan) == {"same tenant": 10, "another": 10}
    assert sim.residency.is_loading("v")
    assert len(scheduler.running) == 2
    assert cold.is_waiting


def test_running_and_waiting_sequences_keep_the_order_in_which_they_came() -> None:
    sim = Simulation(step_limits(max_num_seqs=2))
    scheduler = sim.scheduler()
    sequences = [sequence(name) for name in ("one", "two", "three", "four")]
    for each in sequences:
        scheduler.add(each, 0.0)
    scheduler.plan(0.0)
    assert scheduler.running == sequences[:2]
    assert [each for each in sequences if each.is_waiting] == sequences[2:]
    for each in sequences[:2]:
        scheduler.remove(each)
    assert list(scheduler.plan(0.1).batch) == scheduler.running == sequences[2:]


def test_a_sequence_is_removed_wherever_it_is_and_leaves_nothing_behind() -> None:
    sim = Simulation(step_limits(max_num_seqs=1), residency=SimResidency(2, load_s=0.0))
    scheduler = sim.scheduler()
    runs, waits, cold = (
        sequence("runs", digest="v"),
        sequence("waits", digest="v"),
        sequence("cold", digest="w"),
    )
    for each in (runs, waits, cold):
        scheduler.add(each, 0.0)
    scheduler.plan(0.0)
    sim.end_loads(scheduler, 0.1)
    assert planned(scheduler.plan(0.1)) == {"runs": 10}
    for each in (cold, runs, waits, waits):
        scheduler.remove(each)
    assert planned(scheduler.plan(0.2)) == {}
    assert not scheduler.running
    assert not any(each.is_waiting for each in (runs, waits, cold))
    assert sim.kv_cache.num_available == sim.kv_cache.num_pages
    assert not +sim.residency.holds


def test_the_first_sequence_advances_when_there_are_no_pages_left() -> None:
    sim = Simulation(kv_cache=pages(8))
    sequences = [sequence(f"j{i}", 16, 100) for i in range(6)]
    simulate(sim, sequences)
    assert sequences[0].num_preempted == 0
    assert sum(each.num_preempted for each in sequences) > 0
    assert all(each.num_generated == 100 for each in sequences)


def test_pages_are_taken_from_the_tenant_that_was_served_most() -> None:
    sim = Simulation(step_limits(reserve_tokens=0), kv_cache=pages(6))
    scheduler = sim.scheduler()
    scheduler.add(sequence("heavy", 32, tenant="a"), 0.0)
    scheduler.add(sequence("heavy too", 32, tenant="a"), 0.0)
    scheduler.add(sequence("light", 16, tenant="b"), 0.0)
    plan = scheduler.plan(0.0)
    assert len(plan.batch) == 3
    step(plan)
    plan = scheduler.plan(0.1)
    assert [each.id for each in plan.preempted] == ["heavy too"]
    assert planned(plan) == {"heavy": 1, "light": 1}


def test_the_first_sequence_keeps_its_pages_though_its_tenant_was_served_most() -> None:
    sim = Simulation(step_limits(reserve_tokens=0), kv_cache=pages(4))
    scheduler = sim.scheduler()
    scheduler.add(sequence("senior", 48, tenant="a"), 0.0)
    scheduler.add(sequence("junior", 16, tenant="b"), 0.0)
    step(scheduler.plan(0.0))
    assert [each.id for each in scheduler.plan(0.1).preempted] == ["junior"]


def test_no_sequence_is_admitted_in_a_step_that_preempts_for_pages() -> None:
    sim = Simulation(step_limits(reserve_tokens=0), kv_cache=pages(6))
    scheduler = sim.scheduler()
    scheduler.add(sequence("senior", 32, tenant="a"), 0.0)
    scheduler.add(sequence("junior", 64, tenant="b"), 0.0)
    step(scheduler.plan(0.0))
    scheduler.add(sequence("tiny", 8, tenant="c"), 0.1)
    assert planned(scheduler.plan(0.1)) == {"senior": 1}
    assert "tiny" in planned(scheduler.plan(0.2))


def test_admission_leaves_pages_for_the_running_sequences_to_grow() -> None:
    sim = Simulation(step_limits(reserve_tokens=32), kv_cache=pages(6))
    scheduler = sim.scheduler()
    for name in ("one", "two", "three"):
        scheduler.add(sequence(name, 30), 0.0)
    assert planned(scheduler.plan(0.0)) == {"one": 30, "two": 30}


def test_while_no_pages_come_free_a_prefix_is_not_looked_for_again() -> None:
    attached = []

    class CountingCache(KVCacheManager):
        def attach_prefix(self, sequence: Sequence) -> None:
            attached.append(sequence.id)
            super().attach_prefix(sequence)

    sim = Simulation(kv_cache=CountingCache(21, 16))
    simulate(sim, [sequence("runs", 200, 100), sequence("waits", 200, 100)])
    assert attached == ["runs", "waits", "waits"]


def test_a_small_sequence_begins_when_the_large_one_before_it_has_gone() -> None:
    sim = Simulation(kv_cache=pages(20))
    scheduler = sim.scheduler()
    runs, large, small = sequence("runs", 200), sequence("large", 200), sequence("small", 20)
    for each in (runs, large, small):
        scheduler.add(each, 0.0)
    assert planned(scheduler.plan(0.0)) == {"runs": 200}
    scheduler.remove(large)
    assert "small" in planned(scheduler.plan(0.1))


def test_with_reserve_tokens_fewer_tokens_are_computed_twice() -> None:
    computed = {}
    for reserve in (0, 32):
        sim = Simulation(step_limits(reserve_tokens=reserve), kv_cache=pages(100))
        simulate(sim, [sequence(f"j{i}", 32, 100) for i in range(200)])
        computed[reserve] = sim.num_tokens
    assert computed[32] < 0.9 * computed[0]


def test_a_sequence_that_cannot_fit_is_handed_back_and_the_next_one_runs() -> None:
    sim = Simulation(kv_cache=pages(4))
    scheduler = sim.scheduler()
    huge, small = sequence("huge", 65), sequence("small", 64)
    scheduler.add(huge, 0.0)
    scheduler.add(small, 0.0)
    plan = scheduler.plan(0.0)
    assert plan.too_long == [huge]
    assert planned(plan) == {"small": 64}
    step(plan)
    plan = scheduler.plan(0.1)
    assert plan.too_long == [small]
    assert not plan.batch
    assert sim.kv_cache.num_available == 4


def test_recomputed_tokens_are_not_charged_again() -> None:
    sim = Simulation(step_limits(reserve_tokens=0, max_num_seqs=8), kv_cache=pages(5))
    scheduler = sim.scheduler()
    scheduler.add(sequence("senior", 32, tenant="a"), 0.0)
    junior = sequence("junior", 48, tenant="b")
    scheduler.add(junior, 0.0)
    plan = scheduler.plan(0.0)
    step(plan)
    scheduler.charge(plan, 0.1, 1.0)
    before = junior.queue.counter
    assert [each.id for each in scheduler.plan(0.1).preempted] == ["junior"]
    scheduler.remove(scheduler.running[0])
    plan = scheduler.plan(0.2)
    assert planned(plan) == {"junior": 49}
    # All of the step's seconds are the tenant's, and it pays for those of the new token.
    assert scheduler.charge(plan, 0.3, 1.0) == {"b": 1.0}
    assert junior.queue.counter - before == pytest.approx(2 / (49 + 2), rel=0.1)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_num_seqs": 0},
        {"max_num_seqs": 64, "max_batch_tokens": 64},
        {"prefill_share": 0.0},
        {"prefill_share": 1.5},
        {"recompute_share": 0.0},
        {"min_resident_s": -1.0},
        {"reserve_tokens": -1},
    ],
    ids=str,
)
def test_limits_that_make_no_sense_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Simulation(step_limits(**bad)).scheduler()


def test_a_sequence_is_scheduled_once() -> None:
    scheduler = Simulation().scheduler()
    once = sequence("once")
    scheduler.add(once, 0.0)
    with pytest.raises(ValueError, match="once was scheduled before"):
        scheduler.add(once, 0.1)


def test_the_earliest_sequence_gives_up_its_pages_while_it_waits_for_a_mask() -> None:
    sim = Simulation(kv_cache=pages(6))
    waiting, other = sequence("waiting", 20, 4, mask_s=60.0), sequence("other", 20, 60, arrived_at=0.1)
    simulate(sim, [waiting, other])
    assert other.token_times[-1] < 2.0
    assert (waiting.num_preempted, other.num_preempted) == (1, 0)
    assert waiting.num_generated == 4


def test_a_sequence_that_waits_for_a_mask_is_in_no_step() -> None:
    scheduler = Simulation().scheduler()
    waiting = sequence("waiting", 4)
    scheduler.add(waiting, 0.0)
    for each, num_tokens in scheduler.plan(0.0).batch.items():
        each.num_computed_tokens += num_tokens
    assert not scheduler.plan(0.1).batch
    assert scheduler.running == [waiting]
    assert waiting.page_table.pages
    waiting.generated_ids.append(TOKEN)
    assert planned(scheduler.plan(0.2)) == {"waiting": 1}


@pytest.mark.parametrize(
    ("num_running", "num_prompt"), [(16, 318), (16, 260), (150, 318), (150, 250), (150, 130)]
)
def test_a_prompt_without_room_keeps_no_other_tenant_waiting(num_running: int, num_prompt: int) -> None:
    sim = Simulation(kv_cache=pages(20))
    scheduler = sim.scheduler()
    scheduler.add(sequence("runs", num_running, tenant="a"), 0.0)
    step(scheduler.plan(0.0))
    scheduler.add(sequence("large", num_prompt, tenant="b"), 0.1)
    scheduler.add(sequence("small", 20, tenant="c"), 0.1)
    assert planned(scheduler.plan(0.1)) == {"runs": 1, "small": 20}
    scheduler.add(sequence("next", 20, tenant="d"), 0.2)
    assert "next" in planned(scheduler.plan(0.2))


@pytest.mark.parametrize("num_prompt", [300, 200])
@pytest.mark.parametrize("num_steps", [1, 4])
def test_the_tenant_with_most_pages_gives_way_to_one_that_needs_fewer(
    num_prompt: int, num_steps: int
) -> None:
    """Also if it has one sequence, which was there first, and whether its prompt is computed or not."""
    sim = Simulation(step_limits(max_batch_tokens=100), kv_cache=pages(20))
    scheduler = sim.scheduler()
    scheduler.add(sequence("hog", num_prompt, tenant="a"), 0.0)
    for number in range(num_steps):
        step(scheduler.plan(number / 100))
    scheduler.add(sequence("chat", 120, tenant="b"), 0.1)
    for now in (0.1, 1.2, 4.9):
        assert "chat" not in planned(scheduler.plan(now))
    plan = scheduler.plan(5.1)
    assert [each.id for each in plan.preempted] == ["hog"]
    assert "chat" in planned(plan)
    # It does not take its pages back from one that holds fewer.
    assert not scheduler.plan(9.0).preempted


def longest_wait_s(sequence: SimSequence) -> float:
    times = [sequence.arrived_at, *sequence.token_times]
    return max(after - before for before, after in itertools.pairwise(times))


@pytest.mark.parametrize(
    ("num_pages", "part", "num_output", "every_s"),
    [
        (1000, 0.45, 1, 1000.0),
        (1000, 0.45, 1, 10.0),
        (1000, 0.45, 100, 1000.0),
        (1000, 0.3, 1, 10.0),
        (5000, 0.45, 1, 1000.0),
        (5000, 0.45, 1, 60.0),
    ],
)
def test_a_long_sequence_that_gave_way_runs_on_when_its_pages_are_free(
    num_pages: int, part: float, num_output: int, every_s: float
) -> None:
    """Beside streams of the tenant that it gave way to, which need few pages and have one token a step."""
    sim = Simulation(step_limits(max_num_seqs=16), kv_cache=pages(num_pages))
    num_tokens = sim.kv_cache.max_tokens
    long = sequence("long", int((0.9 - part / 1.5) * num_tokens), 2000, tenant="long")
    others = [sequence(f"stream{number}", 20, 500, arrived_at=1.0 + 3.0 * number) for number in range(80)]
    large = [
        sequence(f"large{number}", int(part * num_tokens), num_output, arrived_at=2.0 + every_s * number)
        for number in range(int(240 / every_s) + 1)
    ]
    simulate(sim, [long, *others, *large], until_s=240.0)
    assert long.num_preempted > 0
    assert long.num_generated == 2000
    assert longest_wait_s(long) < 25.0
    assert long.token_times[-1] < 120.0


@pytest.mark.parametrize("with_streams", [False, True])
@pytest.mark.parametrize("parts", [(0.55, 0.55), (0.6, 0.55), (0.55, 0.6), (0.5, 0.5)])
def test_two_large_sequences_do_not_preempt_each_other_in_turn(
    parts: tuple[float, float], with_streams: bool
) -> None:
    sim = Simulation(step_limits(max_num_seqs=16), kv_cache=pages(1000))
    large = [
        sequence(f"large{tenant}", int(part * 16_000), 1500, tenant=tenant, arrived_at=at)
        for part, tenant, at in zip(parts, "bc", (0.0, 0.5), strict=True)
    ]
    streams = [sequence(f"stream{number}", 20, 500, arrived_at=3.0 * number) for number in range(20)]
    simulate(sim, [*large, *streams[: 20 * with_streams]])
    assert sum(each.num_preempted for each in large) <= 1


def test_of_a_sequence_that_gave_way_the_tokens_found_again_are_not_counted_as_recomputed() -> None:
    sim = Simulation(step_limits(max_batch_tokens=300), kv_cache=KVCacheManager(21, 16))
    scheduler, kv_cache = sim.scheduler(), sim.kv_cache

    def run(begin: float, num_steps: int) -> list[str]:
        preempted: list[str] = []
        for number in range(num_steps):
            now = begin + number / 10
            plan = scheduler.plan(now)
            preempted += [each.id for each in plan.preempted]
            step(plan)
            for each in plan.batch:
                kv_cache.cache_full_pages(each)
            scheduler.charge(plan, now, 0.01)
        return preempted

    hog, chats = sequence("hog", 200, tenant="a"), [sequence(f"c{n}", 100, tenant=f"t{n}") for n in range(2)]
    scheduler.add(hog, 0.0)
    run(0.0, 2)
    scheduler.add(chats[0], 0.2)
    assert run(5.1, 2) == ["hog"]
    scheduler.remove(chats[0])
    run(6.0, 60)
    assert scheduler.running == [hog]
    scheduler.add(chats[1], 12.0)
    # As many tokens as it has computed could not be computed again yet.
    assert run(13.1, 1) == ["hog"]


def test_a_tenant_s_pages_are_shared_by_its_sequences_with_one_prompt() -> None:
    sim = Simulation(step_limits(reserve_tokens=0), kv_cache=KVCacheManager(21, 16))
    scheduler = sim.scheduler()
    crowd = [sequence(f"crowd{number}", 100, tenant="a") for number in range(8)]
    for each in crowd:
        scheduler.add(each, 0.0)
        step(plan := scheduler.plan(0.0))
        for one in plan.batch:
            sim.kv_cache.cache_full_pages(one)
    assert len(scheduler.running) == 8
    scheduler.add(sequence("large", 250, tenant="b"), 0.1)
    # They hold 14 pages together, fewer than it needs.
    assert sim.kv_cache.num_used("a") == 6 + 8
    assert not scheduler.plan(2.0).preempted


def test_beside_a_long_context_others_begin_soon_and_a_quarter_is_recomputed() -> None:
    sim = Simulation(step_limits(max_num_seqs=16), kv_cache=pages(1000))
    hog = sequence("hog", 14_000, 1900, tenant="hog")
    chats = [
        sequence(f"c{number}", 1500, 40, tenant=f"t{number % 3}", arrived_at=0.2 + 0.5 * number)
        for number in range(60)
    ]
    simulate(sim, [hog, *chats])
    assert max(chat.first_token_s for chat in chats) < 6.0
    assert hog.num_preempted >= 2
    assert sim.num_tokens < 1.4 * (14_000 + 1900 + 60 * 1540)


@pytest.mark.parametrize("num_prompt", [1500, 5000])
def test_a_large_prompt_begins_though_others_would_take_each_page_that_comes_free(num_prompt: int) -> None:
    sim = Simulation(step_limits(max_num_seqs=64), kv_cache=pages(400))
    large = sequence("large", num_prompt, 40, tenant="large", arrived_at=2.0)
    crowd = [
        sequence(f"c{number}", 400, 60, tenant=f"t{number % 5}", arrived_at=number / 40)
        for number in range(1200)
    ]
    simulate(sim, [large, *crowd], until_s=30.0)
    assert large.token_times
    assert large.first_token_s < 15.0
