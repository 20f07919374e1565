"""Which variants have slots: bounded waits for cold ones, no thrashing, least harm. Simulated time."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest

from server.engine.scheduling.scheduler import Plan, SchedulerLimits
from tests.server.helpers.simulation import (
    FifoScheduler,
    SimJob,
    SimPages,
    SimSlots,
    World,
    poisson,
    simulate,
    zipf,
)

SEATS = SchedulerLimits(max_num_seqs=16, max_batch_tokens=128, cold_wait_s=2.0, tenure_s=0.5)


def hot(num_variants: int, seconds: float, num_output: int, per_s: float) -> list[SimJob]:
    """Jobs of variants that always have some waiting."""
    rng = random.Random(0)
    return [
        SimJob(f"h{v}-{i}", f"hot{v}", f"h{v}", 32, num_output, time)
        for v in range(num_variants)
        for i, time in enumerate(poisson(rng, per_s, seconds))
    ]


def popular(seed: int, per_s: float, seconds: float, num_variants: int) -> list[SimJob]:
    """Requests of four tenants to variants of very different popularity."""
    rng = random.Random(seed)
    times = poisson(rng, per_s, seconds)
    return [
        SimJob(f"j{i}", f"t{rng.randrange(4)}", digest, rng.randint(32, 96), rng.randint(32, 96), time)
        for i, (time, digest) in enumerate(zip(times, zipf(rng, num_variants, len(times)), strict=True))
    ]


def bound_s(world: World, ahead: int, num_context: int) -> float:
    """The formula in tenure.py's docstring; `num_context` tokens are what one variant's jobs hold at most."""
    limits, slots = world.limits, world.slots
    fullest_s = world.costs.step_s + world.costs.token_s * limits.max_batch_tokens + 0.01
    per_step = limits.recompute_share * limits.max_num_seqs
    turn_s = limits.tenure_s + slots.load_s + 8 * fullest_s
    return (
        limits.cold_wait_s
        + math.ceil((ahead + 1) / slots.num_slots) * turn_s
        + (ahead + 1) * num_context / per_step * fullest_s
    )


@pytest.mark.parametrize(("num_output", "load_s"), [(40, 0.02), (40, 0.3), (600, 0.1)])
def test_a_cold_variant_waits_no_longer_than_the_bound_says(num_output: int, load_s: float) -> None:
    world = World(SEATS, slots=SimSlots(4, load_s))
    rng = random.Random(1)
    flood = hot(4, 40.0, num_output, per_s=480 / num_output)
    cold = [SimJob(f"c{i}", f"cold{i}", f"c{i}", 32, 20, 5 + 20 * rng.random()) for i in range(12)]
    simulate(world, [*flood, *cold], until_s=60.0)
    num_context = 4 * (32 + num_output)
    assert max(job.first_token_s for job in cold) <= bound_s(world, 15, num_context)
    assert statistics.median(job.first_token_s for job in cold) <= SEATS.cold_wait_s + 1.0


def test_first_come_first_served_lets_a_cold_variant_starve() -> None:
    """What is to be better than: there, a slot is free only when by chance none of its variant's jobs runs."""
    world = World(SEATS, slots=SimSlots(4, 0.1))
    cold = SimJob("cold", "cold", "c", 32, 20, 5.0)
    simulate(world, [*hot(4, 60.0, 600, 0.8), cold], FifoScheduler(world, skips=True), until_s=60.0)
    assert not cold.token_times


def test_one_tenants_many_cold_variants_do_not_stand_before_another_ones() -> None:
    world = World(SEATS, slots=SimSlots(4, 0.1))
    flood = [SimJob(f"f{i}", "flood", f"f{i}", 32, 60, 0.0) for i in range(300)]
    one = SimJob("one", "light", "v", 32, 20, 2.0)
    simulate(world, [*flood, one])
    assert one.first_token_s < SEATS.cold_wait_s + 1.0
    assert max(job.first_token_s for job in flood) > 20.0


def test_everybody_is_served_with_many_more_variants_than_slots() -> None:
    world = World(SEATS, slots=SimSlots(4, 0.05))
    jobs = [SimJob(f"j{i}", f"t{i % 7}", f"v{i % 50}", 16, 40, 0.0) for i in range(1000)]
    simulate(world, jobs)
    assert all(job.num_generated == 40 for job in jobs)
    assert world.slots.num_loaded < 300


