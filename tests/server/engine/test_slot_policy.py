"""Slots of variants in simulated time: bounded waits for cold ones, no thrashing, few preemptions."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import replace

import pytest

from server.engine.slot_policy import MAX_TAKING
from tests.server.helpers.simulation import (
    TOKEN,
    FifoScheduler,
    SimResidency,
    SimSequence,
    Simulation,
    pages,
    poisson,
    simulate,
    step_limits,
    zipf,
)

LIMITS = step_limits(max_num_seqs=16, max_batch_tokens=128, cold_wait_s=2.0, min_resident_s=0.5)


def hot(num_variants: int, seconds: float, num_output: int, per_s: float) -> list[SimSequence]:
    """Make sequences of variants that always have some waiting."""
    rng = random.Random(0)
    return [
        SimSequence(f"h{v}-{i}", f"hot{v}", f"h{v}", 32, num_output, time)
        for v in range(num_variants)
        for i, time in enumerate(poisson(rng, per_s, seconds))
    ]


def popular(seed: int, per_s: float, seconds: float, num_variants: int) -> list[SimSequence]:
    """Make sequences of four tenants for variants of very different popularity."""
    rng = random.Random(seed)
    times = poisson(rng, per_s, seconds)
    return [
        SimSequence(f"j{i}", f"t{rng.randrange(4)}", digest, rng.randint(32, 96), rng.randint(32, 96), time)
        for i, (time, digest) in enumerate(zip(times, zipf(rng, num_variants, len(times)), strict=True))
    ]


def bound_s(sim: Simulation, ahead: int, num_context: int) -> float:
    """Compute the bound in slot_policy.py's docstring; one variant's sequences hold at most `num_context` tokens."""
    limits, constants, residency = sim.limits, sim.limits.constants, sim.residency
    fullest_s = sim.costs.step_s + sim.costs.token_s * limits.max_batch_tokens + 0.01
    per_step = constants.recompute_share * limits.max_num_seqs
    turn_s = constants.min_resident_s + residency.load_s + 8 * fullest_s
    return (
        constants.cold_wait_s
        + math.ceil((ahead + 1) / residency.num_sim_slots) * turn_s
        + (ahead + 1) * num_context / per_step * fullest_s
    )


@pytest.mark.parametrize(("num_output", "load_s"), [(40, 0.02), (40, 0.3), (600, 0.1)])
def test_a_cold_variant_waits_no_longer_than_the_bound_says(num_output: int, load_s: float) -> None:
    sim = Simulation(LIMITS, residency=SimResidency(4, load_s))
    rng = random.Random(1)
    flood = hot(4, 40.0, num_output, per_s=480 / num_output)
    cold = [SimSequence(f"c{i}", f"cold{i}", f"c{i}", 32, 20, 5 + 20 * rng.random()) for i in range(12)]
    simulate(sim, [*flood, *cold], until_s=60.0)
    num_context = 4 * (32 + num_output)
    assert max(sequence.first_token_s for sequence in cold) <= bound_s(sim, 15, num_context)
    assert (
        statistics.median(sequence.first_token_s for sequence in cold) <= LIMITS.constants.cold_wait_s + 1.0
    )


def test_first_come_first_served_lets_a_cold_variant_starve() -> None:
    """The baseline to beat: its slots are free only when by chance no sequence of their variant runs."""
    sim = Simulation(LIMITS, residency=SimResidency(4, 0.1))
    cold = SimSequence("cold", "cold", "c", 32, 20, 5.0)
    simulate(sim, [*hot(4, 60.0, 600, 0.8), cold], FifoScheduler(sim, skips=True), until_s=60.0)
    assert not cold.token_times


def test_one_tenants_many_cold_variants_do_not_delay_another_tenants() -> None:
    sim = Simulation(LIMITS, residency=SimResidency(4, 0.1))
    flood = [SimSequence(f"f{i}", "flood", f"f{i}", 32, 60, 0.0) for i in range(300)]
    one = SimSequence("one", "light", "v", 32, 20, 2.0)
    simulate(sim, [*flood, one])
    assert one.first_token_s < LIMITS.constants.cold_wait_s + 1.0
    assert max(sequence.first_token_s for sequence in flood) > 20.0


def flood_of_versions(num_prompt: int = 32) -> list[SimSequence]:
    """Make four long sequences of each of 300 variants of one tenant, all at the beginning."""
    return [SimSequence(f"f{i}", "flood", f"f{i // 4}", num_prompt, 400, 0.1) for i in range(1200)]


def longest_gap_s(sequence: SimSequence) -> float:
    return max(later - earlier for earlier, later in itertools.pairwise(sequence.token_times))


@pytest.mark.parametrize("num_prompt", [32, 1000])
def test_a_tenant_with_one_variant_keeps_its_slot_beside_one_with_hundreds(num_prompt: int) -> None:
    sim = Simulation(LIMITS, residency=SimResidency(4, 0.1))
    streams = [SimSequence(f"s{i}", "light", "v", 32, 600, 0.0) for i in range(2)]
    simulate(sim, [*streams, *flood_of_versions(num_prompt)], until_s=60.0)
    for stream in streams:
        assert stream.num_preempted == 0
        assert longest_gap_s(stream) < 0.5


def test_a_tenant_without_a_slot_takes_one_of_a_tenant_that_has_many() -> None:
    sim = Simulation(LIMITS, residency=SimResidency(4, 0.1))
    late = [SimSequence(f"s{i}", "light", f"v{i}", 32, 20, 5.0 + 3.0 * i) for i in range(6)]
    simulate(sim, [*flood_of_versions(), *late], until_s=60.0)
    assert max(sequence.first_token_s for sequence in late) < LIMITS.constants.cold_wait_s + 1.0


@pytest.mark.parametrize("num_prompt", [32, 1500])
def test_chats_that_follow_one_another_keep_their_slot(num_prompt: int) -> None:
    sim = Simulation(LIMITS, residency=SimResidency(4, 0.1))
    chats = [SimSequence(f"s{i}", "light", "v", 32, 20, 3.0 + 4.0 * i) for i in range(8)]
    simulate(sim, [*flood_of_versions(num_prompt), *chats], until_s=60.0)
    # The slot of the first one is kept for the others.
    assert max(chat.first_token_s for chat in chats[1:]) < 0.2


def test_a_tenant_whose_slot_was_taken_gets_another_without_a_long_wait() -> None:
    sim = Simulation(LIMITS, residency=SimResidency(4, 0.1))
    chats = [SimSequence(f"s{i}", "light", "v", 32, 20, 3.0 + 12.0 * i) for i in range(4)]
    simulate(sim, [*flood_of_versions(), *chats], until_s=60.0)
    assert max(chat.first_token_s for chat in chats) < LIMITS.constants.min_resident_s + 0.5


def test_one_tenant_keeps_no_slot_of_its_own_idle_variants() -> None:
    sim = Simulation(LIMITS, residency=SimResidency(2, 0.1))
    turns = [SimSequence(f"s{i}", "one", f"v{i % 5}", 32, 20, 1.0 * i) for i in range(20)]
    simulate(sim, turns)
    assert max(turn.first_token_s for turn in turns) < 0.5


def test_an_idle_variant_keeps_no_slot_from_a_tenant_without_one() -> None:
    sim = Simulation(LIMITS, residency=SimResidency(2, 0.1))
    users = [SimSequence(f"s{i}", f"t{i % 5}", f"v{i % 5}", 32, 20, 1.0 * i) for i in range(20)]
    simulate(sim, users)
    assert max(user.first_token_s for user in users) < 0.5


def test_the_residency_is_told_of_each_tenant_that_uses_a_variant() -> None:
    """Also of those whose sequences end while others go on."""
    sim = Simulation(LIMITS, residency=SimResidency(2, 0.1))
    ends = {"first": 20, "short": 10, "long": 100}
    simulate(sim, [SimSequence(name, name, "v", 32, end, 0.0) for name, end in ends.items()])
    assert sim.residency.used == {("v", name) for name in ends}


def test_slots_of_idle_variants_are_kept_for_a_while_only() -> None:
    sim = Simulation(LIMITS, residency=SimResidency(2, 0.1))
    chat = SimSequence("s", "light", "v", 32, 20, 0.0)
    busy = SimSequence("b", "busy", "b0", 32, 2000, 0.5)
    second = SimSequence("c", "busy", "b1", 32, 20, 4.0)
    simulate(sim, [chat, busy, second], until_s=20.0)
    ended_at = chat.token_times[-1]
    kept_until = ended_at + LIMITS.constants.keep_idle_s
    assert kept_until <= second.token_times[0] < kept_until + 0.5


def test_a_tenant_that_may_take_no_slot_delays_no_other() -> None:
    sim = Simulation(LIMITS, residency=SimResidency(4, 0.1))
    sim.residency.pinned = {"p", "q"}
    pinned = [SimSequence(each, "pinning", each, 32, 2000, 0.0) for each in ("p", "q")]
    waiting = SimSequence("r", "pinning", "r", 32, 20, 3.0)
    flood = [SimSequence(f"f{i}", "flood", f"f{i}", 32, 400, 0.1) for i in range(300)]
    late = [SimSequence(f"s{i}", "light", f"v{i}", 32, 20, 6.0 + 10.0 * i) for i in range(4)]
    simulate(sim, [*pinned, waiting, *flood, *late], until_s=50.0)
    # One of them has to wait until as many tokens have been computed as the one before it made others lose.
    assert max(sequence.first_token_s for sequence in late) < 2 * LIMITS.constants.cold_wait_s
    assert statistics.median(sequence.first_token_s for sequence in late) < 1.0


def test_one_tenants_loads_into_free_slots_do_not_delay_another_tenants() -> None:
    sim = Simulation(residency=SimResidency(64, 1.0, num_loads=2))
    many = [SimSequence(f"m{i}", "many", f"m{i}", 8, 4, 0.0) for i in range(40)]
    other = SimSequence("other", "other", "o", 8, 4, 0.5)
    simulate(sim, [*many, other])
    # Four loads by two threads are ahead of it.
    assert other.first_token_s < 4.0


def test_every_sequence_is_served_with_many_more_variants_than_slots() -> None:
    sim = Simulation(LIMITS, residency=SimResidency(4, 0.05))
    sequences = [SimSequence(f"j{i}", f"t{i % 7}", f"v{i % 50}", 16, 40, 0.0) for i in range(1000)]
    simulate(sim, sequences)
    assert all(sequence.num_generated == 40 for sequence in sequences)
    assert sim.residency.num_loaded < 300


def test_twice_as_many_variants_as_slots_do_not_thrash() -> None:
    """Compare first tokens and loads with first come, first served, at 0.7 of the simulated engine's capacity."""
    sequences, peers = popular(0, 20.0, 60.0, 16), popular(0, 20.0, 60.0, 16)
    fitting = popular(0, 20.0, 60.0, 16)
    sim, peer = Simulation(), Simulation()
    simulate(sim, sequences)
    simulate(peer, peers, FifoScheduler(peer, skips=False))
    simulate(Simulation(residency=SimResidency(16, 0.02)), fitting)
    median, of_peer, warm = (
        statistics.median(sequence.first_token_s for sequence in each) for each in (sequences, peers, fitting)
    )
    assert median < 2 * warm
    assert median < 0.01 * of_peer
    assert sim.residency.num_loaded < 0.2 * len(sequences)
    assert sim.residency.num_loaded < 0.6 * peer.residency.num_loaded
    assert sim.num_tokens < 1.01 * sum(sequence.num_tokens - 1 for sequence in sequences)


