"""The stages of the demo: train, compress, serve, ask, roll back, measure, and the tables at the end.

`cli.py` calls them in order. A stage reports each of its steps to `progress` and says what came of it to `tell`; both
take one line.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.config import Calibration, CompressConfig, FitSettings
from compressor.pipeline import CompressResult, compress
from deltastore.console import table
from peraxis.demo.measure import FirstTokens, checkpoint_first_tokens, delta_first_tokens, exact_match
from peraxis.demo.service import ServerClient
from peraxis.demo.tasks import Item, Task
from peraxis.demo.train import DEMO_RECIPE, QUICK_RECIPE, DemoRecipe, Models, prepare

Line = Callable[[str], None]

# The task whose delta is fitted, too, as version 2 of its variant.
FITTED_TASK = "instruct"
# Requests of scores that are under way at a time.
NUM_CONNECTIONS = 32
PROMPT = "The"


@dataclass(frozen=True, slots=True)
class Scope:
    """Sizes of the models, of the fit and of the scores."""

    recipe: DemoRecipe
    num_items: int  # held-out items of a score
    fit: Calibration


FULL = Scope(DEMO_RECIPE, 200, Calibration("self", samples=96, length=96))
QUICK = Scope(QUICK_RECIPE, 24, Calibration("self", samples=24, length=48))


@dataclass(frozen=True, slots=True)
class ModelScores:
    """Scores of the base and of a fine-tune at the fine-tune's task, from 0 to 1."""

    base: float
    finetune: float


@dataclass(frozen=True, slots=True)
class Delta:
    """One artifact of a fine-tune: a version of the variant that has the task's name."""

    task: Task
    version: int
    result: CompressResult
    is_fitted: bool

    @property
    def model(self) -> str:
        """The name of this version in requests."""
        return f"{self.task.name}@{self.version}"


def train_all(
    scope: Scope, models_dir: Path, progress: Line, tell: Line
) -> tuple[Models, Mapping[str, ModelScores]]:
    """Train the base and its fine-tunes, or find them in `models_dir`, and score each at its task."""
    began = time.monotonic()
    models = prepare(models_dir, progress, scope.recipe)
    scores = {}
    for name, task in models.tasks.items():
        progress(f"scoring base and fine-tune {name}")
        items = task.items(split="test", count=scope.num_items, seed=0)
        base, finetune = (exact_match(path, task, items) for path in (models.base, models.finetunes[name]))
        scores[name] = ModelScores(base, finetune)
    tell(f"A base and three full fine-tunes of it, trained and scored in {_since(began)}:")
    for name, task in models.tasks.items():
        tell(
            f"  {name:9} {task.description}: {scores[name].finetune:.1%} right, the base {scores[name].base:.1%}"
        )
    return models, scores


def compress_all(scope: Scope, models: Models, work: Path, progress: Line, tell: Line) -> list[Delta]:
    """Compress every fine-tune from its weights alone, and one of them fitted to text, too."""
    deltas = []
    for name, task in models.tasks.items():
        for is_fitted in (False, True) if name == FITTED_TASK else (False,):
            progress(f"compressing {name}, {_how(is_fitted)}")
            out = work / f"{name}-{2 if is_fitted else 1}.safetensors"
            settings = FitSettings(scope.fit) if is_fitted else None
            config = CompressConfig(
                str(models.base), str(models.finetunes[name]), out, progress=is_fitted, fit_settings=settings
            )
            deltas.append(Delta(task, 2 if is_fitted else 1, compress(config), is_fitted))
    tell("Their deltas, one sign bit per weight and a scale per row and column:")
    for delta in deltas:
        result = delta.result
        tell(
            f"  {delta.task.name:9} {_how(delta.is_fitted):22} {result.artifact_bytes / 1e3:5,.0f} kB in place of "
            f"{result.full_bytes / 1e3:,.0f} kB, {result.ratio:.1f} times smaller, in {result.seconds:.1f} s"
        )
    return deltas


def publish_all(client: ServerClient, deltas: Sequence[Delta], progress: Line, tell: Line) -> None:
    """Upload every delta to the running server; a variant's later version becomes the active one."""
    began = time.monotonic()
    for delta in deltas:
        version = client.upload(delta.task.name, delta.result.out)["version"]
        progress(f"uploaded {delta.task.name} version {version}")
    tell(f"{len(deltas)} deltas uploaded to the running server in {_since(began)}.")


def ask_in_one_batch(client: ServerClient, models: Models, tell: Line) -> None:
    """Ask the base and every variant at once, and show their answers."""
    first = next(iter(models.tasks.values()))
    asked: list[tuple[str | None, Task]] = [(None, first), *models.tasks.items()]
    items = [task.items(split="test", count=1, seed=0)[0] for _, task in asked]
    requests = [(name, request_body(task, item)) for (name, task), item in zip(asked, items, strict=True)]
    # Loads and what only first requests pay for are over when the time is taken.
    _ask_at_once(client, requests)
    began = time.monotonic()
    texts = _ask_at_once(client, requests)
    tell(f"The base and three variants, asked at once, share a batch and answer in {_since(began)}:")
    for (name, _), item, text in zip(asked, items, texts, strict=True):
        tell(f"  {name or 'base':9} {item.prompt:22} {text.splitlines()[0] if text else ''}")


