"""Measure the tokens per second of one server whose requests are for one variant or for many.

16, 32 and 64 requests at a time, 64 tokens in and 64 out, over the base alone and over 1 to 16 variants; and four at a
time, over the base and four variants. The same run measures the alternatives on the same weights and prompts: merged
weights swapped in, one variant after another; transformers' own batching of the base, static and continuous; and with
`--vllm`, vLLM compiled without LoRA, vLLM with the base alone and with eight LoRA adapters, and this server with vLLM
as its engine. All take turns, and each turn has prompts of its own, so that no prefix cache helps. Medians are
reported.

At the shapes of larger models, so that the process stays below 14 GB: there are 8 variants, an 8B model has 3 of its 32
layers, and one merged copy in memory stands for every variant's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.engine import SHAPES, SMALL, BenchEngine, prompts, publish_variants, serving, write_base
from bench.peers.contender import (
    COMPILED,
    CONTINUOUS,
    NUM_ADAPTERS,
    STATIC,
    SWAPPED,
    VLLM,
    Contender,
    Key,
    Prompts,
    check_length,
    compiled_contenders,
    fastest_vllm,
    library_contenders,
    running_library,
    running_vllm,
    vllm_contenders,
    write_adapters,
)
from bench.report import RESULTS, describe, write_result
from bench.synthetic import LlamaShapes
from deltastore.console import table
from deltastore.registry import Registry

NUM_REQUESTS, NUM_FEW = (16, 32, 64), 4
VARIANTS = (1, 2, 4, 8, 16)
MANY = 8  # variants of the goals
KV_CACHE_GB = 0.6  # at the shapes of larger models; else what the server takes
OURS, OURS_ON_VLLM = "Peraxis", "Peraxis with vLLM"
# Tokens of a step of vLLM on the CPU, unless it is told another number: peers have it.
VLLM_STEP = 4096
# Tokens of each answer while all warm up: deltas are loaded, and kernels compiled.
WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of a run."""

    shapes: LlamaShapes
    name: str  # of the shapes
    num_requests: tuple[int, ...]  # at a time
    counts: tuple[int, ...]  # of variants
    num_merged: int  # copies of merged weights in memory; they stand for all variants' in turn
    kv_cache_gb: float | None

    @classmethod
    def of(cls, name: str, num_layers: int | None, num_requests: Sequence[int]) -> Scale:
        shapes = SHAPES[name]
        if num_layers:
            shapes = replace(shapes, num_layers=num_layers)
        requests = tuple(num_requests)
        if name == "158m":
            return cls(shapes, name, requests, VARIANTS, max(VARIANTS), None)
        return cls(shapes, name, requests, (MANY,), 1, KV_CACHE_GB)

    @property
    def description(self) -> str:
        """Shapes and conditions, for the head of the table."""
        layers = f"{self.name} shapes, {self.shapes.num_layers} layers"
        return f"{layers}; merged copies in memory, used in turn: {self.num_merged}"


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    scale = Scale.of(args.shapes, args.layers, args.streams)
    if args.variants:
        scale = replace(scale, counts=tuple(args.variants), num_merged=max(args.variants))
    if args.small:
        scale = replace(scale, shapes=SMALL, name="tiny")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory(dir=args.dir) as name, ExitStack() as stack:
        directory, shapes = Path(name), scale.shapes
        base = write_base(directory / "base", shapes, dtype=getattr(torch, args.dtype))
        registry = Registry(directory / "registry")
        records = publish_variants(registry, base, shapes, max(scale.counts))
        settings: dict[str, Any] = {"max_num_seqs": max(scale.num_requests), "kv_cache_gb": scale.kv_cache_gb}
        subjects, vllm = [], None
        if args.vllm:
            trial = prompts(max(scale.num_requests), args.prompt, shapes.vocabulary)
            running = fastest_vllm(args.vllm, base, write_adapters(directory, base), trial)
            peer, binding = stack.enter_context(running)
            subjects += vllm_contenders(peer, scale.num_requests)
            vllm = {**peer.loaded, "thread_binding": binding}
            compiled = running_vllm(args.vllm, base, (), binding, max(scale.num_requests))
            subjects += compiled_contenders(stack.enter_context(compiled), scale.num_requests)
            sizes = {
                **settings,
                "kv_cache_gb": scale.kv_cache_gb or KV_CACHE_GB,
                "max_batch_tokens": VLLM_STEP,
            }
            engine = serving(base, registry, records, backend="vllm", engine_python=args.vllm, **sizes)
            subjects += ours(stack.enter_context(engine), scale, OURS_ON_VLLM)
        library = stack.enter_context(running_library(base, scale.num_merged))
        subjects += library_contenders(library, scale.num_requests, scale.counts)
        service = stack.enter_context(serving(base, registry, records, **settings))
        subjects = [*ours(service, scale), *subjects]
        measure(subjects, args, shapes.vocabulary)
    rates = {subject.key: subject.rate for subject in subjects}
    print(f"{describe(device)}; {scale.description}; median of {args.repeats}\n")
    print(f"{rate_table(subjects, scale)}\n\n{goal_table(rates)}")
    result = "throughput.json" if args.shapes == "158m" else f"throughput-{args.shapes}.json"
    if out := args.out or (None if args.small else RESULTS / result):
        write_result(out, "throughput", device, _document(args, scale, subjects, vllm))