def test_recomputation_for_slots_is_a_bounded_share_of_the_work() -> None:
    """With long sequences in each slot, slow loads and a short `cold_wait_s`, most tokens are still computed once."""
    limits = step_limits(max_num_seqs=16, max_batch_tokens=128, cold_wait_s=0.5, min_resident_s=0.1)
    sequences = [SimSequence(f"j{i}", f"t{i % 5}", f"v{i % 12}", 64, 200, i * 0.05) for i in range(200)]
    sim = Simulation(limits, residency=SimResidency(4, 1.0))
    simulate(sim, sequences)
    assert sum(sequence.num_preempted for sequence in sequences) > 20
    assert sim.num_tokens < 1.4 * sum(sequence.num_tokens - 1 for sequence in sequences)


def test_a_variant_keeps_its_slot_for_min_resident_s() -> None:
    limits = step_limits(max_num_seqs=8, max_batch_tokens=64, cold_wait_s=0.0, min_resident_s=1.0)
    sim = Simulation(limits, residency=SimResidency(1, 0.05))
    simulate(sim, [SimSequence(f"j{i}", "a", f"v{i % 2}", 16, 20, i * 0.02) for i in range(400)])
    assert 2 < sim.residency.num_loaded <= sim.end_s / limits.constants.min_resident_s + 2


