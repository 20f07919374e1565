"""The whole way, once: train, compress, serve, upload, ask, score. Prints the table; `cli.py` is its command."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.codec import Method
from compressor.config import CompressConfig
from compressor.convert.merge import MergeConfig, merge
from compressor.fitting.calibration import Calibration
from compressor.fitting.training import Training
from compressor.pipeline import CompressResult, compress
from demo.cold import ColdStart, checkpoint_cold_start, delta_cold_start
from demo.score import exact_match
from demo.service import ServerClient
from demo.table import table
from demo.tasks import Item, Task
from demo.train import Models, prepare

NUM_ITEMS = 500
NUM_ASKED = 20  # of the items, over HTTP
COLD_PROMPT = "The"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compress."""

    name: str
    method: Method
    training: Training | None

    @property
    def title(self) -> str:
        return f"{self.method}, {'weights only' if self.training is None else 'fitted (default)'}"


# The last one is what `peraxis compress` does where nothing else is said; it is uploaded under the task's own name.
WAYS = (
    Way("scalar", "scalar", None),
    Way("weights", "both", None),
    Way("default", "both", Training(Calibration("self"))),
)
SERVED = WAYS[-1]


@dataclass(frozen=True, slots=True)
class Delta:
    """One fine-tune, compressed one way."""

    task: Task
    way: Way
    made: CompressResult
    score: float  # of 500 held-out items, from 0 to 1

    @property
    def name(self) -> str:
        return self.task.name if self.way == SERVED else f"{self.task.name}-{self.way.name}"


@dataclass(frozen=True, slots=True)
class Standing:
    """How base and fine-tune do at a task, without any delta."""

    base: float
    finetune: float


def train_all(work: Path, say: Callable[[str], None]) -> tuple[Models, Mapping[str, Standing]]:
    """The base and its fine-tunes, trained or from the cache, and their scores."""
    models = prepare(work, say)
    standings = {}
    for name, task in models.tasks.items():
        items = task.items(split="test", count=NUM_ITEMS, seed=0)
        standings[name] = Standing(
            exact_match(models.base, task, items), exact_match(models.finetunes[name], task, items)
        )
        say(
            f"{name}: base {standings[name].base:.1%}, fine-tune {standings[name].finetune:.1%} of {NUM_ITEMS} items"
        )
    return models, standings


def compress_all(models: Models, work: Path, say: Callable[[str], None]) -> list[Delta]:
    """Every fine-tune in every way, scored through the checkpoint that its delta merges to."""
    deltas = []
    for name, task in models.tasks.items():
        items = task.items(split="test", count=NUM_ITEMS, seed=0)
        for way in WAYS:
            out = work / f"{name}-{way.name}.safetensors"
            config = CompressConfig(
                str(models.base), str(models.finetunes[name]), out, way.method, training=way.training
            )
            made = compress(config)
            merged = work / f"{name}-{way.name}-merged"
            merge(MergeConfig(str(models.base), out, merged))
            deltas.append(Delta(task, way, made, exact_match(merged, task, items)))
            say(f"{name}, {way.title}: {made.artifact_bytes:,} bytes, {deltas[-1].score:.1%}")
    return deltas


def ask(service: ServerClient, variant: str | None, task: Task, items: list[Item]) -> float:
    """The part of `items` that the running server answers right."""
    replies = [service.generate(variant, request_body(task, item)) for item in items]
    answers = [reply["outputs"][0]["text"] for reply in replies]
    return sum(task.is_right(item, text) for item, text in zip(items, answers, strict=True)) / len(items)


def request_body(task: Task, item: Item) -> dict[str, Any]:
    """The body of `POST /generate` for one item of a task."""
    source: dict[str, Any] = {"prompt": item.prompt} if item.messages is None else {"messages": item.messages}
    return {**source, "max_new_tokens": task.max_new_tokens, "stop": list(task.stop), "temperature": 0}


def serve_all(service: ServerClient, models: Models, deltas: list[Delta], say: Callable[[str], None]) -> None:
    """Upload every delta to the running server, then ask base and variants over HTTP."""
    for delta in deltas:
        version = service.upload(delta.name, delta.made.out)
        say(f"uploaded {delta.name} version {version['version']}, {version['size_bytes']:,} bytes")
    for name, task in models.tasks.items():
        items = task.items(split="test", count=NUM_ASKED, seed=0)
        asked = [name] if not task.plain else [None, name]  # the base has no chat template
        said = ", ".join(f"{variant or 'base'} {ask(service, variant, task, items):.0%}" for variant in asked)
        say(f"over HTTP, {NUM_ASKED} items of {name}: {said}")


def cold_starts(
    service: ServerClient, models: Models, deltas: list[Delta], registry: Path
) -> tuple[dict[str, ColdStart], ColdStart]:
    """Of each served delta, by task, and of a full checkpoint."""
    by_task = {}
    for delta in deltas:
        if delta.way == SERVED:
            stored = registry / "objects" / delta.made.digest
            by_task[delta.task.name] = delta_cold_start(service, delta.name, COLD_PROMPT, stored)
    return by_task, checkpoint_cold_start(next(iter(models.finetunes.values())), COLD_PROMPT)


def report(standings: Mapping[str, Standing], deltas: list[Delta]) -> str:
    """Sizes and scores, one line per delta."""
    rows = [
        [
            delta.task.name,
            delta.way.title,
            f"{delta.made.artifact_bytes / 1e3:,.0f} kB",
            f"{delta.made.full_bytes / 1e3:,.0f} kB",
            f"{delta.made.ratio:.1f}x",
            f"{standings[delta.task.name].base:.1%}",
            f"{standings[delta.task.name].finetune:.1%}",
            f"{delta.score:.1%}",
        ]
        for delta in deltas
    ]
    return table(
        ["variant", "method", "delta", "FP16", "smaller", "base", "fine-tune", "delta's score"], rows
    )


def cold_report(delta: Mapping[str, ColdStart], full: ColdStart) -> str:
    """Cold starts, one line per variant and one for the full checkpoint."""
    rows = [[f"delta of {name}", *_milliseconds(measured)] for name, measured in delta.items()]
    rows.append(["full FP16 checkpoint", *_milliseconds(full)])
    return table(["cold start, median of 10", "page cache warm", "page cache dropped"], rows)


def curl_lines(url: str, models: Models) -> list[str]:
    """One call of each variant, to be pasted into a shell."""
    lines = []
    for name, task in models.tasks.items():
        body = request_body(task, task.items(split="test", count=1, seed=0)[0])
        call = f"curl -s '{url}/generate?variant={name}' -H 'Content-Type: application/json'"
        lines.append(f"{call} -d {shlex.quote(json.dumps(body))}")
    return lines


def _milliseconds(measured: ColdStart) -> list[str]:
    note = "" if measured.dropped else " (not dropped)"
    return [f"{measured.warm_s * 1e3:.1f} ms", f"{measured.dropped_s * 1e3:.1f} ms{note}"]


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
