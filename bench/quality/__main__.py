"""Measure how near each method's delta comes to its fine-tune, and the cost.

Fine-tunes of the demo's tasks are compressed by the paper's method, BitDelta's and ours, through `compress`, each in a
fresh process. Deltas are evaluated on text that no method was fitted to, of the fine-tune's own domain and of the
base's. The baselines run at three learning rates; the best on the evaluation text counts. --large measures one pair of
32 million weights instead, with less text and fewer methods. --resume continues an interrupted run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from bench.quality.evaluator import Evaluator, Scores
from bench.quality.runs import (
    BITDELTA,
    ONE_VECTOR,
    OURS,
    PAPER,
    SCALAR,
    UNTRAINED,
    Cost,
    Run,
    Text,
    compress_apart,
)
from bench.quality.tables import (
    CODED,
    OURS_GENERAL,
    OURS_SELF,
    DeltaFigure,
    PairFigures,
    curve_table,
    goal_table,
    measured_goals,
    pair_table,
    summary_table,
)
from bench.quality.text import Amount, write_texts
from bench.report import RESULTS, describe, write_result
from peraxis.demo.recipe import BaseRecipe, DemoRecipe, FinetuneRecipe, Phase
from peraxis.demo.train import Models, prepare

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


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
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
    device = torch.device("cpu")
    print(f"{describe(device)}; {scope.amount.samples} sequences of {scope.amount.length} tokens\n")
    if scope.timed:
        print(f"{summary_table(pairs)}\n")
    for name, pair in pairs.items():
        print(f"{name}: {models.tasks[name].description}\n\n{pair_table(pair, scope.timed)}\n")
    if not scope.runs:
        print(f"{curve_table(pairs)}\n")
    print(goal_table(pairs, scope.timed))
    default = None if args.small else RESULTS / ("quality-large.json" if args.large else "quality.json")
    if out := args.out or default:
        write_result(out, "quality", device, _document(scope, pairs))


def _models(scope: QualityScope, work: Path, names: Sequence[str]) -> Models:
    """Train a base and the fine-tunes of these tasks, or find them."""
    # Autocast's cache would keep the weights of the first step.
    with torch.autocast("cpu", torch.bfloat16, enabled=scope.bf16_training, cache_enabled=False):
        return prepare(work, _say, scope.recipe, names)


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
        _say(f"{self.name}, {run.name}: {_summary(figure)}")
        return figure


def _summary(figure: DeltaFigure) -> str:
    cost, scores = figure.cost, figure.scores
    return (
        f"{cost.artifact_bytes / 1e3:.0f} kB, KL {scores.domain.kl:.3g} in-domain and {scores.general.kl:.3g} "
        f"general, task {scores.score:.1%}, {cost.seconds:.1f} s"
    )


def _document(scope: QualityScope, pairs: dict[str, PairFigures]) -> dict[str, Any]:
    settings = {**asdict(scope.amount), "recipe": asdict(scope.recipe), "bf16_training": scope.bf16_training}
    if not scope.timed:
        settings["beside other work on the machine"] = True
    return {
        "settings": settings,
        "goals": [goal.as_json(pairs) for goal in measured_goals(pairs, scope.timed)],
        "pairs": {name: pair.as_json() for name, pair in pairs.items()},
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--small", action="store_true", help="models of some kilobytes; writes JSON only with --out"
    )
    size.add_argument(
        "--large", action="store_true", help="one pair of 32M weights, trained in bfloat16 for some half hour"
    )
    parser.add_argument(
        "--pairs", type=_names, help=f"some of {','.join(PAIRS)}; by default all, or with --large one"
    )
    parser.add_argument("--curve", type=_names, default=PAIRS, help="pairs to be compressed at every budget")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peraxis" / "demo"
    parser.add_argument(
        "--work",
        type=Path,
        default=cache,
        help="where trained models and finished runs are kept; by default the demo's",
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the runs that were finished before, of the same code"
    )
    parser.add_argument("--out", type=Path, help="the JSON file; by default one in bench/results")
    return parser.parse_args(argv)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(PAIRS):
        raise argparse.ArgumentTypeError(
            f"no pair {', '.join(sorted(unknown))}: give some of {','.join(PAIRS)}"
        )
    return names


if __name__ == "__main__":
    main()