def test_twice_as_many_variants_as_slots_do_not_thrash() -> None:
    """At 0.7 of what the simulated engine can do: first tokens, and loads, beside first come, first served."""
    jobs, peers = popular(0, 20.0, 60.0, 16), popular(0, 20.0, 60.0, 16)
    fitting = popular(0, 20.0, 60.0, 16)
    world, peer = World(), World()
    simulate(world, jobs)
    simulate(peer, peers, FifoScheduler(peer, skips=False))
    simulate(World(slots=SimSlots(16, 0.02)), fitting)
    median, of_peer, warm = (
        statistics.median(job.first_token_s for job in each) for each in (jobs, peers, fitting)
    )
    assert median < 2 * warm
    assert median < 0.01 * of_peer
    assert world.slots.num_loaded < 0.2 * len(jobs)
    assert world.slots.num_loaded < 0.6 * peer.slots.num_loaded
    assert world.num_tokens < 1.01 * sum(job.num_tokens - 1 for job in jobs)


def test_what_is_displaced_for_slots_is_a_bounded_share_of_the_work() -> None:
    """Long jobs on every slot, slow loads, and no patience: still most of the work is done once."""
    limits = SchedulerLimits(max_num_seqs=16, max_batch_tokens=128, cold_wait_s=0.5, tenure_s=0.1)
    jobs = [SimJob(f"j{i}", f"t{i % 5}", f"v{i % 12}", 64, 200, i * 0.05) for i in range(200)]
    world = World(limits, slots=SimSlots(4, 1.0))
    simulate(world, jobs)
    assert sum(job.num_preempted for job in jobs) > 20
    assert world.num_tokens < 1.4 * sum(job.num_tokens - 1 for job in jobs)


def test_a_variant_keeps_its_slot_for_a_tenure() -> None:
    limits = SchedulerLimits(max_num_seqs=8, max_batch_tokens=64, cold_wait_s=0.0, tenure_s=1.0)
    world = World(limits, slots=SimSlots(1, 0.05))
    simulate(world, [SimJob(f"j{i}", "a", f"v{i % 2}", 16, 20, i * 0.02) for i in range(400)])
    assert 2 < world.slots.num_loaded <= world.end_s / limits.tenure_s + 2


def test_every_load_serves_somebody() -> None:
    """Also where the tenure is over before there is a seat."""
    limits = SchedulerLimits(max_num_seqs=2, max_batch_tokens=64, cold_wait_s=0.0, tenure_s=0.0)
    jobs = [SimJob(f"j{i}", f"t{i}", f"v{i % 6}", 16, 30, 0.0) for i in range(60)]
    world = World(limits, slots=SimSlots(3, 0.01))
    simulate(world, jobs)
    assert world.slots.num_loaded <= len(jobs) + sum(job.num_preempted for job in jobs)


def test_hot_variants_stay_while_idle_ones_can_make_place() -> None:
    world = World(slots=SimSlots(4, 0.02))
    flood = hot(2, 20.0, 100, per_s=4.0)
    rare = [SimJob(f"r{i}", "rare", f"r{i}", 16, 5, 1.0 + i * 0.5) for i in range(30)]
    simulate(world, [*flood, *rare])
    assert world.slots.num_loaded == 2 + 30
    assert sum(job.num_preempted for job in flood) == 0


def test_the_variant_with_the_fewest_jobs_makes_place() -> None:
    world = World(SEATS, slots=SimSlots(2, 0.0))
    scheduler = world.scheduler()
    jobs = [SimJob(f"j{i}", f"t{i}", "crowded" if i else "lonely", 8, 500, 0.0) for i in range(5)]
    for job in jobs:
        scheduler.add(job, 0.0)
    scheduler.plan(0.0)
    world.slots.adopt(0.1)
    for job, num_tokens in scheduler.plan(0.1).batch:
        job.num_computed_tokens += num_tokens
        job.num_tokens += 1
    scheduler.add(SimJob("cold", "c", "v", 8, 8, 0.2), 0.2)
    plan = scheduler.plan(3.0)
    assert [job.id for job in plan.preempted] == ["j0"]
    assert world.slots.is_loading("v")


def test_a_pinned_variant_is_never_closed() -> None:
    world = World(replace(SEATS, seat_wait_s=60.0), slots=SimSlots(2, 0.05))
    world.slots.pinned = {"h0"}
    loud = hot(1, 20.0, 100, per_s=4.0)
    rest = [SimJob(f"r{i}", f"r{i}", f"r{i % 5}", 16, 60, 1.0 + i * 0.1) for i in range(100)]
    simulate(world, [*loud, *rest])
    assert sum(job.num_preempted for job in loud) == 0


def test_with_every_slot_pinned_the_others_run_on() -> None:
    world = World(SEATS, slots=SimSlots(1, 0.01))
    world.slots.pinned = {"h0"}
    loud = hot(1, 5.0, 20, per_s=4.0)
    cold = SimJob("cold", "c", "v", 16, 16, 0.5, cancel_at=20.0)
    simulate(world, [*loud, cold])
    assert not cold.token_times
    assert max(job.first_token_s for job in loud) < 0.5


