"""Simulate a few replicas and check the sums of what is counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.simulation import (
    POLICIES,
    SMALL_SCOPE,
    Clock,
    Replica,
    ReplicaScope,
    SimulatedRequest,
    main,
    simulate,
)

SCOPE = ReplicaScope(capacity=1, num_slots=1, num_host=4, load_from_host_s=0.5, load_from_disk_s=2.0)


def test_a_request_waits_for_its_variant_s_load_and_for_the_batch() -> None:
    clock, ended = Clock(), []
    replica = Replica("a", SCOPE, clock, lambda _, request: ended.append((request, clock.now_s)))
    first, second = (SimulatedRequest(variant, 1.0, 0.0) for variant in "vw")
    replica.submit(first)
    replica.submit(second)
    clock.run(100.0)
    # A request in a full batch takes twice its time alone; the second load waits for the only slot.
    assert (first.found, first.started_s, second.found, second.started_s) == ("disk", 2.0, "disk", 6.0)
    assert [when for _, when in ended] == [4.0, 8.0]
    again = SimulatedRequest("v", 1.0, clock.now_s)
    replica.submit(again)
    assert again.found == "host"
    clock.run(200.0)
    assert again.started_s == again.arrived_s + 0.5


def test_the_router_finds_more_variants_in_slots_than_random_choice() -> None:
    scope = replace(SMALL_SCOPE, replica=ReplicaScope(capacity=16, num_slots=8, num_host=50))
    found = {name: simulate(name, scope) for name in ("peraxis, reports every 0.25 s", "random")}
    peraxis, chance = found.values()
    assert peraxis["found_slot"] > 1.2 * chance["found_slot"]
    assert peraxis["found_disk"] < chance["found_disk"]


def test_a_small_run_fills_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "simulation.json"
    main(["--small", "--out", str(out)])
    results = json.loads(out.read_text())["results"]
    assert set(results) == set(POLICIES)
    for figures in results.values():
        shares = sum(value for name, value in figures.items() if name.startswith("found_"))
        assert shares == pytest.approx(1, abs=1e-3)
    assert "| bounded hashing, 1.25 " in capsys.readouterr().out
