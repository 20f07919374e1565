"""The prompts that vLLM has at a time: tenants do not wait behind each other's, and a tenant alone uses whole steps."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from server.engine.scheduler import MAX_SLOW_SAMPLING
from server.engine.sequence import Sequence
from server.engine.vllm_admission import Admission, VllmPages, longest_chunk
from tests.server.helpers.simulation import TOKEN, SimResidency, SimSequence

STEP = 100  # tokens of a step
CHUNK = longest_chunk(STEP)


def sequence(name: str, tenant: str, num_prompt: int, num_output: int = 3) -> SimSequence:
    return SimSequence(name, tenant, None, num_prompt, num_output, 0.0)


@dataclass
class Vllm:
    """Computes a token of each sequence that decodes, then prompts in order of arrival, at most `CHUNK` of each."""

    admission: Admission
    live: dict[str, SimSequence] = field(default_factory=dict)
    has: list[SimSequence] = field(default_factory=list)
    num_computed: Counter[SimSequence] = field(default_factory=Counter)  # its prefix cache keeps them
    first_token: dict[str, int] = field(default_factory=dict)  # the step, by sequence
    num_steps: int = 0

    def add(self, *sequences: SimSequence) -> None:
        for one in sequences:
            self.live[one.id] = one
            self.admission.add(one, float(self.num_steps))

    def step(self) -> int:
        """Return how many tokens the step computed."""
        self.num_steps += 1
        plan = self.admission.plan(float(self.num_steps))
        stopped = self.admission.take_stopped()
        self.has = [one for one in self.has if one not in stopped]
        self.has += [self.live[one.id] for one in plan.batch if one not in self.has]
        num_left = STEP
        generated = Counter[Sequence]()
        for one in sorted(self.has, key=lambda each: self.num_computed[each] + 1 != each.num_tokens):
            num_tokens = min(one.num_tokens - self.num_computed[one], CHUNK, num_left)
            self.num_computed[one] += num_tokens
            num_left -= num_tokens
            if num_tokens and self.num_computed[one] == one.num_tokens:
                generated[one] += 1
                self._generate(one)
        self.admission.add_costs(plan, generated)
        self.admission.charge(plan, float(self.num_steps), 1.0)
        return STEP - num_left

    def _generate(self, one: SimSequence) -> None:
        one.generated_ids.append(TOKEN)
        one.num_computed_tokens = one.num_tokens - 1
        self.first_token.setdefault(one.id, self.num_steps)
        if one.num_generated == one.num_output_tokens:
            self.admission.remove(one)
            del self.live[one.id]

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()


@pytest.fixture
def vllm() -> Vllm:
    return Vllm(Admission(VllmPages(), SimResidency(8, 0.0), 64, STEP))


def test_a_tenant_alone_fills_whole_steps_with_long_prompts(vllm: Vllm) -> None:
    vllm.add(*(sequence(f"a{number}", "a", 1000) for number in range(6)))
    assert [vllm.step() for _ in range(19)] == [STEP] * 19


@pytest.mark.parametrize("num_prompt", [5, 40, CHUNK, CHUNK + 1, 2000])
def test_a_short_prompt_passes_another_tenants_flood(vllm: Vllm, num_prompt: int) -> None:
    vllm.add(*(sequence(f"a{number}", "a", num_prompt) for number in range(60)))
    vllm.run(5)
    vllm.add(sequence("b", "b", 30))
    vllm.run(5)
    assert "b" in vllm.first_token


def test_of_long_prompts_one_advances_at_a_time_while_tenants_compete(vllm: Vllm) -> None:
    vllm.add(*(sequence(f"a{number}", "a", 1000) for number in range(3)))
    vllm.run(3)
    assert len(vllm.has) == 3
    vllm.add(sequence("b", "b", 1000, 200), sequence("c", "c", 20, 200))
    vllm.step()
    assert sorted(one.id for one in vllm.has) == ["a0", "c"]


def test_no_long_prompt_waits_for_more_than_one_prompt_of_each_other_tenant(vllm: Vllm) -> None:
    vllm.add(*(sequence(f"a{number}", "a", 500) for number in range(30)))
    vllm.run(2)
    vllm.add(sequence("b", "b", 400))
    vllm.run(3 * 500 // CHUNK + 400 // CHUNK + 2)
    assert "b" in vllm.first_token


def test_of_sequences_that_take_long_to_sample_vllm_has_a_few_while_others_are_served(vllm: Vllm) -> None:
    def slow(name: str, tenant: str) -> SimSequence:
        made = sequence(name, tenant, 5, 40)
        made.sampling_cost = MAX_SLOW_SAMPLING / 2.5
        return made

    vllm.add(*(slow(f"a{number}", "a") for number in range(6)))
    vllm.run(3)
    assert len(vllm.has) == 6
    vllm.add(sequence("b", "b", 5, 60))
    vllm.run(3)
    assert sorted(one.id for one in vllm.has) == ["a0", "a1", "b"]
    # Another tenant with such a sequence waits for none of them to end, and none is exchanged in turn.
    vllm.add(slow("c", "c"))
    vllm.run(3)
    assert sorted(one.id for one in vllm.has) == ["a0", "b", "c"]
    vllm.run(5)
    assert sorted(one.id for one in vllm.has) == ["a0", "b", "c"]
    # All end.
    vllm.run(300)
    assert not vllm.live


def test_a_tenant_that_was_passed_over_keeps_its_turn(vllm: Vllm) -> None:
    vllm.add(sequence("a", "a", 1000), sequence("b", "b", 60), sequence("c", "c", 60))
    vllm.run(2)
    vllm.add(*(sequence(f"c{number}", "c", 60) for number in range(30)))
    vllm.run(40)
    assert vllm.first_token["b"] < vllm.first_token["c1"]


@pytest.mark.parametrize("seed", range(20))
def test_every_sequence_ends_and_steps_are_not_idle(seed: int) -> None:
    draw = random.Random(seed)
    vllm = Vllm(Admission(VllmPages(), SimResidency(8, 0.0), draw.choice([4, 16, 64]), STEP))
    num_added = 0
    while num_added < 80 or vllm.live:
        for _ in range(draw.randrange(3) if num_added < 80 else 0):
            num_prompt = draw.choice([1, 10, 60, 300, 1500])
            vllm.add(sequence(str(num_added), draw.choice("aab"), num_prompt, draw.randrange(1, 30)))
            num_added += 1
        assert vllm.step() > 0 or not vllm.live
        assert vllm.num_steps < 5000


@pytest.mark.parametrize(
    ("num_running", "num_waiting", "usage", "is_short"),
    [
        (3, 0, 1.0, False),
        (3, 2, 0.5, False),
        (3, 2, 0.95, True),
        # One that needs two pages waits for them, and a paused sequence has one of the two.
        (0, 1, 0.5, True),
        (0, 0, 0.5, False),
    ],
)
def test_pages_are_short_if_something_waits_and_they_are_full_or_nothing_runs(
    num_running: int, num_waiting: int, usage: float, is_short: bool
) -> None:
    pages = VllmPages()
    scheduler = SimpleNamespace(
        prefix_cache_stats=SimpleNamespace(queries=7, hits=2),
        kv_cache_usage=usage,
        num_running_reqs=num_running,
        num_waiting_reqs=num_waiting,
    )
    pages.record(scheduler, None)
    assert (pages.is_short, pages.usage, pages.take_prefix_counts()) == (is_short, usage, (7, 2))
    pages.emptied()
    assert (pages.is_short, pages.usage) == (False, 0.0)
