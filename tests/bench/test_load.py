"""Run the load bench at toy size, and check its result and its view of the page cache."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.load import main
from deltastore.console import table
from peraxis.demo.page_cache import cached_fraction, drop


def test_a_small_run_prints_its_table_and_writes_what_the_figures_belong_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "load.json"
    main(["--small", "--repeats", "1", "--device", "cpu", "--dir", str(tmp_path), "--out", str(out)])
    document = json.loads(out.read_text())
    assert {"cpu", "instructions", "cores", "memory_bytes", "device"} == set(document["machine"])
    assert [result["subject"] for result in document["results"]["loads"]] == [
        "delta", "delta in host memory", "full FP16 checkpoint", "delta", "full FP16 checkpoint"
    ]  # fmt: skip
    printed = [float(number) for number in re.findall(r"\d+\.\d", capsys.readouterr().out)]
    # Each is rounded by itself.
    totals = [
        pytest.approx(1e3 * result["seconds"]["total"], abs=0.06) for result in document["results"]["loads"]
    ]
    assert all(total in printed for total in totals)


def test_results_name_no_path_of_the_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "load.json"
    main(["--small", "--repeats", "1", "--device", "cpu", "--dir", str(tmp_path), "--out", str(out)])
    text = out.read_text() + capsys.readouterr().out
    assert not [path for path in (tmp_path, Path.cwd()) if str(path) in text]


def test_a_file_in_the_page_cache_is_seen_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert cached_fraction(path) == 1.0


def test_dropping_reports_what_a_look_afterwards_finds(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert drop([path]) == (cached_fraction(path) < 0.01)


def test_an_empty_file_has_nothing_in_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    assert cached_fraction(path) == 0.0


def test_a_table_lines_up_and_is_markdown() -> None:
    assert table(("load", "ms"), [("delta", "7"), ("full", "123")]).splitlines() == [
        "| load  |  ms |",
        "| ----- | --: |",
        "| delta |   7 |",
        "| full  | 123 |",
    ]
