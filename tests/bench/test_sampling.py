"""Run the bench of sampling on a tiny vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import sampling


def test_the_small_bench_writes_a_figure_for_every_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sampling.main(["--small", "--repeats", "2", "--rows", "4", "--out", str(tmp_path / "sampling.json")])
    written = json.loads((tmp_path / "sampling.json").read_text())["results"]
    cases = [(figure["distribution"], figure["case"]) for figure in written]
    assert cases == [(name, case) for name in sampling.DISTRIBUTIONS for case in sampling.CASES]
    assert all(figure["sampled_s"] > 0 < figure["row_by_row_s"] for figure in written)
    assert "top_k 20, top_p 0.95 |" in capsys.readouterr().out
