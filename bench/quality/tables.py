"""Tables of the quality bench: one per pair, the curve of KL against bytes, and the goals. Measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.quality.evaluator import Scores
from bench.quality.runs import BITDELTA, ONE_VECTOR, OURS, PAPER, UNTRAINED, Cost, Run
from peraxis.demo.table import table

HEAD = (
    *("method", "fitted to", "kB", "KL, in-domain", "general", "agreement, in-domain", "general"),
    *("perplexity, in-domain", "general", "task", "s", "MB"),
)


@dataclass(frozen=True, slots=True)
class DeltaFigure:
    """Cost and scores of one delta."""

    run: Run
    cost: Cost
    scores: Scores

    def as_json(self) -> dict[str, Any]:
        return {"run": asdict(self.run), **asdict(self.cost), **self.scores.as_json()}


@dataclass(frozen=True, slots=True)
class PairFigures:
    """All deltas of one fine-tune, with the scores of its base and of itself."""

    base: Scores
    finetune: Scores
    figures: Sequence[DeltaFigure]

    def best(self, run: Run) -> DeltaFigure:
        """Return the rate of this run with the least KL in-domain."""
        return min(self._alike(run), key=lambda figure: figure.scores.domain.kl)

    def has(self, run: Run) -> bool:
        """True if the run was made at any rate."""
        return bool(self._alike(run))

    def shown(self) -> list[DeltaFigure]:
        """Return each run at its best rate, in the order of the runs."""
        return [figure for figure in self.figures if figure is self.best(figure.run)]

    def as_json(self) -> dict[str, Any]:
        return {
            "base": self.base.as_json(),
            "finetune": self.finetune.as_json(),
            "results": [figure.as_json() for figure in self.figures],
        }

    def _alike(self, run: Run) -> list[DeltaFigure]:
        return [figure for figure in self.figures if replace(figure.run, rate=run.rate) == run]


@dataclass(frozen=True, slots=True)
class QualityGoal:
    """A limit for the ratio of two runs' figures."""

    name: str
    limit: float
    run: Run
    over: Run
    ratio: Callable[[DeltaFigure, DeltaFigure], float]
    at_least: bool = False  # else at most

    def is_measured(self, pair: PairFigures) -> bool:
        return pair.has(self.run) and pair.has(self.over)

    def value(self, pair: PairFigures) -> float:
        return self.ratio(pair.best(self.run), pair.best(self.over))

    def is_met(self, pair: PairFigures) -> bool:
        value = self.value(pair)
        return value >= self.limit if self.at_least else value <= self.limit

    def as_json(self, pairs: Mapping[str, PairFigures]) -> dict[str, Any]:
        values = {
            name: {"value": round(self.value(pair), 4), "met": self.is_met(pair)}
            for name, pair in pairs.items()
        }
        return {"goal": self.name, "at_least" if self.at_least else "at_most": self.limit, "pairs": values}


def _domain_kl(figure: DeltaFigure, over: DeltaFigure) -> float:
    return figure.scores.domain.kl / over.scores.domain.kl


def _general_kl(figure: DeltaFigure, over: DeltaFigure) -> float:
    return figure.scores.general.kl / over.scores.general.kl


def _seconds(figure: DeltaFigure, over: DeltaFigure) -> float:
    return figure.cost.seconds / over.cost.seconds


def _bytes_apart(figure: DeltaFigure, other: DeltaFigure) -> float:
    return abs(figure.cost.artifact_bytes / other.cost.artifact_bytes - 1)


OURS_GENERAL, PAPER_GENERAL = replace(OURS, text="general"), replace(PAPER, text="general")
OURS_SELF = replace(OURS, text="self")
CODED = replace(OURS, embeddings="compress")
CODED_MORE = replace(CODED, budget=1.10)
GOALS = (
    QualityGoal("KL in-domain, ours with one vector / paper", 0.4, ONE_VECTOR, PAPER, _domain_kl),
    QualityGoal("KL in-domain, ours with one vector / BitDelta", 0.08, ONE_VECTOR, BITDELTA, _domain_kl),
    QualityGoal("bytes, ours with one vector and paper differ by", 0.01, ONE_VECTOR, PAPER, _bytes_apart),
    QualityGoal("KL general, ours with one vector / paper", 0.6, ONE_VECTOR, PAPER, _general_kl),
    QualityGoal("KL general, ours / paper", 0.6, OURS, PAPER, _general_kl),
    QualityGoal(
        "KL general, ours / paper, fitted to general text", 0.6, OURS_GENERAL, PAPER_GENERAL, _general_kl
    ),
    QualityGoal(
        "KL in-domain, ours self / paper fitted to general text", 0.2, OURS_SELF, PAPER_GENERAL, _domain_kl
    ),
    QualityGoal("KL in-domain, ours without training / paper", 1.0, UNTRAINED, PAPER, _domain_kl),
    QualityGoal("seconds, paper / ours without training", 5.0, PAPER, UNTRAINED, _seconds, at_least=True),
    QualityGoal("KL in-domain, embeddings compressed / paper", 1.5, CODED, PAPER, _domain_kl),
    QualityGoal("the same with 10% more bytes", 1.0, CODED_MORE, PAPER, _domain_kl),
)


