"""Measure how near each method's delta comes to its fine-tune, and the cost.

Fine-tunes of the demo's tasks are compressed by the paper's method, BitDelta's and ours, through `compress`, each in a
fresh process. Deltas are evaluated on text that no method was fitted to, of the fine-tune's own domain and of the
base's. The baselines run at three learning rates; the best on the evaluation text counts. --large measures one pair of
32 million weights instead, with less text and fewer methods. --resume continues an interrupted run.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from bench.harness import Bench, Goal, Report, option, say
from bench.quality_runs import (
    BITDELTA,
    ONE_VECTOR,
    OURS,
    PAPER,
    SCALAR,
    UNTRAINED,
    Amount,
    Cost,
    Evaluator,
    Run,
    Scores,
    Text,
    compress_apart,
    write_texts,
)
from deltastore.console import table
from peraxis.demo.train import BaseRecipe, DemoRecipe, FinetuneRecipe, Models, Phase, prepare

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


def goals(pairs: Mapping[str, PairFigures], timed: bool = True) -> Iterator[Goal]:
    """Yield the goals whose runs every pair has, for each pair; without those of seconds unless `timed`."""
    for goal in GOALS:
        if (timed or goal.ratio is not _seconds) and all(map(goal.is_measured, pairs.values())):
            for name, pair in pairs.items():
                yield Goal(goal.name, goal.value(pair), goal.limit, goal.at_least, name)


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
        rate = f", rate {figure.run.rate:g}" if figure.run.recipe == "paper" else ""
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


PAIRS = ("upper", "reverse", "instruct")
# With embeddings compressed; the goals need these.
GOAL_BUDGETS = (1.0, 1.10)
# Of 2.4 million weights. The demo's own recipe is for its time.
RECIPE = DemoRecipe(
    BaseRecipe(layers=6, phases=(Phase(240, 16, 64), Phase(60, 8, 128), Phase(20, 4, 256))),
    FinetuneRecipe(phases=(Phase(270, 8, 64), Phase(40, 5, 192)), rate=1.4e-3),
    chat=FinetuneRecipe(phases=(Phase(360, 16, 64), Phase(50, 6, 192)), rate=1.2e-3),
)


@dataclass(frozen=True, slots=True)
class QualityScope:
    """Sizes of the training and of the text, and the methods that are measured."""

    recipe: DemoRecipe = RECIPE
    amount: Amount = field(default_factory=Amount)
    bitdelta_rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3)
    paper_rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3)
    budgets: tuple[float, ...] = (1.0, 1.10, 1.25, 1.5, 2.0)  # with embeddings compressed
    pairs: tuple[str, ...] = PAIRS
    # If not empty, these runs alone, in this order, without other rates and budgets.
    runs: tuple[Run, ...] = ()
    # Under autocast: faster where the processor multiplies bfloat16, and much slower where it does not.
    bf16_training: bool = False
    # False for a machine with other work: tables then have no seconds.
    timed: bool = True


FULL = QualityScope()
SMALL = QualityScope(
    DemoRecipe(
        BaseRecipe(
            hidden=16, intermediate=24, layers=2, heads=2, kv_heads=1, phases=(Phase(2, 2, 32),), warmup=1
        ),
        FinetuneRecipe(phases=(Phase(2, 2, 64),), warmup=1),
    ),
    Amount(length=48, samples=20, test_samples=16, test_items=10),
    bitdelta_rates=(1e-3,),
    paper_rates=(3e-4, 1e-3),
    budgets=GOAL_BUDGETS,
)
LARGE = QualityScope(
    DemoRecipe(
        BaseRecipe(
            hidden=512,
            intermediate=1536,
            layers=10,
            heads=8,
            kv_heads=4,
            phases=(Phase(240, 32, 64), Phase(60, 16, 128), Phase(30, 8, 256)),
            rate=2e-3,
        ),
        FinetuneRecipe(phases=(Phase(130, 32, 64), Phase(24, 10, 192)), rate=8e-4),
    ),
    Amount(length=128, samples=64, test_samples=48, test_items=150),
    pairs=("instruct",),
    runs=(
        SCALAR,
        *(replace(BITDELTA, rate=rate) for rate in (1e-4, 3e-4, 1e-3, 3e-3)),
        *(replace(PAPER, rate=rate) for rate in (3e-5, 1e-4, 3e-4, 1e-3)),
        UNTRAINED,
        ONE_VECTOR,
        OURS,
        CODED,
        replace(PAPER, text="general"),
        OURS_GENERAL,
        OURS_SELF,
    ),
    bf16_training=True,
    timed=False,
)


def _models(scope: QualityScope, work: Path, names: Sequence[str]) -> Models:
    """Train a base and the fine-tunes of these tasks, or find them."""
    # Autocast's cache would keep the weights of the first step.
    with torch.autocast("cpu", torch.bfloat16, enabled=scope.bf16_training, cache_enabled=False):
        return prepare(work, say, scope.recipe, names)


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A base and one fine-tune, which every method compresses."""

    name: str
    models: Models
    scope: QualityScope
    work: Path  # deltas, and what was measured of each
    evaluator: Evaluator
    files: dict[Text, Path]  # calibration text

    @classmethod
    def of(cls, models: Models, name: str, scope: QualityScope, work: Path) -> Pair:
        folder = work / name
        folder.mkdir(parents=True, exist_ok=True)
        task = models.tasks[name]
        texts = write_texts(folder, task, scope.amount)
        evaluator = Evaluator.of(models.base, models.finetunes[name], task, texts, scope.amount)
        files: dict[Text, Path] = {"in-domain": texts.domain, "general": texts.general}
        return cls(name, models, scope, folder, evaluator, files)

    def measure(self) -> PairFigures:
        """Measure every run, one after the other, except those that were measured before."""
        figures = [self.run(run) for run in self.scope.runs] or self._sweep()
        return PairFigures(self.evaluator.of_base(), self.evaluator.of_finetune(), figures)

    def _sweep(self) -> list[DeltaFigure]:
        """Measure every method at each rate and each budget."""
        scope = self.scope
        papers = [self.run(replace(PAPER, rate=rate)) for rate in scope.paper_rates]
        best = min(papers, key=lambda figure: figure.scores.domain.kl).run.rate
        figures = [self.run(SCALAR)]
        figures += [self.run(replace(BITDELTA, rate=rate)) for rate in scope.bitdelta_rates]
        figures += papers
        figures += [self.run(run) for run in (UNTRAINED, ONE_VECTOR, OURS, replace(OURS, budget=1.10))]
        figures += [self.run(replace(CODED, budget=budget)) for budget in scope.budgets]
        general = replace(PAPER, text="general", rate=best)
        return figures + [self.run(run) for run in (general, OURS_GENERAL, OURS_SELF)]

    def run(self, run: Run) -> DeltaFigure:
        """Make one delta and evaluate it, or read its kept result."""
        kept, artifact = self.work / f"{run.name}.json", self.work / f"{run.name}.safetensors"
        if kept.exists():
            document = json.loads(kept.read_text())
            return DeltaFigure(run, Cost(**document["cost"]), Scores.from_json(document["scores"]))
        base, finetune = self.models.base, self.models.finetunes[self.name]
        cost = compress_apart(run.config(base, finetune, artifact, self.files, self.scope.amount))
        figure = DeltaFigure(run, cost, self.evaluator.of_delta(artifact))
        whole = artifact.with_suffix(".partial")
        whole.write_text(json.dumps({"cost": asdict(cost), "scores": figure.scores.as_json()}))
        # Last, so that a reader finds the whole result or none.
        whole.rename(kept)
        say(f"{self.name}, {run.name}: {_summary(figure)}")
        return figure