def ours(service: BenchEngine, scale: Scale, name: str = OURS) -> list[Contender]:
    """Return the engine as a contender, with requests spread evenly over each number of variants."""

    def answer(num_variants: int, asked_for: Prompts, num_new: int) -> None:
        asked = [
            service.ask(service.records[i % num_variants] if num_variants else None, list(prompt), num_new)
            for i, prompt in enumerate(asked_for)
        ]
        for one in asked:
            check_length(len(one.times().tokens), num_new)

    cases = [(count, k) for count in scale.num_requests for k in (0, *scale.counts)]
    few = [(NUM_FEW, k) for k in (0, NUM_FEW)]
    return [Contender(name, count, k, partial(answer, k)) for count, k in (*cases, *few)]


def measure(subjects: Sequence[Contender], args: argparse.Namespace, vocabulary: int) -> None:
    """Time every subject `args.repeats` times, in turns; short answers before them warm up and are not counted.

    In one turn, all contenders with as many requests and variants have the same prompts, and no others have them.
    """
    for turn in range(args.repeats + 1):
        num_new = args.new if turn else WARM_UP_TOKENS
        for subject in subjects:
            seed = hash((turn, subject.num_requests, subject.num_variants))
            asked = prompts(subject.num_requests, args.prompt, vocabulary, seed)
            begun = time.perf_counter()
            subject.answer(asked, num_new)
            if turn:
                seconds = time.perf_counter() - begun
                subject.tokens_per_s.append(subject.num_requests * num_new / seconds)
        print(f"turn {turn} of {args.repeats} is done", file=sys.stderr, flush=True)


def rate_table(subjects: Sequence[Contender], scale: Scale) -> str:
    """Return tokens per second by number of requests, contender and number of variants."""
    counts = sorted({subject.num_variants for subject in subjects} - {0})
    names = dict.fromkeys((subject.num_requests, subject.name) for subject in subjects)
    rates = {subject.key: f"{subject.rate:.{0 if subject.rate >= 100 else 1}f}" for subject in subjects}
    rows = [
        (str(requests), name, *(rates.get((name, requests, count), "") for count in (0, *counts)))
        for requests, name in sorted(names, key=lambda one: one[0])
    ]
    heads = ("requests", "tokens/s", "base", *(f"{count} variant{'s' * (count > 1)}" for count in counts))
    return table(heads, rows)


