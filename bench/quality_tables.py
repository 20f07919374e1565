"""What the quality bench says of its figures: a table per pair, the curve of KL against bytes, and the goals.

Knows figures; makes none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.quality_judge import Verdict
from bench.quality_runs import BITDELTA, ONE_VECTOR, OURS, PAPER, UNTRAINED, Cost, Run
from demo.table import table

HEAD = (
    *("method", "fitted to", "kB", "KL, in-domain", "general", "agreement, in-domain", "general"),
    *("perplexity, in-domain", "general", "task", "s", "MB"),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One delta."""

    run: Run
    cost: Cost
    verdict: Verdict

    def as_json(self) -> dict[str, Any]:
        return {"run": asdict(self.run), **asdict(self.cost), **self.verdict.as_json()}


@dataclass(frozen=True, slots=True)
class PairFigures:
    """Every delta of one fine-tune, and what they are read by."""

    base: Verdict
    finetune: Verdict
    figures: Sequence[Figure]

    def best(self, run: Run) -> Figure:
        """Of this run's rates, the one that is nearest to the fine-tune in its own domain."""
        return min(self._alike(run), key=lambda figure: figure.verdict.domain.kl)

    def has(self, run: Run) -> bool:
        """Whether it was made, at any rate."""
        return bool(self._alike(run))

    def shown(self) -> list[Figure]:
        """The best of each run's rates, in the order of the runs."""
        return [figure for figure in self.figures if figure is self.best(figure.run)]

    def as_json(self) -> dict[str, Any]:
        return {
            "base": self.base.as_json(),
            "finetune": self.finetune.as_json(),
            "results": [figure.as_json() for figure in self.figures],
        }

    def _alike(self, run: Run) -> list[Figure]:
        return [figure for figure in self.figures if replace(figure.run, rate=run.rate) == run]


@dataclass(frozen=True, slots=True)
class Goal:
    """One line that the figures are held against."""

    name: str
    limit: float
    value: Callable[[PairFigures], float]
    at_least: bool = False  # else at most

    def is_met(self, pair: PairFigures) -> bool:
        value = self.value(pair)
        return value >= self.limit if self.at_least else value <= self.limit

    def as_json(self, pairs: Mapping[str, PairFigures]) -> dict[str, Any]:
        values = {
            name: {"value": round(self.value(pair), 4), "met": self.is_met(pair)}
            for name, pair in pairs.items()
        }
        return {"goal": self.name, "at_least" if self.at_least else "at_most": self.limit, "pairs": values}


def _domain_kl(run: Run, over: Run) -> Callable[[PairFigures], float]:
    return lambda pair: pair.best(run).verdict.domain.kl / pair.best(over).verdict.domain.kl


def _general_kl(run: Run, over: Run) -> Callable[[PairFigures], float]:
    return lambda pair: pair.best(run).verdict.general.kl / pair.best(over).verdict.general.kl


def _seconds(run: Run, over: Run) -> Callable[[PairFigures], float]:
    return lambda pair: pair.best(run).cost.seconds / pair.best(over).cost.seconds


def _bytes_apart(run: Run, other: Run) -> Callable[[PairFigures], float]:
    return lambda pair: abs(pair.best(run).cost.artifact_bytes / pair.best(other).cost.artifact_bytes - 1)


