"""Every sequence ends exactly once and gives its pages and slots back, whatever arrives and is cancelled."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.kv_cache_manager import KVCacheManager
from server.engine.slot_policy import SlotPolicy
from tests.server.helpers.simulation import (
    SimResidency,
    SimSequence,
    Simulation,
    StepLimits,
    pages,
    simulate,
    step_limits,
)

LIMITS = st.builds(
    step_limits,
    max_num_seqs=st.integers(1, 6),
    max_batch_tokens=st.integers(7, 40),
    prefill_share=st.sampled_from([0.1, 0.5, 1.0]),
    reserve_tokens=st.sampled_from([0, 8, 32]),
    delta_cost_tokens=st.sampled_from([0.0, 8.0]),
    min_resident_s=st.sampled_from([0.0, 0.1, 1.0]),
    cold_wait_s=st.sampled_from([0.0, 0.2, 2.0]),
    recompute_share=st.sampled_from([0.01, 1.0]),
)
SLOTS = st.builds(SimResidency, st.integers(1, 3), st.sampled_from([0.0, 0.05, 0.5]), st.integers(1, 2))
PAGES = st.builds(pages, st.integers(4, 20), st.sampled_from([1, 4, 16]))


@st.composite
def sequences(draw: st.DrawFn) -> list[SimSequence]:
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 2),  # tenant
                st.integers(0, 5),  # variant; 0 is the base
                st.integers(1, 60),  # prompt
                st.integers(1, 30),  # output
                st.floats(0, 1, width=32),  # arrival
                st.sampled_from([math.inf, math.inf, 0.0, 0.1, 1.0]),  # patience
                st.sampled_from([0.0, 0.0, 0.01, 0.3]),  # time until a mask comes
            ),
            min_size=1,
            max_size=40,
        )
    )
    return [
        SimSequence(
            f"j{i}",
            f"t{tenant}",
            f"v{variant}" if variant else None,
            prompt,
            output,
            at,
            at + patience,
            mask_s,
        )
        for i, (tenant, variant, prompt, output, at, patience, mask_s) in enumerate(rows)
    ]


@settings(max_examples=150, deadline=None)
@given(LIMITS, SLOTS, PAGES, sequences())
def test_every_sequence_ends_once_and_gives_everything_back(
    limits: StepLimits, residency: SimResidency, kv_cache: KVCacheManager, sequences: list[SimSequence]
) -> None:
    sim = Simulation(limits, kv_cache, residency)
    scheduler = sim.scheduler()
    policy = scheduler._slot_policy
    sim.on_step = lambda plan, now: check_states(policy)
    simulate(sim, sequences, scheduler)
    assert [sequence.num_ends for sequence in sequences] == [1] * len(sequences)
    assert kv_cache.num_available == kv_cache.num_pages
    assert not +residency.holds
    assert not scheduler.running
    assert not any(sequence.is_waiting for sequence in sequences)
    for sequence in sequences:
        fits = sequence.num_prompt_tokens + sequence.num_output_tokens - 1 <= kv_cache.max_tokens
        is_complete = sequence.num_generated == sequence.num_output_tokens
        assert is_complete or not fits or sequence.cancel_at < math.inf
    check_states(policy)
    assert not policy._variants


def check_states(policy: SlotPolicy) -> None:
    """Check that each variant is in the collection of its state and in no other, and the held ones are held once."""
    in_states = [(state, v) for state, variants in policy._in_state.items() for v in variants.values()]
    assert all(variant.state is state for state, variant in in_states)
    assert sorted(variant.version for _, variant in in_states) == sorted(policy._variants)
    residency = policy._residency
    assert isinstance(residency, SimResidency)
    assert set(+residency.holds) == {variant.version for state, variant in in_states if state.is_held}
