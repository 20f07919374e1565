"""Who gets how much: tenants among each other, and the variants of one tenant. Tokens and simulated time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from server.engine.scheduling.fair_queue import FairQueue, Lane, Tenant, Turns, charge
from server.engine.scheduling.scheduler import Plan, SchedulerLimits
from tests.server.helpers.simulation import SimJob, World, poisson, simulate

Key = Callable[[SimJob], str]
FEW_SEATS = SchedulerLimits(max_num_seqs=8, max_batch_tokens=128)


def backlog(
    tenant: str, num: int, num_prompt: int, num_output: int, digest: str | None = None, at: float = 0.0
) -> list[SimJob]:
    return [SimJob(f"{tenant}-{digest}-{i}", tenant, digest, num_prompt, num_output, at) for i in range(num)]


def cost_until(world: World, jobs: list[SimJob], until_s: float, key: Key) -> Counter[str]:
    """What each got in that time: prompt tokens, and generated ones twice."""
    got: Counter[str] = Counter()

    def count(plan: Plan[SimJob], now: float) -> None:
        for job, num_tokens in plan.batch:
            got[key(job)] += 2 if job.num_generated > 1 or num_tokens == 1 else num_tokens

    world.on_step = count
    simulate(world, jobs, until_s=until_s)
    return got


def by_tenant(job: SimJob) -> str:
    return job.tenant


def test_tenants_get_the_same_whatever_the_shape_and_number_of_their_requests() -> None:
    jobs = backlog("many", 1000, 20, 20) + backlog("prompts", 300, 200, 5) + backlog("talks", 300, 10, 150)
    got = cost_until(World(FEW_SEATS), jobs, 20.0, by_tenant)
    assert max(got.values()) < 1.15 * min(got.values())


def test_a_tenant_that_asks_for_less_than_its_share_gets_all_of_it() -> None:
    rng = random.Random(0)
    flood = backlog("flood", 1500, 20, 20)
    light = [SimJob(f"l{i}", "light", None, 20, 20, t) for i, t in enumerate(poisson(rng, 2.0, 20.0))]
    simulate(World(FEW_SEATS), flood + light)
    assert max(job.first_token_s for job in light) < 0.5
    assert max(job.first_token_s for job in flood) > 20


def test_one_request_does_not_wait_behind_another_tenants_thousand() -> None:
    one = SimJob("one", "light", None, 50, 10, 1.0)
    simulate(World(FEW_SEATS), [*backlog("flood", 1000, 50, 50), one])
    assert one.first_token_s < 0.6


def test_variants_of_one_tenant_get_the_same() -> None:
    jobs = backlog("a", 600, 20, 20, "v1") + backlog("a", 200, 100, 10, "v2") + backlog("a", 300, 20, 20)
    limits = SchedulerLimits(max_num_seqs=8, max_batch_tokens=128, delta_cost_tokens=0.0)
    got = cost_until(World(limits), jobs, 12.0, lambda job: job.digest or "base")
    assert max(got.values()) < 1.2 * min(got.values())


def test_a_tenant_with_many_variants_gets_no_more_than_one_with_one() -> None:
    jobs = backlog("single", 600, 20, 20, "s") + [
        job for index in range(7) for job in backlog("many", 100, 20, 20, f"v{index}")
    ]
    got = cost_until(World(FEW_SEATS), jobs, 12.0, by_tenant)
    assert got["many"] < 1.05 * got["single"]


def test_reading_many_deltas_is_paid_for() -> None:
    limits = SchedulerLimits(max_num_seqs=16, max_batch_tokens=128, delta_cost_tokens=8.0)
    jobs = backlog("single", 900, 20, 20, "s") + [
        job for index in range(7) for job in backlog("many", 100, 20, 20, f"v{index}")
    ]
    got = cost_until(World(limits), jobs, 12.0, by_tenant)
    assert got["many"] < 0.7 * got["single"]


def test_idle_time_is_not_saved_up() -> None:
    jobs = (
        backlog("steady", 1000, 20, 20) + backlog("returns", 1, 20, 20) + backlog("late", 500, 20, 20, at=8.0)
    )
    jobs += backlog("returns", 500, 20, 20, digest=None, at=8.0)[1:]
    got: Counter[str] = Counter()

    def count(plan: Plan[SimJob], now: float) -> None:
        if now > 8.0:
            got.update(job.tenant for job, num_tokens in plan.batch)

    world = World(FEW_SEATS, on_step=count)
    simulate(world, jobs, until_s=14.0)
    assert max(got.values()) < 1.2 * min(got.values())


def test_a_tenant_that_runs_alone_does_not_pay_for_it_later() -> None:
    early = [SimJob(f"e{i}", "early", None, 20, 20, i * 0.1) for i in range(200)]
    late = backlog("late", 500, 20, 20, at=10.0)
    simulate(World(FEW_SEATS), early + late)
    assert max(job.first_token_s for job in early) < 0.5


def test_long_jobs_give_a_seat_to_a_tenant_that_has_none() -> None:
    limits = SchedulerLimits(max_num_seqs=8, max_batch_tokens=128, seat_wait_s=2.0)
    one = SimJob("one", "light", None, 50, 10, 1.0)
    flood = backlog("flood", 20, 50, 2000)
    simulate(World(limits), [*flood, one])
    assert 2.0 <= one.first_token_s < 2.2
    assert sum(job.num_preempted for job in flood) == 1


def test_a_tenants_only_seat_is_not_taken_from_it() -> None:
    limits = SchedulerLimits(max_num_seqs=4, max_batch_tokens=64, seat_wait_s=0.5)
    jobs = [SimJob(f"j{i}", f"t{i}", None, 20, 500, 0.0) for i in range(12)]
    simulate(World(limits), jobs)
    assert sum(job.num_preempted for job in jobs) == 0


def test_variants_of_one_tenant_take_turns_at_its_seats() -> None:
    limits = SchedulerLimits(max_num_seqs=8, max_batch_tokens=128, seat_wait_s=2.0)
    one = SimJob("one", "a", "quiet", 50, 10, 1.0)
    simulate(World(limits), [*backlog("a", 20, 50, 2000, "loud"), one])
    assert 2.0 <= one.first_token_s < 2.3


def test_nobody_is_first_twice_in_one_step() -> None:
    world = World(SchedulerLimits(max_num_seqs=6, max_batch_tokens=128))
    scheduler = world.scheduler()
    for tenant in ("a", "b", "c"):
        for job in backlog(tenant, 5, 10, 10):
            scheduler.add(job, 0.0)
    assert Counter(job.tenant for job, _ in scheduler.plan(0.0).batch) == {"a": 2, "b": 2, "c": 2}


def test_counters_of_those_who_left_are_forgotten_when_they_are_worth_nothing() -> None:
    turns: Turns[int, Tenant[SimJob]] = Turns(lambda number: Tenant(str(number)))
    steady = turns.member(-1)
    steady.num_waiting, lane = 1, steady.lanes.member(None)
    lane.num_waiting = 1
    steady.lanes.enter(lane)
    turns.enter(steady)
    for number in range(10_000):
        turns.member(number).counter = float(number)
        steady.counter = float(number)
        turns.least()
    assert len(turns._members) < 1000
    assert turns.member(-1) is steady


def test_jobs_that_leave_while_they_wait_do_not_pile_up() -> None:
    world = World()
    scheduler = world.scheduler()
    scheduler.add(SimJob("stays", "a", "cold", 10, 10, 0.0), 0.0)
    for job in backlog("a", 5000, 10, 10, "cold"):
        scheduler.add(job, 0.0)
        scheduler.remove(job)
    lane = scheduler._queue.lane("a", "cold")
    assert lane.num_waiting == 1
    assert len(lane.heap) < 50


@pytest.mark.parametrize("seed", range(3))
def test_the_first_is_always_of_the_tenant_and_the_lane_that_got_least(seed: int) -> None:
    rng = random.Random(seed)
    queue = FairQueue[SimJob]()
    world = World()
    scheduler = world.scheduler()
    scheduler._queue = queue
    lanes: set[Lane[SimJob]] = set()
    for number in range(400):
        job = SimJob(f"j{number}", f"t{rng.randrange(9)}", None, 10, 10, 0.0)
        scheduler.add(job, 0.0)
        lanes.add(queue.lane(job.tenant, None))
        charge(rng.choice(sorted(lanes, key=lambda lane: lane.tenant.name)), rng.randrange(50))
        if rng.random() < 0.7 and (first := queue.first()) is not None:
            ready = [lane.tenant.counter for lane in lanes if lane.is_ready]
            assert first.lane.tenant.counter == min(ready)
            queue.take(first)
