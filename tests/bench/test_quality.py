"""Run the quality bench at toy size, and check its result, its texts and its goals."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bench import quality as bench
from bench.harness import goal_table
from bench.quality import (
    CODED,
    GOALS,
    LARGE,
    OURS_GENERAL,
    OURS_SELF,
    PAPER_GENERAL,
    SMALL,
    DeltaFigure,
    PairFigures,
    curve_table,
    goals,
    main,
)
from bench.quality_runs import (
    BITDELTA,
    ONE_VECTOR,
    OURS,
    PAPER,
    SCALAR,
    UNTRAINED,
    Cost,
    Run,
    Scores,
    task_records,
    unseen_sources,
    write_texts,
)
from compressor.fidelity import Fidelity
from peraxis.demo.tasks import Split, is_held_out, make_tasks

PAIR = "instruct"  # whose vocabulary is longer than the base's
WORDS = [first + second + third for first in "bdfgkl" for second in "aeiou" for third in "mnprst"]


@dataclass(frozen=True, slots=True)
class Bench:
    """A finished small run."""

    work: Path
    document: dict[str, Any]
    printed: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    work = tmp_path_factory.mktemp("quality")
    return Bench(work, *run_small(work))


def run_small(work: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Run the small bench; return its document and its standard output."""
    out = work / "quality.json"
    return run_bench("--small", "--pairs", PAIR, "--work", str(work), *options, out=out)


def run_bench(*options: str, out: Path) -> tuple[dict[str, Any], str]:
    with redirect_stdout(io.StringIO()) as printed:
        main([*options, "--out", str(out)])
    return json.loads(out.read_text()), printed.getvalue()


def kept_runs(work: Path) -> dict[str, Path]:
    return {path.stem: path for path in work.glob(f"*/quality-*/{PAIR}/*.json")}


@pytest.mark.deploy
def test_every_method_is_measured_in_full(ended: Bench) -> None:
    results = ended.document["results"][PAIR]["results"]
    assert len(results) == len(kept_runs(ended.work)) == 13
    assert {(result["run"]["method"], result["run"]["text"]) for result in results} >= {
        ("scalar", "none"),
        ("BitDelta", "in-domain"),
        ("paper", "in-domain"),
        ("paper", "general"),
        ("ours without training", "in-domain"),
        ("ours", "in-domain"),
        ("ours", "general"),
        ("ours", "self"),
    }
    for result in results:
        assert result["artifact_bytes"] > 0
        assert result["peak_memory_bytes"] > 0
        assert result["domain"]["num_tokens"] == SMALL.amount.test_samples * SMALL.amount.length
        assert 0 < result["domain"]["kl"] < ended.document["results"][PAIR]["base"]["domain"]["kl"]


@pytest.mark.deploy
def test_the_tables_and_the_document_agree_on_the_goals(ended: Bench) -> None:
    assert len(ended.document["goals"]) == len(GOALS)
    for goal in ended.document["goals"]:
        line = next(line for line in ended.printed.splitlines() if line.startswith(f"| {goal['goal']} "))
        assert line.endswith("| not met |") != goal["met"]


@pytest.mark.deploy
def test_results_name_no_path_of_the_machine(ended: Bench) -> None:
    text = json.dumps(ended.document) + ended.printed
    assert not [path for path in (ended.work, Path.cwd(), Path.home()) if str(path) in text]