def measured_goals(pairs: Mapping[str, PairFigures], timed: bool = True) -> list[QualityGoal]:
    """Return the goals whose runs every pair has; without those of seconds unless `timed`."""
    return [
        goal
        for goal in GOALS
        if (timed or goal.ratio is not _seconds) and all(map(goal.is_measured, pairs.values()))
    ]


def summary_table(pairs: Mapping[str, PairFigures]) -> str:
    """Summarize all pairs, a row per method; bytes, seconds and memory are the first pair's."""
    first, *_ = pairs.values()
    head = ["method", "fitted to", *(f"{what}, {name}" for name in pairs for what in ("KL", "task"))]
    rows = []
    for figure in first.shown():
        own = [pair.best(figure.run) for pair in pairs.values() if pair.has(figure.run)]
        if len(own) < len(pairs):
            continue  # on the curve alone
        cells = [
            cell
            for each in own
            for cell in (
                f"{each.scores.domain.kl:.2g} / {each.scores.general.kl:.2g}",
                f"{each.scores.score:.1%}",
            )
        ]
        cost = (f"{figure.cost.artifact_bytes / 1e3:.0f}", f"{figure.cost.seconds:.0f}")
        rows.append(
            [_label(figure.run), figure.run.text, *cells, *cost, f"{figure.cost.peak_memory_bytes / 1e6:.0f}"]
        )
    return table([*head, "kB", "s", "MB"], rows)


def pair_table(pair: PairFigures, timed: bool = True) -> str:
    """Return one pair's table, a row per method; without seconds unless `timed`."""
    rows = [
        ["base", "", "", *_score_cells(pair.base), "", ""],
        ["fine-tune", "", "", *_score_cells(pair.finetune), "", ""],
    ]
    for figure in pair.shown():
        cost = [f"{figure.cost.seconds:.1f}", f"{figure.cost.peak_memory_bytes / 1e6:.0f}"]
        size = f"{figure.cost.artifact_bytes / 1e3:.0f}"
        rate = f", rate {figure.run.rate:g}" if figure.run.solver == "adamw" else ""
        rows.append([_label(figure.run) + rate, figure.run.text, size, *_score_cells(figure.scores), *cost])
    columns = [column for column, what in enumerate(HEAD) if timed or what != "s"]
    return table([HEAD[column] for column in columns], [[row[column] for column in columns] for row in rows])


def curve_table(pairs: Mapping[str, PairFigures]) -> str:
    """Return KL in-domain against bytes: the paper, and ours with everything compressed at each budget."""
    coded = {
        figure.run: None
        for pair in pairs.values()
        for figure in pair.figures
        if figure.run.embeddings == "compress"
    }
    head = ["in-domain", *(f"{what}, {name}" for name in pairs for what in ("kB", "KL"))]
    rows = []
    for run in [PAPER, *sorted(coded, key=lambda run: run.budget)]:
        figures = [pair.best(run) if pair.has(run) else None for pair in pairs.values()]
        rows.append([_label(run), *(cell for figure in figures for cell in _point(figure))])
    return table(head, rows)


def goal_table(pairs: Mapping[str, PairFigures], timed: bool = True) -> str:
    """Return each goal whose runs were made, with its limit and the ratios reached."""
    rows = []
    for goal in measured_goals(pairs, timed):
        cells = [
            f"{goal.value(pair):.3g}{'' if goal.is_met(pair) else ' (not met)'}" for pair in pairs.values()
        ]
        is_met = all(goal.is_met(pair) for pair in pairs.values())
        limit = f"{'at least' if goal.at_least else 'at most'} {goal.limit:g}"
        rows.append([goal.name, limit, *cells, "met" if is_met else "not met"])
    return table(["goal", "limit", *pairs, ""], rows)


def _point(figure: DeltaFigure | None) -> tuple[str, str]:
    """Return the cells of one point of the curve."""
    if figure is None:
        return "", ""
    return f"{figure.cost.artifact_bytes / 1e3:.0f}", f"{figure.scores.domain.kl:.3g}"


def _label(run: Run) -> str:
    parts = [run.method]
    if run.embeddings == "compress":
        parts.append("embeddings compressed")
    if run.budget > 1:
        parts.append(f"{run.budget - 1:.0%} more bytes")
    return ", ".join(parts)


def _score_cells(scores: Scores) -> list[str]:
    both = (scores.domain, scores.general)
    return [
        *(f"{fidelity.kl:.3g}" for fidelity in both),
        *(f"{fidelity.agreement:.2%}" for fidelity in both),
        *(f"{fidelity.perplexity:.4g}" for fidelity in both),
        f"{scores.score:.1%}",
    ]