def test_every_load_serves_a_sequence() -> None:
    """Also if `min_resident_s` is over before a sequence can be admitted."""
    limits = step_limits(max_num_seqs=2, max_batch_tokens=64, cold_wait_s=0.0, min_resident_s=0.0)
    sequences = [SimSequence(f"j{i}", f"t{i}", f"v{i % 6}", 16, 30, 0.0) for i in range(60)]
    sim = Simulation(limits, residency=SimResidency(3, 0.01))
    simulate(sim, sequences)
    assert sim.residency.num_loaded <= len(sequences) + sum(sequence.num_preempted for sequence in sequences)


def test_hot_variants_stay_while_idle_ones_can_be_evicted() -> None:
    sim = Simulation(residency=SimResidency(4, 0.02))
    flood = hot(2, 20.0, 100, per_s=4.0)
    rare = [SimSequence(f"r{i}", "rare", f"r{i}", 16, 5, 1.0 + i * 0.5) for i in range(30)]
    simulate(sim, [*flood, *rare])
    assert sim.residency.num_loaded == 2 + 30
    assert sum(sequence.num_preempted for sequence in flood) == 0


def test_the_variant_with_the_fewest_sequences_gives_its_slot_up() -> None:
    sim = Simulation(LIMITS, residency=SimResidency(2, 0.0))
    scheduler = sim.scheduler()
    sequences = [SimSequence(f"j{i}", f"t{i}", "crowded" if i else "lonely", 8, 500, 0.0) for i in range(5)]
    for each in sequences:
        scheduler.add(each, 0.0)
    scheduler.plan(0.0)
    sim.end_loads(scheduler, 0.1)
    for sequence, num_tokens in scheduler.plan(0.1).batch.items():
        sequence.num_computed_tokens += num_tokens
        sequence.generated_ids.append(TOKEN)
    scheduler.add(SimSequence("cold", "c", "v", 8, 8, 0.2), 0.2)
    plan = scheduler.plan(3.0)
    assert [sequence.id for sequence in plan.preempted] == ["j0"]
    assert sim.residency.is_loading("v")


