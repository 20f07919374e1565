"""Run the bench of the console with few variants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import console
from tests.helpers.debian import debian_tool


@pytest.mark.deploy
def test_the_small_bench_fills_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    debian_tool("chromium")
    out = tmp_path / "console.json"
    console.main(["--small", "--repeats", "1", "--dir", str(tmp_path), "--out", str(out)])
    document = json.loads(out.read_text())
    rows = {row["what"]: row for row in document["results"]}
    assert len(rows) == len(document["goals"]) == 6
    assert all(row["script_s"] > 0 and row["nodes"] > 100 for row in rows.values())
    # The files of the page, the caller, the figures and the changes.
    assert rows["overview, first paint"]["requests"] > 10
    assert rows["another page of variants"]["requests"] < 8
    assert {goal["limit"] for goal in document["goals"]} == {"at most 0.2"}
    assert "| variants, first paint " in capsys.readouterr().out
