"""What a step holds: decodes, chunks of prompts, seats, pages under pressure."""

from __future__ import annotations

from typing import Any

import pytest

from server.engine.scheduling.scheduler import Plan, SchedulerLimits
from tests.server.helpers.simulation import SimJob, SimPages, SimSlots, World, simulate


def job(name: str, num_prompt: int = 10, num_output: int = 10, **more: Any) -> SimJob:
    return SimJob(
        name,
        more.pop("tenant", "a"),
        more.pop("digest", None),
        num_prompt,
        num_output,
        more.pop("arrived_at", 0.0),
        **more,
    )


def step(world: World, plan: Plan[SimJob]) -> None:
    """Compute a plan by hand: every job whose tokens are all computed gets another."""
    for each, num_tokens in plan.batch:
        each.num_computed_tokens += num_tokens
        each.num_tokens += each.num_computed_tokens == each.num_tokens


def planned(plan: Plan[SimJob]) -> dict[str, int]:
    return {each.id: num_tokens for each, num_tokens in plan.batch}


def test_a_long_prompt_does_not_keep_running_jobs_from_decoding() -> None:
    world = World(SchedulerLimits(max_num_seqs=16, max_batch_tokens=64))
    decoding = [job(f"d{i}", 4, 100) for i in range(8)]
    simulate(world, [*decoding, job("long", 2000, 5, arrived_at=0.2)])
    fullest_s = world.costs.step_s + 64 * world.costs.token_s
    for each in decoding:
        gaps = [after - before for before, after in zip(each.token_times, each.token_times[1:], strict=False)]
        assert max(gaps) <= fullest_s + 1e-9


def test_a_prompt_alone_takes_the_whole_step() -> None:
    world = World(SchedulerLimits(max_batch_tokens=100, max_num_seqs=8))
    scheduler = world.scheduler()
    scheduler.add(job("long", 500), 0.0)
    assert planned(scheduler.plan(0.0)) == {"long": 100}


def test_of_two_prompts_neither_takes_the_other_ones_tokens() -> None:
    world = World(SchedulerLimits(max_batch_tokens=100, max_num_seqs=8))
    scheduler = world.scheduler()
    scheduler.add(job("long", 500), 0.0)
    scheduler.add(job("short", 20, tenant="b"), 0.0)
    assert planned(scheduler.plan(0.0)) == {"long": 80, "short": 20}


def test_another_tenants_prompt_does_not_wait_for_one_that_is_under_way() -> None:
    world = World(SchedulerLimits(max_batch_tokens=100, max_num_seqs=8, prefill_share=1.0))
    scheduler = world.scheduler()
    scheduler.add(job("long", 5000), 0.0)
    step(world, scheduler.plan(0.0))
    scheduler.add(job("late", 30, tenant="b"), 0.0)
    scheduler.add(job("last", 30, tenant="a"), 0.0)
    assert planned(scheduler.plan(0.1)) == {"late": 30, "long": 70}


def test_prompts_under_way_share_the_steps_fairly() -> None:
    world = World(SchedulerLimits(max_batch_tokens=100, max_num_seqs=8, prefill_share=1.0))
    scheduler = world.scheduler()
    early, late = job("early", 5000), job("late", 5000, tenant="b")
    scheduler.add(early, 0.0)
    step(world, scheduler.plan(0.0))
    scheduler.add(late, 0.1)
    for _ in range(21):
        step(world, scheduler.plan(0.1))
    assert (early.num_computed_tokens, late.num_computed_tokens) == (1100, 1100)


def test_a_job_that_waits_for_its_delta_blocks_nobody() -> None:
    world = World()
    scheduler = world.scheduler()
    scheduler.add(job("cold", digest="v"), 0.0)
    scheduler.add(job("same tenant"), 0.0)
    scheduler.add(job("another", tenant="b"), 0.0)
    plan = scheduler.plan(0.0)
    assert planned(plan) == {"same tenant": 10, "another": 10}
    assert plan.wants == ("v",)
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_waiting_for_load) == (2, 1, 1)


def test_running_and_waiting_jobs_are_listed_in_the_order_in_which_they_came() -> None:
    world = World(SchedulerLimits(max_num_seqs=2))
    scheduler = world.scheduler()
    jobs = [job(name) for name in ("one", "two", "three", "four")]
    for each in jobs:
        scheduler.add(each, 0.0)
    scheduler.plan(0.0)
    assert scheduler.running == jobs[:2]
    assert scheduler.waiting == jobs[2:]


def test_a_job_is_removed_wherever_it_is_and_leaves_nothing_behind() -> None:
    world = World(SchedulerLimits(max_num_seqs=1), slots=SimSlots(2, load_s=0.0))
    scheduler = world.scheduler()
    runs, waits, cold = job("runs", digest="v"), job("waits", digest="v"), job("cold", digest="w")
    for each in (runs, waits, cold):
        scheduler.add(each, 0.0)
    scheduler.plan(0.0)
    world.slots.adopt(0.1)
    assert planned(scheduler.plan(0.1)) == {"runs": 10}
    for each in (cold, runs, waits, waits):
        scheduler.remove(each)
    assert planned(scheduler.plan(0.2)) == {}
    assert not scheduler.running
    assert not scheduler.waiting
    assert world.pages.num_available == world.pages.num_pages
    assert not +world.slots.holds