def test_a_pinned_variant_is_never_closed() -> None:
    limits = replace(LIMITS, constants=replace(LIMITS.constants, preempt_wait_s=60.0))
    sim = Simulation(limits, residency=SimResidency(2, 0.05))
    sim.residency.pinned = {"h0"}
    loud = hot(1, 20.0, 100, per_s=4.0)
    rest = [SimSequence(f"r{i}", f"r{i}", f"r{i % 5}", 16, 60, 1.0 + i * 0.1) for i in range(100)]
    simulate(sim, [*loud, *rest])
    assert sum(sequence.num_preempted for sequence in loud) == 0


def test_with_every_slot_pinned_the_others_run_on() -> None:
    sim = Simulation(LIMITS, residency=SimResidency(1, 0.01))
    sim.residency.pinned = {"h0"}
    loud = hot(1, 5.0, 20, per_s=4.0)
    cold = SimSequence("cold", "c", "v", 16, 16, 0.5, cancel_at=20.0)
    simulate(sim, [*loud, cold])
    assert not cold.token_times
    assert max(sequence.first_token_s for sequence in loud) < 0.5


def test_a_closed_variant_opens_again_when_the_variants_that_waited_have_gone() -> None:
    """Closed for `gone` at 3.0; `late` would else wait until `runs` has ended, at about 11."""
    sim = Simulation(LIMITS, residency=SimResidency(1, 0.02))
    runs, late = (SimSequence(f"j{at}", "a", "h", 16, 1000, at) for at in (0.0, 3.2))
    gone = SimSequence("gone", "g", "g", 16, 10, 2.0, cancel_at=3.5)
    simulate(sim, [runs, late, gone])
    assert sim.residency.num_loaded == 1
    assert 0.3 <= late.first_token_s < 0.4


