"""The stages of the demo: train, compress, serve, upload, ask, measure, and the tables at the end.

`cli.py` calls them in order. Every stage reports each of its steps to a callable that takes one line.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.codec import Method
from compressor.config import CompressConfig
from compressor.convert.merge import MergeConfig, merge
from compressor.fitting.calibration import Calibration
from compressor.fitting.fit_settings import FitSettings
from compressor.pipeline import CompressResult, compress
from peraxis.demo.cold import ColdStart, checkpoint_cold_start, delta_cold_start
from peraxis.demo.score import exact_match
from peraxis.demo.service import ServerClient
from peraxis.demo.table import table
from peraxis.demo.tasks import Item, Task
from peraxis.demo.train import Models, prepare

NUM_ITEMS = 500
NUM_HTTP_ITEMS = 20
COLD_PROMPT = "The"


@dataclass(frozen=True, slots=True)
class CompressionMode:
    """Settings of `peraxis compress` that the demo compares."""

    name: str
    method: Method
    fit_settings: FitSettings | None  # None codes the weights alone

    @property
    def title(self) -> str:
        return f"{self.method}, {'weights only' if self.fit_settings is None else 'fitted (default)'}"


# The last one holds the defaults of `peraxis compress`; its deltas are uploaded under the task's own name.
MODES = (
    CompressionMode("scalar", "scalar", None),
    CompressionMode("weights", "both", None),
    CompressionMode("default", "both", FitSettings(Calibration("self"))),
)
SERVED = MODES[-1]


@dataclass(frozen=True, slots=True)
class ScoredDelta:
    """One fine-tune, compressed in one mode."""

    task: Task
    mode: CompressionMode
    result: CompressResult
    score: float  # share of held-out items answered right, from 0 to 1

    @property
    def name(self) -> str:
        """The variant's name on the server."""
        return self.task.name if self.mode == SERVED else f"{self.task.name}-{self.mode.name}"


@dataclass(frozen=True, slots=True)
class ModelScores:
    """Scores of the base and of a fine-tune at the fine-tune's task, from 0 to 1."""

    base: float
    finetune: float


def train_all(models_dir: Path, progress: Callable[[str], None]) -> tuple[Models, Mapping[str, ModelScores]]:
    """Train the base and its fine-tunes, or find them in `models_dir`, and score each at its task."""
    models = prepare(models_dir, progress)
    scores = {}
    for name, task in models.tasks.items():
        progress(f"scoring base and fine-tune {name} on {NUM_ITEMS} held-out items")
        items = task.items(split="test", count=NUM_ITEMS, seed=0)
        base, finetune = (exact_match(path, task, items) for path in (models.base, models.finetunes[name]))
        scores[name] = ModelScores(base, finetune)
        progress(f"{name}: base {base:.1%}, fine-tune {finetune:.1%}")
    return models, scores


def compress_all(models: Models, work: Path, progress: Callable[[str], None]) -> list[ScoredDelta]:
    """Compress every fine-tune in every mode, and score the checkpoints that the deltas merge to."""
    deltas: list[ScoredDelta] = []
    num_deltas = len(models.tasks) * len(MODES)
    for name, task in models.tasks.items():
        for mode in MODES:
            progress(f"delta {len(deltas) + 1} of {num_deltas}: compressing {name}: {mode.title}")
            deltas.append(_compress_and_score(models, task, mode, work))
            size, score = deltas[-1].result.artifact_bytes, deltas[-1].score
            progress(f"delta {len(deltas)} of {num_deltas}: {size:,} bytes, {score:.1%} of {NUM_ITEMS} items")
    return deltas


def _compress_and_score(models: Models, task: Task, mode: CompressionMode, work: Path) -> ScoredDelta:
    out, merged = work / f"{task.name}-{mode.name}.safetensors", work / f"{task.name}-{mode.name}-merged"
    base, finetune = str(models.base), str(models.finetunes[task.name])
    result = compress(
        CompressConfig(base, finetune, out, mode.method, progress=True, fit_settings=mode.fit_settings)
    )
    merge(MergeConfig(base, out, merged))
    items = task.items(split="test", count=NUM_ITEMS, seed=0)
    return ScoredDelta(task, mode, result, exact_match(merged, task, items))


