"""Measure what masks and loads cost the native engine, and vLLM as the engine of the same server.

First, over HTTP: 16 streams that are free or constrained to JSON, and 16 free ones beside 16 others of either kind, in
turns. Second, in the engine: the gaps between the tokens of 16 streams, in turns without loads and while a cold variant
loads each second.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.coldload import Setup, TrafficScope, streams
from bench.engine import FULL, MAX_POSITIONS, SMALL, publish_variants, write_base
from bench.harness import (
    BEST_DEVICE,
    Bench,
    Goal,
    Report,
    at_least,
    at_most,
    fixed,
    ms,
    option,
    rounded,
    table_of,
    text,
)
from bench.http import BESIDE, CONSTRAINED, FREE, PROMPT_TOKENS, measure_constrained
from bench.synthetic import LlamaShapes
from deltastore.registry import Registry

NATIVE, VLLM = "native", "vllm"

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class BackendScope:
    """Sizes of a run."""

    traffic: TrafficScope
    num_streams: int = 16
    num_new: int = 128
    repeats: int = 3
    positions: int = 4 * MAX_POSITIONS  # so many that no stream ends in the minutes of loads
    kv_cache_gb: float = 3.5

    @property
    def shapes(self) -> LlamaShapes:
        return self.traffic.shapes


TRAFFIC = TrafficScope(
    FULL,
    num_streams=16,
    stream_tokens=4 * MAX_POSITIONS - PROMPT_TOKENS,
    num_turns=6,
    quiet_s=10.0,
    num_cold=10,
    pause_s=1.0,
)
SMALL_TRAFFIC = replace(
    TRAFFIC, shapes=SMALL, num_streams=2, num_turns=1, quiet_s=0.5, num_cold=2, pause_s=0.05
)
SMALL_SCOPE = BackendScope(SMALL_TRAFFIC, num_streams=2, num_new=8, repeats=1, kv_cache_gb=0.5)
COLUMNS = {
    "tokens/s": text("backend"),
    "free": fixed("free_tokens_per_s", 0),
    "constrained": fixed("constrained_tokens_per_s", 0),
    "free beside free": fixed("beside_free_tokens_per_s", 0),
    "free beside constrained": fixed("beside_constrained_tokens_per_s", 0),
    "gaps, ms": ms("quiet_p50_s"),
    "p99": ms("quiet_p99_s"),
    "gaps with loads": ms("loading_p50_s"),
    "p99 with loads": ms("loading_p99_s"),
}


def masks(directory: Path, scope: BackendScope, settings: Mapping[str, Any]) -> Figures:
    """Measure tokens per second of `num_streams` streams, alone and beside as many others, over HTTP."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    rates = {}
    for count in (scope.num_streams, 2 * scope.num_streams):
        sizes = scope.shapes, count, scope.num_new, scope.repeats
        measured = measure_constrained(directory / f"json-{count}", *sizes, flags)
        rates[count] = {one.name: one.median("tokens_per_s") for one in measured}
    alone, beside = rates.values()
    return {
        "free_tokens_per_s": round(alone[FREE], 1),
        "constrained_tokens_per_s": round(alone[CONSTRAINED], 1),
        # Of twice as many free streams, half.
        "beside_free_tokens_per_s": round(beside[FREE] / 2, 1),
        "beside_constrained_tokens_per_s": round(beside[BESIDE], 1),
    }


def loads(directory: Path, scope: BackendScope, settings: Mapping[str, Any]) -> Figures:
    """Measure the gaps between tokens of streams without loads and with one each second, in seconds."""
    traffic = scope.traffic
    base = write_base(directory / "base", scope.shapes, scope.positions)
    registry = Registry(directory / "registry")
    records = publish_variants(registry, base, scope.shapes, traffic.num_variants)
    sizes = {"max_num_seqs": traffic.num_streams, "kv_cache_gb": scope.kv_cache_gb, **settings}
    found = streams(Setup(base, registry, records, traffic, sizes))
    return rounded(found)


def goals(figures: Mapping[str, Figures]) -> Iterator[Goal]:
    """Compare the figures of each backend with their limits."""
    for backend, one in figures.items():
        masked = one["constrained_tokens_per_s"] / one["free_tokens_per_s"]
        beside = one["beside_constrained_tokens_per_s"] / one["beside_free_tokens_per_s"]
        gaps = one["loading_p99_s"] / one["quiet_p99_s"]
        yield at_least("tokens/s, constrained / free", masked, 0.45, backend)
        yield at_least("tokens/s of free streams, beside constrained / beside free", beside, 0.9, backend)
        yield at_most("p99 between tokens, a load each second / none", gaps, 1.7, backend)


def report(args: Namespace) -> Report:
    scope = SMALL_SCOPE if args.small else BackendScope(TRAFFIC)
    engines: dict[str, dict[str, Any]] = {NATIVE: {"backend": NATIVE}}
    if args.vllm:
        engines[VLLM] = {"backend": VLLM, "engine_python": args.vllm}
    figures = {
        name: {**masks(args.directory / name, scope, own), **loads(args.directory / name, scope, own)}
        for name, own in engines.items()
    }
    rows = [{"backend": name, **one} for name, one in figures.items()]
    settings = {**asdict(scope), "prompt_tokens": PROMPT_TOKENS, "statistic": "median"}
    return Report(settings, figures, [table_of(COLUMNS, rows)], list(goals(figures)), device=BEST_DEVICE)


OPTIONS = [option("--vllm", None, "the Python of an environment that has vLLM and peraxis-vllm", type=Path)]
main = Bench(
    "backends", __doc__, report, OPTIONS, small="a tiny model", folder="for checkpoints and registries"
)

if __name__ == "__main__":
    sys.exit(main())