def test_a_closed_variant_opens_again_when_those_who_waited_have_gone() -> None:
    """Closed for `gone` at 3.0; `late` would else wait until `runs` has ended, at about 11."""
    world = World(SEATS, slots=SimSlots(1, 0.02))
    runs, late = (SimJob(f"j{at}", "a", "h", 16, 1000, at) for at in (0.0, 3.2))
    gone = SimJob("gone", "g", "g", 16, 10, 2.0, cancel_at=3.5)
    simulate(world, [runs, late, gone])
    assert world.slots.num_loaded == 1
    assert 0.3 <= late.first_token_s < 0.4


def test_what_has_made_no_token_yet_is_not_displaced_for_a_slot() -> None:
    limits = SchedulerLimits(max_num_seqs=4, max_batch_tokens=64, cold_wait_s=0.0, tenure_s=0.0)
    world = World(limits, slots=SimSlots(1, 0.0))
    scheduler = world.scheduler()
    long = SimJob("long", "a", "v", 128, 10, 0.0)
    scheduler.add(long, 0.0)
    scheduler.plan(0.0)
    world.slots.adopt(0.1)
    scheduler.add(SimJob("cold", "b", "w", 8, 8, 0.2), 0.2)
    for now in (0.2, 0.3):
        assert scheduler.plan(now).batch == [(long, 64)]
        long.num_computed_tokens += 64
    long.num_tokens += 1
    assert scheduler.plan(0.4).preempted == [long]


def test_a_delta_that_somebody_else_loads_is_found() -> None:
    world = World(slots=SimSlots(4, 0.5))
    world.slots.load("v")
    scheduler = world.scheduler()
    job = SimJob("j", "a", "v", 8, 8, 0.0)
    scheduler.add(job, 0.0)
    assert scheduler.plan(0.0).wants == ("v",)
    world.slots.adopt(0.6)
    assert scheduler.plan(0.6).batch == [(job, 8)]
    assert world.slots.num_loaded == 1


def test_a_prefetched_delta_is_found_though_others_wait_for_slots() -> None:
    world = World(SEATS, slots=SimSlots(2, 0.0))
    world.slots.pinned = {"p", "q"}
    scheduler = world.scheduler()
    for digest in ("cold", "p"):
        scheduler.add(SimJob(digest, digest, digest, 8, 8, 0.0), 0.0)
    world.slots.load("q")
    world.slots.load("p")
    assert scheduler.plan(0.0).batch == []
    world.slots.adopt(0.1)
    assert [job.id for job, _ in scheduler.plan(0.1).batch] == ["p"]


def test_a_load_that_failed_is_begun_again_for_those_who_still_wait() -> None:
    world = World(slots=SimSlots(2, 0.1))
    scheduler = world.scheduler()
    fails, stays = SimJob("fails", "a", "v", 8, 8, 0.0), SimJob("stays", "a", "v", 8, 8, 0.0)
    scheduler.add(fails, 0.0)
    scheduler.plan(0.0)
    world.slots.fail("v")
    scheduler.remove(fails)
    assert scheduler.plan(0.1).wants == ()
    scheduler.add(stays, 0.2)
    scheduler.plan(0.2)
    world.slots.fail("v")
    assert scheduler.plan(0.3).wants == ("v",)
    assert world.slots.is_loading("v")


def test_short_jobs_do_not_keep_a_variant_in_its_slot_for_ever() -> None:
    """They are idle between two steps only: the next ones are there before a slot is looked for."""
    world = World(SEATS, slots=SimSlots(1, 0.02))
    scheduler = world.scheduler()
    cold = SimJob("cold", "c", "v", 8, 8, 0.0)
    now, first = 0.0, 0.0
    for number in range(1000):
        scheduler.add(SimJob(f"s{number}", "a", "hot", 8, 1, now), now)
        if number == 20:
            scheduler.add(cold, now)
            first = now
        plan: Plan[SimJob] = scheduler.plan(now)
        now += 0.02
        world.slots.adopt(now)
        if cold in [job for job, _ in plan.batch]:
            break
        for job, _ in plan.batch:
            scheduler.remove(job)
    assert cold in scheduler.running
    assert now - first < 1.0


def test_pages_and_slots_short_together_everything_ends() -> None:
    world = World(SEATS, pages=SimPages(60), slots=SimSlots(3, 0.2))
    jobs = popular(3, 10.0, 40.0, 12)
    simulate(world, jobs)
    assert all(job.num_generated == job.num_output for job in jobs)
    assert sum(job.num_preempted for job in jobs) > 0
