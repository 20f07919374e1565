"""Tests of the cost of compressing: memory depends on the largest tensor alone; progress goes to a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import compress as bench_compress
from bench import merge as bench_merge
from bench.compress import measure
from bench.synthetic import LlamaShapes
from compressor.config import Method
from deltastore import console
from tests.compressor.helpers.compressing import compressed
from tests.helpers.tiny_models import make_pair


@pytest.mark.parametrize(("num_layers", "method"), [(1, "per-axis"), (12, "both")])
def test_peak_memory_stays_under_four_times_the_largest_tensor(
    num_layers: int, method: Method, tmp_path: Path
) -> None:
    shapes = LlamaShapes(num_layers, hidden=512, intermediate=1024, kv=128)
    figure = measure(shapes, method, False, tmp_path)
    assert figure["largest_tensor_bytes"] == 2 * 32000 * 512
    assert 0 < figure["peak_growth_bytes"] < 4 * figure["largest_tensor_bytes"]
    assert list(tmp_path.iterdir()) == []


def test_the_result_tells_the_growth_of_the_process(tmp_path: Path) -> None:
    result = compressed(make_pair("llama", tmp_path), tmp_path / "delta")
    assert 0 <= result.peak_memory_bytes < 1 << 30


@pytest.mark.deploy
@pytest.mark.parametrize("bench", [bench_compress, bench_merge])
def test_a_small_bench_prints_its_table_and_names_its_machine(
    bench: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.main(["--small", "--out", str(tmp_path / "result.json")])  # type: ignore[attr-defined]
    document = json.loads((tmp_path / "result.json").read_text())
    assert len(document["results"]) == 1
    assert document["machine"]["cores"] > 0
    printed = capsys.readouterr().out
    assert printed.count("|\n") == 3
    assert str(tmp_path) not in printed + json.dumps(document)


def test_progress_in_a_log_is_whole_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "LINE_INTERVAL_S", 0)
    with console.byte_progress(2_000_000, "delta", enabled=True) as bar:
        bar.update(1_000_000)
        bar.update(1_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert any("50%" in line for line in lines)
    assert all(line.startswith("delta:") and "\r" not in line for line in lines)


def test_progress_that_is_not_wanted_is_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "LINE_INTERVAL_S", 0)
    with console.byte_progress(10, "delta", enabled=False) as bar:
        bar.update(10)
    assert capsys.readouterr().err == ""
