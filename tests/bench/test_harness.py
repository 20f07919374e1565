"""Options, goals, tables and the document of a bench's report."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from bench import harness
from bench.harness import (
    Bench,
    Report,
    at_least,
    at_most,
    fixed,
    goal_table,
    ms,
    option,
    p99,
    rounded,
    table_of,
    text,
)

GOALS = [at_most("p99 / quiet", 1.25, 1.2), at_least("rate", 0.5, 0.5), at_least("baseline", None, 2.0)]


def report(args: Namespace) -> Report:
    parts = ["a table"]
    return Report({"rows": args.rows}, [1, 2], parts, GOALS, conditions="tiny", is_failed=args.fails)


BENCH = Bench(
    "tiny", "Measure nothing.", report, [option("--rows", 4), option("--fails", False)], small="less"
)


def test_a_report_is_printed_and_written_with_the_machine_and_the_goals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tiny.json"
    assert BENCH(["--small", "--rows", "2", "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    assert list(document) == ["bench", "date", "machine", "versions", "settings", "results", "goals"]
    assert (document["bench"], document["settings"], document["results"]) == ("tiny", {"rows": 2}, [1, 2])
    assert document["goals"][0] == {
        "goal": "p99 / quiet",
        "limit": "at most 1.2",
        "reached": 1.25,
        "met": False,
    }
    head, blank, part, *_ = capsys.readouterr().out.splitlines()
    assert head.endswith("; tiny")
    assert (blank, part) == ("", "a table")


def test_a_document_is_named_by_its_bench_and_a_small_run_writes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    BENCH(["--small"])
    assert not list(tmp_path.iterdir())
    assert BENCH(["--fails"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.json"]


def test_a_bench_with_a_folder_measures_in_a_directory_that_is_removed(tmp_path: Path) -> None:
    seen: list[Path] = []

    def measure(args: Namespace) -> None:
        seen.append(args.directory)
        assert args.directory.parent == tmp_path

    assert Bench("tiny", None, measure, folder="a disk")(["--dir", str(tmp_path)]) == 0
    assert not seen[0].exists()


def test_a_bench_of_one_size_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Bench("tiny", "Measure nothing.", report, folder="a disk")(["--help"])
    printed = capsys.readouterr().out
    assert printed.startswith("usage: python -m bench.tiny [-h] [--dir DIR] [--out OUT]")
    assert "Measure nothing." in printed


def test_options_that_exclude_each_other_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench("tiny", None, report, [option("--large", False, instead_of_small=True)], small="less")
    with pytest.raises(SystemExit):
        bench(["--small", "--large"])
    assert "not allowed with" in capsys.readouterr().err


def test_a_goal_is_met_up_to_its_limit_and_a_missing_figure_is_not_measured() -> None:
    assert [goal.is_met for goal in GOALS] == [False, True, None]
    verdicts = [line.split("|")[-2].strip() for line in goal_table(GOALS).splitlines()[2:]]
    assert verdicts == ["not met", "met", "not measured"]


def test_a_goal_of_several_subjects_has_a_column_of_each() -> None:
    lines = goal_table([at_most("ratio", 0.5, 1, "one"), at_most("ratio", 2, 1, "other")]).splitlines()
    assert lines[0].split() == ["|", "goal", "|", "limit", "|", "one", "|", "other", "|", "|"]
    assert len(lines) == 3
    assert lines[2].endswith("| 0.5 | 2 (not met) | not met |")


def test_a_table_has_the_columns_of_its_rows() -> None:
    columns = {"case": text("case"), "ms": ms("seconds"), "ratio": fixed("ratio", 2)}
    assert table_of(columns, [{"case": "one", "seconds": 0.0123, "ratio": 1.5}]).splitlines()[2] == (
        "| one  | 12.3 |  1.50 |"
    )


def test_only_fractions_are_rounded() -> None:
    assert rounded({"a": 1 / 3, "b": 7, "c": {"d": 2 / 3}}, 2) == {"a": 0.33, "b": 7, "c": {"d": 0.67}}


def test_a_percentile_of_one_value_is_refused() -> None:
    with pytest.raises(RuntimeError, match="longer"):
        p99([1.0])