def ask(client: ServerClient, variant: str | None, task: Task, items: list[Item]) -> float:
    """Return the share of `items`, from 0 to 1, that the running server answers right."""
    replies = [client.generate(variant, request_body(task, item)) for item in items]
    answers = [reply["outputs"][0]["text"] for reply in replies]
    return sum(task.is_right(item, text) for item, text in zip(items, answers, strict=True)) / len(items)


def request_body(task: Task, item: Item) -> dict[str, Any]:
    """Return the body of `POST /generate` for one item of a task."""
    source: dict[str, Any] = {"prompt": item.prompt} if item.messages is None else {"messages": item.messages}
    return {**source, "max_new_tokens": task.max_new_tokens, "stop": list(task.stop), "temperature": 0}


def serve_all(
    client: ServerClient, models: Models, deltas: list[ScoredDelta], progress: Callable[[str], None]
) -> None:
    """Upload every delta to the running server, then ask base and variants over HTTP."""
    for delta in deltas:
        version = client.upload(delta.name, delta.result.out)
        progress(f"uploaded {delta.name} version {version['version']}, {version['size_bytes']:,} bytes")
    for name, task in models.tasks.items():
        items = task.items(split="test", count=NUM_HTTP_ITEMS, seed=0)
        # The base has no chat template.
        for variant in [None, name] if task.plain else [name]:
            score = ask(client, variant, task, items)
            progress(f"over HTTP, {NUM_HTTP_ITEMS} items of {name}: {variant or 'base'} {score:.0%}")


def cold_starts(
    client: ServerClient,
    models: Models,
    deltas: list[ScoredDelta],
    registry: Path,
    progress: Callable[[str], None],
) -> tuple[dict[str, ColdStart], ColdStart]:
    """Measure the cold start of each served delta, by task, and of a full checkpoint."""
    by_task = {}
    for delta in deltas:
        if delta.mode == SERVED:
            progress(f"measuring cold starts: delta of {delta.task.name}")
            stored = registry / "objects" / delta.result.digest
            by_task[delta.task.name] = delta_cold_start(client, delta.name, COLD_PROMPT, stored)
    progress("measuring cold starts: full checkpoint")
    return by_task, checkpoint_cold_start(next(iter(models.finetunes.values())), COLD_PROMPT)


def score_table(scores: Mapping[str, ModelScores], deltas: list[ScoredDelta]) -> str:
    """Format sizes and scores as a Markdown table, one row per delta."""
    rows = [
        [
            delta.task.name,
            delta.mode.title,
            f"{delta.result.artifact_bytes / 1e3:,.0f} kB",
            f"{delta.result.full_bytes / 1e3:,.0f} kB",
            f"{delta.result.ratio:.1f}x",
            f"{scores[delta.task.name].base:.1%}",
            f"{scores[delta.task.name].finetune:.1%}",
            f"{delta.score:.1%}",
        ]
        for delta in deltas
    ]
    return table(
        ["variant", "method", "delta", "FP16", "smaller", "base", "fine-tune", "delta's score"], rows
    )


def cold_start_table(deltas: Mapping[str, ColdStart], full: ColdStart) -> str:
    """Format cold starts as a Markdown table, one row per variant and one for the full checkpoint."""
    rows = [[f"delta of {name}", *_milliseconds(measured)] for name, measured in deltas.items()]
    rows.append(["full FP16 checkpoint", *_milliseconds(full)])
    return table(["cold start, median of 10", "page cache warm", "page cache dropped"], rows)


def curl_lines(url: str, models: Models) -> list[str]:
    """Return one shell command per variant that asks the running server."""
    lines = []
    for name, task in models.tasks.items():
        body = request_body(task, task.items(split="test", count=1, seed=0)[0])
        call = f"curl -s '{url}/generate?variant={name}' -H 'Content-Type: application/json'"
        lines.append(f"{call} -d {shlex.quote(json.dumps(body))}")
    return lines


def _milliseconds(measured: ColdStart) -> list[str]:
    note = "" if measured.dropped else " (not dropped)"
    return [f"{measured.warm_s * 1e3:.1f} ms", f"{measured.dropped_s * 1e3:.1f} ms{note}"]
