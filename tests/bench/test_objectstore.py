"""Run the bench of loads from a bucket at toy size, and check its result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.objectstore import main


def test_a_small_run_prints_its_table_and_writes_every_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "objectstore.json"
    main(["--small", "--repeats", "1", "--device", "cpu", "--dir", str(tmp_path), "--out", str(out)])
    document = json.loads(out.read_text())
    results = document["results"]
    assert [result["load"] for result in results] == [
        "bucket, dropped by the client",
        "disk, in the page cache",
        "disk, page cache dropped",
        "bucket, first time",
        "bucket, second time",
        "bucket, second time, page cache dropped",
    ]
    assert {result["bytes"] for result in results} == {results[0]["bytes"]}
    printed = capsys.readouterr().out
    assert all(f"{1e3 * result['seconds']:.1f}" in printed for result in results)
    # Left behind is the result alone.
    assert [path.name for path in tmp_path.iterdir()] == ["objectstore.json"]
