"""Measure the tokens per second of one server whose requests are for one variant or for many.

Sixteen requests at a time, 64 tokens in and 64 out, over the base alone and over 1 to 16 variants; and four at a time,
over the base and four variants. The same run measures, on the same weights and prompts, merged weights swapped in, one
variant after another, and transformers' own batching of the base, static and continuous. All take turns; medians are
reported.

At the shapes of larger models, so that the process stays below 14 GB: there are 8 variants at most, an 8B model has 3
of its 32 layers, and one merged copy in memory stands for every variant's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from bench.report import RESULTS, describe, write_result
from bench.serving import SHAPES, SMALL, BenchEngine, prompts, publish_variants, serving, write_base
from bench.synthetic import LlamaShapes
from deltastore.registry import Registry
from demo.table import table

NUM_REQUESTS, NUM_FEW = 16, 4
VARIANTS = (1, 2, 4, 8, 16)
CONTINUOUS_BATCH_TOKENS = 2048
KV_CACHE_GB = (512 << 20) / 1e9  # at the shapes of larger models; else what the server takes
OURS, FEW, SWAPPED = "Peraxis", "Peraxis, 4 requests at a time", "merged weights swapped in"
STATIC, CONTINUOUS = "transformers, static", "transformers, continuous"


@dataclass(frozen=True, slots=True)
class Load:
    """The prompts, and the number of new tokens for each."""

    prompts: Sequence[Sequence[int]]
    num_new: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompts) * self.num_new


@dataclass(slots=True)
class Contender:
    """One way to answer a load, and its times."""

    name: str
    num_variants: int  # 0 is the base alone
    num_tokens: int  # of all answers
    answer: Callable[[], object]
    seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / median(self.seconds)


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of a run."""

    shapes: LlamaShapes
    name: str  # of the shapes
    counts: tuple[int, ...]  # of variants
    num_merged: int  # copies of merged weights in memory; they stand for all variants' in turn
    kv_cache_gb: float | None

    @classmethod
    def of(cls, name: str, num_layers: int | None) -> Scale:
        shapes = SHAPES[name]
        if num_layers:
            shapes = replace(shapes, num_layers=num_layers)
        if name == "158m":
            return cls(shapes, name, VARIANTS, max(VARIANTS), None)
        return cls(shapes, name, VARIANTS[:-1], 1, KV_CACHE_GB)

    @property
    def description(self) -> str:
        """Shapes and conditions, for the head of the table."""
        layers = f"{self.name} shapes, {self.shapes.num_layers} layers"
        return f"{layers}; merged copies in memory, used in turn: {self.num_merged}"


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    disable_progress_bar()
    scale = Scale.of(args.shapes, args.layers)
    if args.small:
        scale = replace(scale, shapes=SMALL, name="tiny")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        directory, shapes = Path(name), scale.shapes
        base, registry = write_base(directory / "base", shapes), Registry(directory / "registry")
        records = publish_variants(registry, directory, shapes, max(scale.counts))
        load = Load(prompts(NUM_REQUESTS, args.prompt, shapes.vocabulary), args.new)
        settings = {"max_num_seqs": NUM_REQUESTS, "kv_cache_gb": scale.kv_cache_gb}
        with serving(base, registry, records, **settings) as service:
            subjects = [*ours(service, load, scale), *peers(base, load, scale)]
            measure(subjects, args.repeats)
    rates = {(subject.name, subject.num_variants): subject.tokens_per_s for subject in subjects}
    print(f"{describe(device)}; {scale.description}; median of {args.repeats}\n")
    print(f"{rate_table(subjects, scale.counts)}\n\n{goal_table(rates)}")
    result = "throughput.json" if args.shapes == "158m" else f"throughput-{args.shapes}.json"
    if out := args.out or (None if args.small else RESULTS / result):
        write_result(out, "throughput", device, _document(args, scale, subjects, rates))


def ours(service: BenchEngine, load: Load, scale: Scale) -> list[Contender]:
    """Return the engine as a contender, with requests spread evenly over each number of variants."""

    def answer(num_variants: int, asked_for: Load) -> None:
        asked = [
            service.ask(
                service.records[i % num_variants] if num_variants else None, list(prompt), load.num_new
            )
            for i, prompt in enumerate(asked_for.prompts)
        ]
        for one in asked:
            check_length(len(one.times().tokens), load.num_new)

    few = Load(load.prompts[:NUM_FEW], load.num_new)
    return [Contender(OURS, k, load.num_tokens, partial(answer, k, load)) for k in (0, *scale.counts)] + [
        Contender(FEW, k, few.num_tokens, partial(answer, k, few)) for k in (0, NUM_FEW)
    ]


def peers(base: Path, load: Load, scale: Scale) -> list[Contender]:
    """Return the alternatives, on two models that share their weights."""
    static, continuous = _model(base), _model(base)
    continuous.load_state_dict(static.state_dict(), assign=True)
    return [*swapped(static, load, scale), *libraries(static, continuous, load)]


def swapped(model: PreTrainedModel, load: Load, scale: Scale) -> list[Contender]:
    """Answer one variant after another, with its merged weights copied from memory over the model's.

    The merged weights are the base's own, so the model stays the base.
    """
    merged = [
        {name: value.detach().clone() for name, value in model.named_parameters()}  # tied ones once
        for _ in range(scale.num_merged)
    ]

    def answer(num_variants: int) -> None:
        for index in range(num_variants):
            model.load_state_dict(merged[index % scale.num_merged], strict=False)
            _generate(model, load.prompts[index::num_variants], load.num_new)

    return [Contender(SWAPPED, k, load.num_tokens, partial(answer, k)) for k in scale.counts]


