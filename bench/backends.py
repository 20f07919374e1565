"""Measure what masks and loads cost the native engine, and vLLM as the engine of the same server.

First, over HTTP: 16 streams that are free or constrained to JSON, and 16 free ones beside 16 others of either kind, in
turns. Second, in the engine: the gaps between the tokens of 16 streams, in turns without loads and while a cold variant
loads each second.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.coldload import Setup, TrafficScope, streams
from bench.engine import FULL, MAX_POSITIONS, SMALL, publish_variants, write_base
from bench.http.subjects import BESIDE, CONSTRAINED, FREE, PROMPT_TOKENS, measure_constrained
from bench.report import RESULTS, describe, write_result
from bench.synthetic import LlamaShapes
from deltastore.console import table
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


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    scope = SMALL_SCOPE if args.small else BackendScope(TRAFFIC)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    engines: dict[str, dict[str, Any]] = {NATIVE: {"backend": NATIVE}}
    if args.vllm:
        engines[VLLM] = {"backend": VLLM, "engine_python": args.vllm}
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        figures = {
            backend: {
                **masks(Path(name) / backend, scope, settings),
                **loads(Path(name) / backend, scope, settings),
            }
            for backend, settings in engines.items()
        }
    print(f"{describe(device)}\n\n{figure_table(figures)}\n\n{goal_table(figures)}")
    if out := args.out or (None if args.small else RESULTS / "backends.json"):
        settings = {**asdict(scope), "prompt_tokens": PROMPT_TOKENS, "statistic": "median"}
        write_result(
            out, "backends", device, {"settings": settings, "results": figures, "goals": goals(figures)}
        )


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
    return {name: round(value, 6) for name, value in found.items()}


def goals(figures: Mapping[str, Figures]) -> list[dict[str, Any]]:
    """Compare the figures with their limits."""
    rows = []
    for backend, one in figures.items():
        rows += [
            (
                f"{backend}: tokens/s, constrained / free",
                one["constrained_tokens_per_s"] / one["free_tokens_per_s"],
                "at least",
                0.45,
            ),
            (
                f"{backend}: tokens/s of free streams, beside constrained / beside free",
                one["beside_constrained_tokens_per_s"] / one["beside_free_tokens_per_s"],
                "at least",
                0.9,
            ),
            (
                f"{backend}: p99 between tokens, a load each second / none",
                one["loading_p99_s"] / one["quiet_p99_s"],
                "at most",
                1.7,
            ),
        ]
    return [
        {
            "goal": goal,
            "limit": f"{side} {limit:g}",
            "reached": round(value, 3),
            "met": value >= limit if side == "at least" else value <= limit,
        }
        for goal, value, side, limit in rows
    ]


def figure_table(figures: Mapping[str, Figures]) -> str:
    rows = []
    for backend, one in figures.items():
        rates = (
            one[f"{name}_tokens_per_s"]
            for name in ("free", "constrained", "beside_free", "beside_constrained")
        )
        gaps = (1e3 * one[f"{name}_s"] for name in ("quiet_p50", "quiet_p99", "loading_p50", "loading_p99"))
        rows.append((backend, *(f"{rate:.0f}" for rate in rates), *(f"{gap:.1f}" for gap in gaps)))
    heads = ("tokens/s", "free", "constrained", "free beside free", "free beside constrained")
    return table((*heads, "gaps, ms", "p99", "gaps with loads", "p99 with loads"), rows)


def goal_table(figures: Mapping[str, Figures]) -> str:
    rows = [
        (g["goal"], g["limit"], f"{g['reached']:.2f}", "met" if g["met"] else "not met")
        for g in goals(figures)
    ]
    return table(("goal", "limit", "reached", ""), rows)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.backends", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny model; writes JSON only with --out")
    parser.add_argument(
        "--vllm", type=Path, help="the Python of an environment that has vLLM and peraxis-vllm"
    )
    parser.add_argument("--dir", type=Path, help="where the checkpoints and the registries are made")
    parser.add_argument("--out", type=Path, help="the JSON file; bench/results/backends.json by default")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
