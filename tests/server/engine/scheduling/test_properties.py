"""Whatever comes and goes: every job ends exactly once, and pages and slots are given back."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.scheduling.scheduler import SchedulerLimits
from tests.server.helpers.simulation import SimJob, SimPages, SimSlots, World, simulate

LIMITS = st.builds(
    SchedulerLimits,
    max_num_seqs=st.integers(1, 6),
    max_batch_tokens=st.integers(7, 40),
    prefill_share=st.sampled_from([0.1, 0.5, 1.0]),
    reserve_tokens=st.sampled_from([0, 8, 32]),
    delta_cost_tokens=st.sampled_from([0.0, 8.0]),
    tenure_s=st.sampled_from([0.0, 0.1, 1.0]),
    cold_wait_s=st.sampled_from([0.0, 0.2, 2.0]),
    recompute_share=st.sampled_from([0.01, 1.0]),
)
SLOTS = st.builds(SimSlots, st.integers(1, 3), st.sampled_from([0.0, 0.05, 0.5]), st.integers(1, 2))
PAGES = st.builds(SimPages, st.integers(4, 20), st.sampled_from([1, 4, 16]))


@st.composite
def jobs(draw: st.DrawFn) -> list[SimJob]:
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 2),  # tenant
                st.integers(0, 5),  # variant; 0 is the base
                st.integers(1, 60),  # prompt
                st.integers(1, 30),  # output
                st.floats(0, 1, width=32),  # arrival
                st.sampled_from([math.inf, math.inf, 0.0, 0.1, 1.0]),  # patience
            ),
            min_size=1,
            max_size=40,
        )
    )
    return [
        SimJob(f"j{i}", f"t{tenant}", f"v{variant}" if variant else None, prompt, output, at, at + patience)
        for i, (tenant, variant, prompt, output, at, patience) in enumerate(rows)
    ]


@settings(max_examples=150, deadline=None)
@given(LIMITS, SLOTS, PAGES, jobs())
def test_every_job_ends_once_and_gives_everything_back(
    limits: SchedulerLimits, slots: SimSlots, pages: SimPages, jobs: list[SimJob]
) -> None:
    world = World(limits, pages, slots)
    scheduler = world.scheduler()
    simulate(world, jobs, scheduler)
    assert [job.num_ends for job in jobs] == [1] * len(jobs)
    assert pages.num_available == pages.num_pages
    assert not +slots.holds
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_waiting_for_load) == (0, 0, 0)
    for job in jobs:
        fits = job.num_prompt + job.num_output - 1 <= pages.num_pages * pages.page_tokens
        assert job.num_generated == job.num_output or not fits or job.cancel_at < math.inf
    tenure = scheduler._tenure
    assert not tenure._variants
    assert not tenure._cold
    assert not tenure._young
    assert not tenure._loading
    assert not tenure._held
    assert not tenure._closed
