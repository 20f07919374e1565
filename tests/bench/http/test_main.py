"""Run the bench of HTTP on a tiny model, with real servers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.http.__main__ import (
    SMALL_SCOPE,
    cpu_table,
    goal_table,
    goals,
    main,
    rate_table,
    results,
    tiny_model,
)
from bench.http.subjects import BESIDE, CONSTRAINED, ENGINE, FREE, HTTP, OPEN, SECURED, Sample, Subject

ROOT = Path(__file__).resolve().parents[3]


def test_streams_of_a_tiny_model_are_measured_over_http(tmp_path: Path) -> None:
    subjects = tiny_model(tmp_path, SMALL_SCOPE, baseline=None, repeats=1)
    (found,) = results(subjects)
    assert (found["who"], found["streams"], found["variants"]) == ("over HTTP", SMALL_SCOPE.num_tiny, 0)
    (sample,) = found["samples"]
    assert sample["tokens_per_s"] > 0
    assert "over HTTP" in rate_table(subjects)
    assert "µs per token" in cpu_table(subjects)


def test_goals_compare_figures_with_their_peers_and_a_missing_baseline_is_not_measured() -> None:
    names = [
        (ENGINE, 4),
        (HTTP, 4),
        (HTTP, 12),
        (FREE, 4),
        (CONSTRAINED, 4),
        (BESIDE, 4),
        (OPEN, 4),
        (SECURED, 4),
    ]
    sample = Sample(tokens_per_s=100.0, p50_gap_s=0.1, p99_gap_s=0.1, first_token_s=0.1, cpu_s={})
    halved = replace(sample, tokens_per_s=50.0)
    subjects = [
        Subject(name, streams, 0, lambda: sample, [halved if name == SECURED else sample])
        for name, streams in names
    ]
    assert [(goal["reached"], goal["met"]) for goal in goals(subjects)] == [
        (1.0, True),
        (1.0, True),
        (None, None),
        (1.0, True),
        (1.0, True),
        (0.5, False),
    ]
    assert goal_table(subjects).count("not measured") == 1


@pytest.mark.deploy
def test_a_small_run_fills_its_tables_beside_a_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "http.json"
    main(["--small", "--repeats", "1", "--baseline", str(ROOT), "--dir", str(tmp_path), "--out", str(out)])
    text = out.read_text()
    written = json.loads(text)
    assert {(one["who"], one["streams"], one["variants"]) for one in written["results"]} == {
        *((who, streams, 0) for who in ("bare engine", "over HTTP") for streams in (1, 4)),
        ("bare engine", 4, 2),
        ("over HTTP", 4, 2),
        ("over HTTP", 12, 0),
        ("baseline over HTTP", 12, 0),
        ("free", 4, 0),
        ("constrained to JSON", 4, 0),
        ("free beside constrained", 4, 0),
        ("without keys", 4, 0),
        ("keys, limits, JSON logs", 4, 0),
    }
    assert all(sample["tokens_per_s"] > 0 for one in written["results"] for sample in one["samples"])
    assert all(figures["gaps_busy"] > 0 for figures in written["tokenizing"].values())
    assert [goal["limit"] for goal in written["goals"]] == [
        "at least 0.95",
        "at most 1.1",
        "at least 2",
        "at most 1.15",
        "at most 1.1",
        "at least 0.97",
    ]
    printed = capsys.readouterr().out
    assert "processor time, µs per token" in printed
    assert str(tmp_path) not in text + printed
