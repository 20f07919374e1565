"""Places of open requests, beside thousands of tenants and behind an engine that died."""

from __future__ import annotations

import random
from typing import Any

import pytest

from server.engine.core import EngineCore, RequestLimits
from server.errors import QueueFull
from server.metrics.metrics import EngineMetrics, Telemetry
from server.protocol.messages import ErrorEvent, Event, Progress, SequenceProgress
from server.protocol.request import Request, SamplingParams, token_ids_of
from tests.server.helpers.simulation import Simulation, step_limits

MAX_OPEN = 320


class Engine:
    """A core that runs no step."""

    def __init__(self) -> None:
        sim = Simulation(step_limits())
        sim.residency.load_s = 0.0
        self.scheduler = sim.scheduler()
        limits = RequestLimits(MAX_OPEN, True, 1000, 10.0, 10.0)
        runner: Any = None
        self.core = EngineCore(runner, self.scheduler, sim.residency, Telemetry(EngineMetrics()), limits)

    def ask(self, tenant: str, number: int, progress: Progress | None = None) -> bool:
        """Add a request; return whether it was admitted."""
        events = list[Event]()
        params = SamplingParams(max_new_tokens=10)
        request = Request(f"{tenant}-{number}", tenant, None, None, token_ids_of([1, 2]), 10, params)
        self.core.add_request(request, events.append, 0.0, progress=progress)
        if events:
            assert isinstance(events[-1], ErrorEvent)
            assert isinstance(events[-1].error, QueueFull)
        return not events


def test_of_10000_tenants_as_many_are_served_as_fit_and_none_before_another() -> None:
    engine, chance, crowd = Engine(), random.Random(0), "crowd"
    left, num_rounds = [f"tenant {number}" for number in range(10_000)], 0
    while left:
        # One tenant asks for all places before the others do.
        assert sum(engine.ask(crowd, number) for number in range(MAX_OPEN)) == MAX_OPEN // 2
        chance.shuffle(left)
        # All of them at first, and then as many in a round as may come again before others.
        asking = left if not num_rounds else left[: 2 * MAX_OPEN]
        served = [tenant for tenant in asking if engine.ask(tenant, 0)]
        # In order of arrival, whichever tenant asks.
        assert served == asking[: MAX_OPEN // 2]
        left = left[len(served) :]
        for tenant in served:
            engine.core.cancel(f"{tenant}-0")
        for number in range(MAX_OPEN):
            engine.core.cancel(f"{crowd}-{number}")
        num_rounds += 1
    assert num_rounds == -(-10_000 // (MAX_OPEN // 2))


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_an_engine_that_died_leaves_no_debt_and_takes_back_what_it_had_admitted(num_tokens: int) -> None:
    own = SequenceProgress(token_ids_of([1] * num_tokens))
    progress = Progress((own,), False, 0.5 if num_tokens else None)
    before, after = Engine(), Engine()
    num_open = sum(before.ask("debtor", number) for number in range(MAX_OPEN))
    for _ in range(3600):
        before.scheduler.charge_tenant("debtor", 1.0)
    # Another tenant is the first to send its requests again; both were admitted before.
    assert all(after.ask("other", number, progress) for number in range(10))
    assert after.ask("third", 0)
    assert all(after.ask("debtor", number, progress) for number in range(num_open))
    assert not after.ask("debtor", MAX_OPEN)
    assert after.ask("fourth", 0)
    plan = after.scheduler.plan(0.0)
    counters = {each.tenant: each.queue.tenant.counter for each in plan.batch}
    assert max(counters.values()) < 0.01
    # All rows are not the debtor's, nor is it kept from them.
    assert {"debtor", "other", "third"} <= counters.keys()