def test_the_most_senior_job_advances_when_there_are_no_pages_left() -> None:
    world = World(pages=SimPages(8))
    jobs = [job(f"j{i}", 16, 100) for i in range(6)]
    simulate(world, jobs)
    assert jobs[0].num_preempted == 0
    assert sum(each.num_preempted for each in jobs) > 0
    assert all(each.num_generated == 100 for each in jobs)


def test_pages_are_taken_from_the_tenant_that_got_most() -> None:
    world = World(SchedulerLimits(reserve_tokens=0), pages=SimPages(6))
    scheduler = world.scheduler()
    scheduler.add(job("heavy", 32, tenant="a"), 0.0)
    scheduler.add(job("heavy too", 32, tenant="a"), 0.0)
    scheduler.add(job("light", 16, tenant="b"), 0.0)
    plan = scheduler.plan(0.0)
    assert len(plan.batch) == 3
    step(world, plan)
    plan = scheduler.plan(0.1)
    assert [each.id for each in plan.preempted] == ["heavy too"]
    assert planned(plan) == {"heavy": 1, "light": 1}


def test_the_most_senior_job_keeps_its_pages_though_its_tenant_got_most() -> None:
    world = World(SchedulerLimits(reserve_tokens=0), pages=SimPages(4))
    scheduler = world.scheduler()
    scheduler.add(job("senior", 48, tenant="a"), 0.0)
    scheduler.add(job("junior", 16, tenant="b"), 0.0)
    step(world, scheduler.plan(0.0))
    assert [each.id for each in scheduler.plan(0.1).preempted] == ["junior"]


def test_nobody_begins_in_a_step_that_takes_pages_from_others() -> None:
    world = World(SchedulerLimits(reserve_tokens=0), pages=SimPages(6))
    scheduler = world.scheduler()
    scheduler.add(job("senior", 32, tenant="a"), 0.0)
    scheduler.add(job("junior", 64, tenant="b"), 0.0)
    step(world, scheduler.plan(0.0))
    scheduler.add(job("tiny", 8, tenant="c"), 0.1)
    assert planned(scheduler.plan(0.1)) == {"senior": 1}
    assert "tiny" in planned(scheduler.plan(0.2))


def test_admission_leaves_the_running_jobs_room_to_grow() -> None:
    world = World(SchedulerLimits(reserve_tokens=32), pages=SimPages(6))
    scheduler = world.scheduler()
    for name in ("one", "two", "three"):
        scheduler.add(job(name, 30), 0.0)
    assert planned(scheduler.plan(0.0)) == {"one": 30, "two": 30}


def test_while_no_pages_come_free_a_prefix_is_not_looked_for_again() -> None:
    attached = []

    class Counting(SimPages):
        def attach(self, job: SimJob) -> None:
            attached.append(job.id)
            super().attach(job)

    world = World(pages=Counting(20))
    simulate(world, [job("runs", 200, 100), job("waits", 200, 100)])
    assert attached == ["runs", "waits", "waits"]


def test_a_small_job_begins_when_the_large_one_before_it_has_gone() -> None:
    world = World(pages=SimPages(20))
    scheduler = world.scheduler()
    runs, large, small = job("runs", 200), job("large", 200), job("small", 20)
    for each in (runs, large, small):
        scheduler.add(each, 0.0)
    assert planned(scheduler.plan(0.0)) == {"runs": 200}
    scheduler.remove(large)
    assert "small" in planned(scheduler.plan(0.1))


def test_with_room_left_over_fewer_tokens_are_computed_twice() -> None:
    computed = {}
    for reserve in (0, 32):
        world = World(SchedulerLimits(reserve_tokens=reserve), pages=SimPages(100))
        simulate(world, [job(f"j{i}", 32, 100) for i in range(200)])
        computed[reserve] = world.num_tokens
    assert computed[32] < 0.9 * computed[0]


def test_a_job_that_cannot_fit_is_handed_back_and_the_next_one_runs() -> None:
    world = World(pages=SimPages(4))
    scheduler = world.scheduler()
    huge, small = job("huge", 65), job("small", 64)
    scheduler.add(huge, 0.0)
    scheduler.add(small, 0.0)
    plan = scheduler.plan(0.0)
    assert plan.unfit == [huge]
    assert planned(plan) == {"small": 64}
    step(world, plan)
    plan = scheduler.plan(0.1)
    assert plan.unfit == [small]
    assert plan.batch == []
    assert world.pages.num_available == 4


def test_what_is_computed_again_is_not_charged_again() -> None:
    world = World(SchedulerLimits(reserve_tokens=0, max_num_seqs=8), pages=SimPages(5))
    scheduler = world.scheduler()
    scheduler.add(job("senior", 32, tenant="a"), 0.0)
    scheduler.add(job("junior", 48, tenant="b"), 0.0)
    step(world, scheduler.plan(0.0))
    entry = scheduler._entries["junior"]
    before = entry.lane.counter
    assert [each.id for each in scheduler.plan(0.1).preempted] == ["junior"]
    scheduler.remove(scheduler.running[0])
    assert planned(scheduler.plan(0.2)) == {"junior": 49}
    assert entry.lane.counter == before == 48


@pytest.mark.parametrize(
    "bad",
    [
        {"max_num_seqs": 0},
        {"max_num_seqs": 64, "max_batch_tokens": 64},
        {"prefill_share": 0.0},
        {"prefill_share": 1.5},
        {"recompute_share": 0.0},
        {"tenure_s": -1.0},
        {"reserve_tokens": -1},
    ],
    ids=str,
)
def test_limits_that_make_no_sense_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SchedulerLimits(**bad)