def test_a_sequence_without_a_token_is_not_preempted_for_a_slot() -> None:
    limits = step_limits(max_num_seqs=4, max_batch_tokens=64, cold_wait_s=0.0, min_resident_s=0.0)
    sim = Simulation(limits, residency=SimResidency(1, 0.0))
    scheduler = sim.scheduler()
    long = SimSequence("long", "a", "v", 128, 10, 0.0)
    scheduler.add(long, 0.0)
    scheduler.plan(0.0)
    sim.end_loads(scheduler, 0.1)
    scheduler.add(SimSequence("cold", "b", "w", 8, 8, 0.2), 0.2)
    for now in (0.2, 0.3):
        assert scheduler.plan(now).batch == {long: 64}
        long.num_computed_tokens += 64
    long.generated_ids.append(TOKEN)
    assert scheduler.plan(0.4).preempted == [long]


def test_a_delta_that_a_prefetch_loads_is_found() -> None:
    sim = Simulation(residency=SimResidency(4, 0.5))
    sim.residency.load("v", "other")
    scheduler = sim.scheduler()
    sequence = SimSequence("j", "a", "v", 8, 8, 0.0)
    scheduler.add(sequence, 0.0)
    assert not scheduler.plan(0.0).batch
    sim.end_loads(scheduler, 0.6)
    assert scheduler.plan(0.6).batch == {sequence: 8}
    assert sim.residency.num_loaded == 1


def test_a_prefetched_delta_is_found_though_others_wait_for_slots() -> None:
    sim = Simulation(LIMITS, residency=SimResidency(2, 0.0))
    sim.residency.pinned = {"p", "q"}
    scheduler = sim.scheduler()
    for digest in ("cold", "p"):
        scheduler.add(SimSequence(digest, digest, digest, 8, 8, 0.0), 0.0)
    sim.residency.load("q", "other")
    sim.residency.load("p", "other")
    assert not scheduler.plan(0.0).batch
    sim.end_loads(scheduler, 0.1)
    assert [sequence.id for sequence in scheduler.plan(0.1).batch] == ["p"]


def test_a_load_that_failed_is_begun_again_for_sequences_that_still_wait() -> None:
    sim = Simulation(residency=SimResidency(2, 0.1))
    scheduler = sim.scheduler()
    fails, stays = SimSequence("fails", "a", "v", 8, 8, 0.0), SimSequence("stays", "a", "v", 8, 8, 0.0)
    scheduler.add(fails, 0.0)
    scheduler.plan(0.0)
    sim.fail_load(scheduler, "v", 0.1)
    scheduler.remove(fails)
    scheduler.plan(0.1)
    assert not sim.residency.is_loading("v")
    scheduler.add(stays, 0.2)
    scheduler.plan(0.2)
    sim.fail_load(scheduler, "v", 0.3)
    scheduler.plan(0.3)
    assert sim.residency.is_loading("v")