def score_all(
    client: ServerClient, scope: Scope, deltas: Sequence[Delta], progress: Line, tell: Line
) -> Mapping[str, float]:
    """Return each version's share of right answers, from 0 to 1; requests of all versions are mixed."""
    progress(f"asking {len(deltas)} versions for {scope.num_items} held-out items each, over HTTP")
    items = [delta.task.items("test", scope.num_items, seed=0) for delta in deltas]
    # One item of every version after another, so that every batch has all of them.
    asked = [each for row in zip(*items, strict=True) for each in zip(deltas, row, strict=True)]
    began = time.monotonic()
    texts = _ask_at_once(client, [(delta.model, request_body(delta.task, item)) for delta, item in asked])
    tell(f"{len(asked):,} more questions to {len(deltas)} versions, mixed, in {_since(began)}.")
    right = dict.fromkeys((delta.model for delta in deltas), 0)
    for (delta, item), text in zip(asked, texts, strict=True):
        right[delta.model] += delta.task.is_right(item, text)
    return {model: count / scope.num_items for model, count in right.items()}


def roll_back(client: ServerClient, deltas: Sequence[Delta], tell: Line) -> None:
    """Make the older version of the fitted variant active, and then the newer one again."""
    task = next(delta.task for delta in deltas if delta.is_fitted)
    body = request_body(task, task.items(split="test", count=1, seed=0)[0])
    for version, how in ((1, "Rolled back"), (2, "Promoted again")):
        began = time.monotonic()
        client.activate(task.name, version)
        answering = client.generate(task.name, body)["version"]
        tell(
            f"{how}: {task.name} is version {version}, and version {answering} answered after {_since(began)}."
        )


def first_tokens(
    client: ServerClient, models: Models, deltas: Sequence[Delta], registry: Path, progress: Line
) -> tuple[FirstTokens, FirstTokens]:
    """Measure the time to the first token of the fitted delta, and of its fine-tune's full checkpoint."""
    progress("measuring times to the first token, resident and cold")
    delta = next(delta for delta in deltas if delta.is_fitted)
    stored = registry / "objects" / delta.result.digest
    return (
        delta_first_tokens(client, delta.task.name, PROMPT, stored),
        checkpoint_first_tokens(models.finetunes[delta.task.name], PROMPT),
    )


def request_body(task: Task, item: Item) -> dict[str, Any]:
    """Return the body of `POST /generate` for one item of a task."""
    source: dict[str, Any] = {"prompt": item.prompt} if item.messages is None else {"messages": item.messages}
    return {**source, "max_new_tokens": task.max_new_tokens, "stop": list(task.stop), "temperature": 0}


def score_table(
    models: Mapping[str, ModelScores], served: Mapping[str, float], deltas: Sequence[Delta]
) -> str:
    """Format sizes and scores as a Markdown table, one row per delta."""
    rows = [
        [
            delta.model,
            _how(delta.is_fitted),
            f"{delta.result.seconds:.1f} s",
            f"{delta.result.artifact_bytes / 1e3:,.0f} kB",
            f"{delta.result.ratio:.1f}x",
            f"{models[delta.task.name].base:.1%}",
            f"{models[delta.task.name].finetune:.1%}",
            f"{served[delta.model]:.1%}",
        ]
        for delta in deltas
    ]
    head = ["variant", "made", "in", "delta", "smaller", "base right", "fine-tune", "delta, served"]
    return table(head, rows)


def first_token_table(delta: FirstTokens, checkpoint: FirstTokens) -> str:
    """Format times to the first token as a Markdown table."""
    rows = [
        [
            name,
            *(f"{each * 1e3:.1f} ms" for each in (measured.resident_s, measured.warm_s)),
            _dropped(measured),
        ]
        for name, measured in (("delta", delta), ("full FP16 checkpoint", checkpoint))
    ]
    return table(["first token, median of 10", "resident", "from the page cache", "page cache dropped"], rows)


def curl_lines(url: str, models: Models) -> list[str]:
    """Return one shell command per variant that asks the running server."""
    lines = []
    for name, task in models.tasks.items():
        body = request_body(task, task.items(split="test", count=1, seed=0)[0])
        call = f"curl -s '{url}/generate?variant={name}' -H 'Content-Type: application/json'"
        lines.append(f"{call} -d {shlex.quote(json.dumps(body))}")
    return lines


def _ask_at_once(client: ServerClient, requests: Sequence[tuple[str | None, dict[str, Any]]]) -> list[str]:
    """Return the answers to requests of a variant, or None for the base, and a body."""
    with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
        replies = pool.map(lambda request: client.generate(*request), requests)
        return [reply["outputs"][0]["text"] for reply in replies]


def _how(is_fitted: bool) -> str:
    return "fitted to its own text" if is_fitted else "from weights alone"


def _since(began: float) -> str:
    seconds = time.monotonic() - began
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _dropped(measured: FirstTokens) -> str:
    return f"{measured.dropped_s * 1e3:.1f} ms" + ("" if measured.dropped else " (not dropped)")