OURS_GENERAL, PAPER_GENERAL = replace(OURS, text="general"), replace(PAPER, text="general")
OURS_SELF = replace(OURS, text="self")
CODED = replace(OURS, embeddings="compress")
GOALS = (
    Goal("KL in-domain, ours with one vector / paper", 0.4, _domain_kl(ONE_VECTOR, PAPER)),
    Goal("KL in-domain, ours with one vector / BitDelta", 0.08, _domain_kl(ONE_VECTOR, BITDELTA)),
    Goal("bytes, ours with one vector and paper differ by", 0.01, _bytes_apart(ONE_VECTOR, PAPER)),
    Goal("KL general, ours with one vector / paper", 0.6, _general_kl(ONE_VECTOR, PAPER)),
    Goal("KL general, ours / paper", 0.6, _general_kl(OURS, PAPER)),
    Goal("KL general, ours / paper, fitted to general text", 0.6, _general_kl(OURS_GENERAL, PAPER_GENERAL)),
    Goal("KL in-domain, ours self / paper fitted to general text", 0.2, _domain_kl(OURS_SELF, PAPER_GENERAL)),
    Goal("KL in-domain, ours without training / paper", 1.0, _domain_kl(UNTRAINED, PAPER)),
    Goal("seconds, paper / ours without training", 5.0, _seconds(PAPER, UNTRAINED), at_least=True),
    Goal("KL in-domain, embeddings compressed / paper", 1.5, _domain_kl(CODED, PAPER)),
    Goal("the same with 10% more bytes", 1.0, _domain_kl(replace(CODED, budget=1.10), PAPER)),
)


def summary_table(pairs: Mapping[str, PairFigures]) -> str:
    """All pairs in short, a row per method; bytes, seconds and memory are the first pair's."""
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
                f"{each.verdict.domain.kl:.2g} / {each.verdict.general.kl:.2g}",
                f"{each.verdict.score:.1%}",
            )
        ]
        cost = (f"{figure.cost.artifact_bytes / 1e3:.0f}", f"{figure.cost.seconds:.0f}")
        rows.append(
            [_label(figure.run), figure.run.text, *cells, *cost, f"{figure.cost.peak_memory_bytes / 1e6:.0f}"]
        )
    return table([*head, "kB", "s", "MB"], rows)


def pair_table(pair: PairFigures) -> str:
    """A row per method."""
    rows = [
        ["base", "", "", *_verdict(pair.base), "", ""],
        ["fine-tune", "", "", *_verdict(pair.finetune), "", ""],
    ]
    for figure in pair.shown():
        cost = [f"{figure.cost.seconds:.1f}", f"{figure.cost.peak_memory_bytes / 1e6:.0f}"]
        size = f"{figure.cost.artifact_bytes / 1e3:.0f}"
        rate = f", rate {figure.run.rate:g}" if figure.run.solver == "adamw" else ""
        rows.append([_label(figure.run) + rate, figure.run.text, size, *_verdict(figure.verdict), *cost])
    return table(HEAD, rows)


def curve_table(pairs: Mapping[str, PairFigures]) -> str:
    """KL in-domain against bytes: the paper, and ours with everything compressed at each budget."""
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


def goal_table(pairs: Mapping[str, PairFigures]) -> str:
    """Each goal beside what was reached, met or not."""
    rows = []
    for goal in GOALS:
        cells = [
            f"{goal.value(pair):.3g}{'' if goal.is_met(pair) else ' (not met)'}" for pair in pairs.values()
        ]
        is_met = all(goal.is_met(pair) for pair in pairs.values())
        limit = f"{'at least' if goal.at_least else 'at most'} {goal.limit:g}"
        rows.append([goal.name, limit, *cells, "met" if is_met else "not met"])
    return table(["goal", "limit", *pairs, ""], rows)


def _point(figure: Figure | None) -> tuple[str, str]:
    """Of a curve."""
    if figure is None:
        return "", ""
    return f"{figure.cost.artifact_bytes / 1e3:.0f}", f"{figure.verdict.domain.kl:.3g}"


def _label(run: Run) -> str:
    parts = [run.method]
    if run.embeddings == "compress":
        parts.append("embeddings compressed")
    if run.budget > 1:
        parts.append(f"{run.budget - 1:.0%} more bytes")
    return ", ".join(parts)


def _verdict(verdict: Verdict) -> list[str]:
    both = (verdict.domain, verdict.general)
    return [
        *(f"{fidelity.kl:.3g}" for fidelity in both),
        *(f"{fidelity.agreement:.2%}" for fidelity in both),
        *(f"{fidelity.perplexity:.4g}" for fidelity in both),
        f"{verdict.score:.1%}",
    ]
