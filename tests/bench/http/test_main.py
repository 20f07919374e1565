"""Run the bench of HTTP on a tiny model, with real servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.http.__main__ import main

ROOT = Path(__file__).resolve().parents[3]


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
