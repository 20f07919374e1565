"""Run the bench of kernels on tiny matrices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import kernels


def test_the_small_bench_writes_a_figure_for_every_composition(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels.main(["--small", "--repeats", "2", "--blocks", "1", "--out", str(tmp_path / "kernels.json")])
    written = json.loads((tmp_path / "kernels.json").read_text())
    for part in ("block", "output head"):
        own = [figure for figure in written["results"] if figure["part"] == part]
        assert [(figure["groups"], figure["rows_of_each"]) for figure in own] == [*kernels.GROUPS]
    assert all(figure["base_s"] > 0 for figure in written["results"])
    assert " 8 x 2 |" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_bench_says_that_nothing_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main(["--device", "cuda"])
    assert capsys.readouterr().out == "not measured: there is no CUDA device\n"
