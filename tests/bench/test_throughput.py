"""Run the throughput bench on a tiny model, and compare its figures with their goals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.throughput import CONTINUOUS, OURS, STATIC, SWAPPED, VLLM, Key, goals, main

RATES: dict[Key, list[float]] = {
    (OURS, 16, 0): [520.0],
    (OURS, 16, 8): [450.0],
    (STATIC, 16, 0): [390.0],
    (CONTINUOUS, 16, 0): [320.0],
    (SWAPPED, 16, 8): [90.0],
    (OURS, 4, 0): [200.0],
    (OURS, 4, 4): [170.0],
}


@pytest.mark.deploy
def test_a_small_run_fills_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "throughput.json"
    scope = ("--small", "--streams", "16", "--repeats", "1", "--new", "4")
    main([*scope, "--dir", str(tmp_path), "--out", str(out)])
    written = json.loads(out.read_text())
    assert {(one["who"], one["requests"]) for one in written["results"]} == {
        (OURS, 16),
        (OURS, 4),
        (SWAPPED, 16),
        (STATIC, 16),
        (CONTINUOUS, 16),
    }
    assert all(one["tokens_per_s"] > 0 for one in written["results"])
    printed = capsys.readouterr().out
    assert "| 16 requests: 8 variants / base " in printed
    assert str(tmp_path) not in out.read_text() + printed


def test_the_best_peer_decides_on_the_goal_of_the_base() -> None:
    reached = {goal.name: goal.reached for goal in goals(RATES)}
    assert reached["16 requests: base / the best peer's base"] == pytest.approx(520 / 390, abs=1e-3)
    reached = {goal.name: goal.reached for goal in goals({**RATES, (VLLM, 16, 0): [500.0]})}
    assert reached["16 requests: base / the best peer's base"] == pytest.approx(1.04)


def test_variants_are_compared_with_adapters_where_those_were_measured() -> None:
    assert not any("adapters" in goal.name for goal in goals(RATES))
    (found,) = (goal for goal in goals({**RATES, (VLLM, 16, 8): [100.0]}) if "adapters" in goal.name)
    assert (found.reached, found.is_met) == (4.5, True)


def test_a_machine_that_drifts_changes_no_ratio() -> None:
    turns = {key: [value, 2 * value, value / 4] for key, (value,) in RATES.items()}
    steady = {goal.name: goal.reached for goal in goals(RATES)}
    assert {goal.name: goal.reached for goal in goals(turns)} == pytest.approx(steady)