def libraries(static: PreTrainedModel, continuous: PreTrainedModel, load: Load) -> list[Contender]:
    """Return transformers' own static and continuous batching, of the base alone."""
    config = GenerationConfig(max_new_tokens=load.num_new, do_sample=False, eos_token_id=-1, pad_token_id=0)

    # It would take 0.9 of free memory for its cache at every call.
    room = ContinuousBatchingConfig(num_blocks=2 * NUM_REQUESTS, max_batch_tokens=CONTINUOUS_BATCH_TOKENS)

    def batch() -> None:
        outputs = continuous.generate_batch(  # type: ignore[operator]
            [list(prompt) for prompt in load.prompts],
            generation_config=config,
            continuous_batching_config=room,
            progress_bar=False,
        )
        check_length(sum(len(output.generated_tokens) for output in outputs.values()), load.num_tokens)

    return [
        Contender(STATIC, 0, load.num_tokens, lambda: _generate(static, load.prompts, load.num_new)),
        Contender(CONTINUOUS, 0, load.num_tokens, batch),
    ]


def check_length(found: int, expected: int) -> None:
    """Raise RuntimeError for an answer with another number of tokens, whose time would not be comparable."""
    if found != expected:
        raise RuntimeError(f"{expected} tokens were asked for, {found} were generated")


def measure(subjects: Sequence[Contender], repeats: int) -> None:
    """Time every subject `repeats` times, in turns; the first turn warms up and is not counted."""
    for turn in range(repeats + 1):
        for subject in subjects:
            begun = time.perf_counter()
            subject.answer()
            if turn:
                subject.seconds.append(time.perf_counter() - begun)
        print(f"turn {turn} of {repeats} is done", file=sys.stderr, flush=True)


def rate_table(subjects: Sequence[Contender], variants: Sequence[int]) -> str:
    """Return tokens per second by contender and number of variants."""
    counts = (0, *variants)
    names = list(dict.fromkeys(subject.name for subject in subjects))
    rates = {
        (s.name, s.num_variants): f"{s.tokens_per_s:.{0 if s.tokens_per_s >= 100 else 1}f}" for s in subjects
    }
    rows = [(name, *(rates.get((name, count), "") for count in counts)) for name in names]
    heads = ("tokens/s", "base", *(f"{count} variant{'s' * (count > 1)}" for count in variants))
    return table(heads, rows)


def goals(rates: dict[tuple[str, int], float]) -> list[dict[str, Any]]:
    """Compare the figures with their limits."""
    ours, best_peer = rates[OURS, 0], max(rates[STATIC, 0], rates[CONTINUOUS, 0])
    many = rates[OURS, 8]
    asked = [
        ("base alone / the best peer's base", ours / best_peer, 0.8),
        ("8 variants / the smaller of both bases", many / min(ours, best_peer), 0.5),
        ("8 variants / merged weights swapped in", many / rates[SWAPPED, 8], 3.0),
        ("4 requests at a time: 4 variants / base", rates[FEW, NUM_FEW] / rates[FEW, 0], 0.8),
    ]
    return [
        {"goal": goal, "at_least": least, "reached": round(value, 3), "met": value >= least}
        for goal, value, least in asked
    ]


def goal_table(rates: dict[tuple[str, int], float]) -> str:
    rows = [
        (g["goal"], f"at least {g['at_least']:g}", f"{g['reached']:.2f}", "met" if g["met"] else "not met")
        for g in goals(rates)
    ]
    return table(("goal", "limit", "reached", ""), rows)


def _model(base: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # The wrapper of transformers has lost its signature.
    nn.Module.to(model, device)
    return model


@torch.inference_mode()
def _generate(model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_new: int) -> None:
    ids = torch.tensor([list(prompt) for prompt in prompts], device=model.device)
    output: Tensor = model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False, pad_token_id=0
    )
    check_length(output.shape[1] - ids.shape[1], num_new)


def _document(
    args: argparse.Namespace,
    scale: Scale,
    subjects: Sequence[Contender],
    rates: dict[tuple[str, int], float],
) -> dict[str, Any]:
    return {
        "settings": {
            "shapes": asdict(scale.shapes),
            "merged_copies": scale.num_merged,
            "requests": NUM_REQUESTS,
            "prompt_tokens": args.prompt,
            "new_tokens": args.new,
            "repeats": args.repeats,
            "statistic": "median",
        },
        "results": [
            {
                "who": subject.name,
                "variants": subject.num_variants,
                "tokens_per_s": round(subject.tokens_per_s, 1),
                "seconds": [round(value, 4) for value in subject.seconds],
            }
            for subject in subjects
        ],
        "goals": goals(rates),
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.throughput", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny model; writes JSON only with --out")
    parser.add_argument("--shapes", choices=SHAPES, default="158m", help="whose sizes")
    parser.add_argument("--layers", type=int, help="so many of them rather than the default of the shapes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--dir", type=Path, help="where the checkpoint and the registry are made")
    parser.add_argument("--out", type=Path, help="the JSON file; under bench/results/ by default")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
