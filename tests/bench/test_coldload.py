"""Run the bench of loads under traffic on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import coldload


@pytest.mark.deploy
def test_the_small_bench_fills_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    coldload.main(["--small", "--dir", str(tmp_path), "--out", str(tmp_path / "coldload.json")])
    written = json.loads((tmp_path / "coldload.json").read_text())
    assert written["results"]["streams"]["gaps_quiet"] > 16
    assert written["results"]["streams"]["gaps_loading"] > 0
    assert 0 < written["results"]["streams"]["quiet_p50_s"] <= written["results"]["streams"]["quiet_p99_s"]
    assert written["results"]["zipf"]["loads_per_request"] > 0
    assert [goal["limit"] for goal in written["goals"]] == ["at most 1.1", "at most 5"]
    assert written["goals"][0]["reached"] == pytest.approx(
        written["results"]["streams"]["loading_p99_s"] / written["results"]["streams"]["quiet_p99_s"],
        abs=1e-3,
    )
    printed = capsys.readouterr().out
    assert "| first token, alone, variant on disk " in printed
    assert "| p99 between tokens, while variants load / without " in printed