def test_the_end_of_a_load_for_which_no_sequence_waits_changes_nothing() -> None:
    sim = Simulation(residency=SimResidency(2, 0.1))
    scheduler = sim.scheduler()
    sim.residency.load("v", "other")
    sim.end_loads(scheduler, 0.1)
    assert not scheduler.plan(0.1).batch
    assert not +sim.residency.holds


def test_a_step_does_not_look_at_each_variant_that_waits() -> None:
    asked: list[str] = []

    class CountingResidency(SimResidency):
        def is_resident(self, digest: str) -> bool:
            asked.append(digest)
            return super().is_resident(digest)

    sim = Simulation(LIMITS, residency=CountingResidency(2, 0.0))
    scheduler = sim.scheduler()
    for digest in ("h0", "h1"):
        scheduler.add(SimSequence(digest, digest, digest, 8, 10_000, 0.0), 0.0)
    scheduler.plan(0.0)
    sim.end_loads(scheduler, 0.0)
    for number in range(1000):
        scheduler.add(SimSequence(f"c{number}", f"t{number}", f"c{number}", 8, 8, 0.1), 0.1)
    for now in (0.1, 0.2, 1.2, 2.2):
        scheduler.plan(now)
        asked.clear()
        scheduler.plan(now)
        assert len(asked) <= 2 * MAX_TAKING


def test_short_sequences_do_not_keep_a_variant_in_its_slot_for_ever() -> None:
    """Their variant is idle only between two steps: the next sequence is there before a slot is looked for."""
    sim = Simulation(LIMITS, residency=SimResidency(1, 0.02))
    scheduler = sim.scheduler()
    cold = SimSequence("cold", "c", "v", 8, 8, 0.0)
    now, first = 0.0, 0.0
    for number in range(1000):
        scheduler.add(SimSequence(f"s{number}", "a", "hot", 8, 1, now), now)
        if number == 20:
            scheduler.add(cold, now)
            first = now
        plan = scheduler.plan(now)
        now += 0.02
        sim.end_loads(scheduler, now)
        if cold in plan.batch:
            break
        for sequence in list(plan.batch):
            scheduler.remove(sequence)
    assert cold in scheduler.running
    assert now - first < 1.0


def test_every_sequence_ends_when_pages_and_slots_are_both_short() -> None:
    sim = Simulation(LIMITS, kv_cache=pages(60), residency=SimResidency(3, 0.2))
    sequences = popular(3, 10.0, 40.0, 12)
    simulate(sim, sequences)
    assert all(sequence.num_generated == sequence.num_output_tokens for sequence in sequences)
    assert sum(sequence.num_preempted for sequence in sequences) > 0


def test_sequences_that_wait_for_masks_keep_no_variant_from_a_slot() -> None:
    sim = Simulation(LIMITS, residency=SimResidency(1, 0.05))
    waiting = SimSequence("waiting", "a", "v0", 32, 2, 0.0, mask_s=60.0)
    # The second finds the waiting one admitted again and without another token.
    colds = [SimSequence(f"cold{i}", "b", f"v{i}", 32, 2, at) for i, at in ((1, 1.0), (2, 10.0))]
    # Its steps refill the budget for recomputation.
    base = SimSequence("base", "c", None, 32, 1500, 0.0)
    simulate(sim, [waiting, base, *colds])
    assert max(cold.first_token_s for cold in colds) < LIMITS.constants.cold_wait_s + 1.0
    assert waiting.num_preempted == 2
    assert waiting.num_generated == 2