def goals(rates: dict[Key, float]) -> list[dict[str, Any]]:
    """Compare the figures with their limits; without vLLM, its goal is left out."""
    num_requests = sorted({count for name, count, _ in rates if name == STATIC})
    asked = []
    for count in num_requests:
        base, many = rates[OURS, count, 0], rates[OURS, count, MANY]
        best = max(rates.get((name, count, 0), 0.0) for name in (STATIC, CONTINUOUS, VLLM, COMPILED))
        asked.append((f"{count} requests: base / the best peer's base", base / best, 1.3))
        asked.append((f"{count} requests: {MANY} variants / base", many / base, 0.85))
        if adapters := rates.get((VLLM, count, NUM_ADAPTERS)):
            asked.append(
                (f"{count} requests: {MANY} variants / vLLM's {NUM_ADAPTERS} adapters", many / adapters, 4.0)
            )
        if on_vllm := rates.get((OURS_ON_VLLM, count, 0)):
            asked += _goals_on_vllm(rates, count, on_vllm)
    first = num_requests[0]
    swapping = rates[OURS, first, MANY] / rates[SWAPPED, first, MANY]
    asked.append((f"{first} requests: {MANY} variants / merged weights swapped in", swapping, 3.0))
    few = rates[OURS, NUM_FEW, NUM_FEW] / rates[OURS, NUM_FEW, 0]
    asked.append((f"{NUM_FEW} requests: {NUM_FEW} variants / base", few, 0.8))
    return [
        {"goal": goal, "at_least": least, "reached": round(value, 3), "met": value >= least}
        for goal, value, least in asked
    ]


def _goals_on_vllm(rates: dict[Key, float], count: int, base: float) -> list[tuple[str, float, float]]:
    many = rates[OURS_ON_VLLM, count, MANY]
    best = max(rates[name, count, 0] for name in (VLLM, COMPILED))
    return [
        (f"{count} requests, with vLLM: base / vLLM's best base", base / best, 0.97),
        (f"{count} requests, with vLLM: {MANY} variants / base", many / base, 0.5),
        (
            f"{count} requests, with vLLM: {MANY} variants / vLLM's {NUM_ADAPTERS} adapters",
            many / rates[VLLM, count, NUM_ADAPTERS],
            3.0,
        ),
    ]


def goal_table(rates: dict[Key, float]) -> str:
    rows = [
        (g["goal"], f"at least {g['at_least']:g}", f"{g['reached']:.2f}", "met" if g["met"] else "not met")
        for g in goals(rates)
    ]
    return table(("goal", "limit", "reached", ""), rows)


def _document(
    args: argparse.Namespace, scale: Scale, subjects: Sequence[Contender], vllm: Mapping[str, Any] | None
) -> dict[str, Any]:
    return {
        "settings": {
            "shapes": asdict(scale.shapes),
            "dtype": args.dtype,
            "merged_copies": scale.num_merged,
            "prompt_tokens": args.prompt,
            "new_tokens": args.new,
            "repeats": args.repeats,
            "statistic": "median",
            "vllm": vllm,
        },
        "results": [
            {
                "who": subject.name,
                "requests": subject.num_requests,
                "variants": subject.num_variants,
                "tokens_per_s": round(subject.rate, 1),
                "samples": [round(value, 1) for value in subject.tokens_per_s],
            }
            for subject in subjects
        ],
        "goals": goals({subject.key: subject.rate for subject in subjects}),
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.throughput", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny model; writes JSON only with --out")
    parser.add_argument("--shapes", choices=SHAPES, default="158m", help="whose sizes")
    parser.add_argument("--layers", type=int, help="so many of them rather than the default of the shapes")
    parser.add_argument("--variants", type=int, nargs="+", help=f"so many variants, {MANY} among them")
    parser.add_argument("--streams", type=int, nargs="+", default=NUM_REQUESTS, help="requests at a time")
    parser.add_argument(
        "--vllm", type=Path, help="the Python of an environment that has vLLM and peraxis-vllm"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--dir", type=Path, help="where the checkpoint and the registry are made")
    parser.add_argument("--out", type=Path, help="the JSON file; under bench/results/ by default")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
