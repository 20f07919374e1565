"""Run the bench of both backends on a tiny model, and compare its figures with their goals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.backends import goals, main

FIGURES = {
    "free_tokens_per_s": 600.0,
    "constrained_tokens_per_s": 300.0,
    "beside_free_tokens_per_s": 400.0,
    "beside_constrained_tokens_per_s": 320.0,
    "quiet_p99_s": 0.02,
    "loading_p99_s": 0.03,
}


@pytest.mark.deploy
def test_a_small_run_fills_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "backends.json"
    main(["--small", "--dir", str(tmp_path), "--out", str(out)])
    written = json.loads(out.read_text())
    (figures,) = written["results"].values()
    assert figures.keys() > FIGURES.keys()
    assert all(value > 0 for value in figures.values())
    printed = capsys.readouterr().out
    assert "| p99 between tokens, a load each second / none " in printed
    assert str(tmp_path) not in out.read_text() + printed


def test_each_figure_is_compared_with_its_limit_on_its_side() -> None:
    found = {one.name: (one.reached, one.is_met) for one in goals({"vllm": FIGURES})}
    assert found == {
        "tokens/s, constrained / free": (0.5, True),
        "tokens/s of free streams, beside constrained / beside free": (0.8, False),
        "p99 between tokens, a load each second / none": (1.5, True),
    }