def _summary(figure: DeltaFigure) -> str:
    cost, scores = figure.cost, figure.scores
    return (
        f"{cost.artifact_bytes / 1e3:.0f} kB, KL {scores.domain.kl:.3g} in-domain and {scores.general.kl:.3g} "
        f"general, task {scores.score:.1%}, {cost.seconds:.1f} s"
    )


def report(args: Namespace) -> Report:
    scope = SMALL if args.small else LARGE if args.large else FULL
    names = args.pairs or scope.pairs
    disable_progress_bar()
    models = _models(scope, args.work, names)
    work = models.base.parent / f"quality-{scope.amount.samples}x{scope.amount.length}"
    if not args.resume:
        for name in names:
            shutil.rmtree(work / name, ignore_errors=True)
    without_curve = replace(scope, budgets=GOAL_BUDGETS)
    pairs = {
        name: Pair.of(models, name, scope if name in args.curve else without_curve, work).measure()
        for name in names
    }
    tables = [
        f"{name}: {models.tasks[name].description}\n\n{pair_table(pair, scope.timed)}"
        for name, pair in pairs.items()
    ]
    settings = {**asdict(scope.amount), "recipe": asdict(scope.recipe), "bf16_training": scope.bf16_training}
    if not scope.timed:
        settings["beside other work on the machine"] = True
    return Report(
        settings,
        {name: pair.as_json() for name, pair in pairs.items()},
        [
            *([summary_table(pairs)] if scope.timed else []),
            *tables,
            *([] if scope.runs else [curve_table(pairs)]),
        ],
        list(goals(pairs, scope.timed)),
        conditions=f"{scope.amount.samples} sequences of {scope.amount.length} tokens",
    )


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(PAIRS):
        raise ArgumentTypeError(f"no pair {', '.join(sorted(unknown))}: give some of {','.join(PAIRS)}")
    return names


CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peraxis" / "demo"
OPTIONS = (
    option(
        "--large",
        False,
        "one pair of 32M weights, trained in bfloat16 for some half hour",
        instead_of_small=True,
    ),
    option("--pairs", None, f"some of {','.join(PAIRS)}; by default all, or with --large one", type=_names),
    option("--curve", PAIRS, "pairs to be compressed at every budget", type=_names),
    option(
        "--work", CACHE, "where trained models and finished runs are kept; by default the demo's", type=Path
    ),
    option("--resume", False, "keep the runs that were finished before, of the same code"),
)
main = Bench(
    "quality",
    __doc__,
    report,
    OPTIONS,
    small="models of some kilobytes",
    file=lambda args: "quality-large.json" if args.large else "quality.json",
)

if __name__ == "__main__":
    sys.exit(main())