@pytest.mark.deploy
def test_a_resumed_bench_makes_only_what_is_missing(ended: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def compress_noted(config: Any) -> Cost:
        made.append(config.out.stem)
        return Cost(1, 1.0, 1)

    monkeypatch.setattr(bench, "compress_apart", compress_noted)
    missing = next(iter(kept_runs(ended.work)))
    kept_runs(ended.work)[missing].unlink()
    document, _ = run_small(ended.work, "--resume")
    assert made == [missing]
    assert len(document["results"][PAIR]["results"]) == 13


@pytest.mark.deploy
def test_the_large_scope_measures_its_runs_alone_and_shows_no_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = replace(LARGE, recipe=SMALL.recipe, amount=SMALL.amount)
    monkeypatch.setattr(bench, "LARGE", tiny)
    document, printed = run_bench("--large", "--work", str(tmp_path), out=tmp_path / "large.json")
    results = document["results"]["instruct"]["results"]
    assert [result["run"] for result in results] == [asdict(run) for run in LARGE.runs]
    assert not [path for name in ("upper", "reverse") for path in tmp_path.rglob(name)]
    head = next(line for line in printed.splitlines() if line.startswith("| method "))
    assert " MB " in head
    assert " s " not in head
    assert "seconds" not in printed
    assert len(document["goals"]) == len(GOALS) - 2  # neither seconds nor more bytes


def test_an_unknown_pair_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--small", "--pairs", "upper,lower"])
    assert "no pair lower: give some of upper,reverse,instruct" in capsys.readouterr().err


def test_no_word_of_the_test_is_calibrated_on() -> None:
    task = make_tasks(WORDS)["upper"]
    splits: tuple[tuple[Split, bool], ...] = (("train", False), ("test", True))
    for split, held_out in splits:
        records = task_records(task, split, 1000)
        words = {record["completion"].lower() for record in records}
        assert {is_held_out(word) for word in words} == {held_out}


def test_chat_records_hold_the_answer() -> None:
    record = next(task_records(make_tasks(WORDS)["instruct"], "test", 10))
    assert [message["role"] for message in record["messages"]] == ["user", "assistant"]
    assert json.loads(record["messages"][1]["content"]).keys() == {"name", "size"}


def test_texts_are_the_same_each_time_and_no_two_are_alike(tmp_path: Path) -> None:
    task = make_tasks(WORDS)["reverse"]
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_texts(tmp_path / name, task, SMALL.amount)
    first, second = (
        [path.read_bytes() for path in sorted((tmp_path / n).iterdir())] for n in ("first", "second")
    )
    assert first == second
    assert len(set(first)) == 4


def test_unseen_sources_are_those_of_left_out_folders(tmp_path: Path) -> None:
    for name in ("idlelib/run.py", "os.py", "idlelib/icon.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert unseen_sources(tmp_path) == [b"idlelib/run.py"]
    assert unseen_sources(tmp_path / "idlelib") == []


def figures(ours: float) -> PairFigures:
    """Make figures: KL 1 for the baselines and `ours` for our runs, equal bytes, a tenth of the paper's time."""

    def figure(run: Run) -> DeltaFigure:
        fidelity = Fidelity(ours if run.recipe == "ours" else 1.0, 0.9, 5.0, 4.0, 100)
        seconds = 10.0 if run.recipe == "paper" else 1.0
        return DeltaFigure(run, Cost(1000, seconds, 10), Scores(fidelity, fidelity, 0.5))

    runs = [SCALAR, BITDELTA, PAPER, UNTRAINED, ONE_VECTOR, OURS, CODED, replace(CODED, budget=1.10)]
    runs += [PAPER_GENERAL, OURS_GENERAL, OURS_SELF]
    rest = figure(OURS).scores
    return PairFigures(rest, rest, [figure(run) for run in runs])


@pytest.mark.parametrize(("ours", "met"), [(0.08, 11), (0.3, 9), (0.5, 8), (1.2, 3)])
def test_a_goal_that_is_missed_is_said_to_be_missed(ours: float, met: int) -> None:
    lines = goal_table(list(goals({"good": figures(0.0), "other": figures(ours)}))).splitlines()[2:]
    assert sum(line.endswith(("|     met |", "| met |")) for line in lines) == met
    assert sum("(not met)" in line for line in lines) == len(GOALS) - met


def test_the_best_rate_of_a_baseline_counts() -> None:
    pair = figures(0.5)
    paper = pair.best(PAPER)
    better = Fidelity(0.25, 0.9, 5.0, 4.0, 100)
    faster = DeltaFigure(replace(PAPER, rate=1e-3), paper.cost, Scores(better, better, 0.5))
    both = PairFigures(pair.base, pair.finetune, [*pair.figures, faster])
    assert both.best(PAPER) is faster
    assert paper not in both.shown()
    assert GOALS[0].value(both) == 2.0


def test_a_curve_has_gaps_where_a_budget_was_not_tried() -> None:
    full, short = figures(0.25), figures(0.5)
    doubled = replace(full.figures[0], run=replace(CODED, budget=2.0))
    full = replace(full, figures=[doubled, *full.figures])
    rows = curve_table({"full": full, "short": short}).splitlines()[2:]
    cells = [[cell.strip() for cell in row.split("|")[2:-1]] for row in rows]
    assert cells == [["1", "1", "1", "1"], *[["1", "0.25", "1", "0.5"]] * 2, ["1", "0.25", "", ""]]
