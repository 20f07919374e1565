"""How many tokens per second does one server give, when its requests are for one variant, or for many?

Sixteen requests at a time, 64 tokens in and 64 out, over the base alone and over 1 to 16 variants. Beside it, in the
same run, on the same weights and prompts: merged weights swapped in, one variant after another; and the model library's
own batching of the base, static and continuous. Everyone takes turns, and medians are reported.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from bench.report import RESULTS, describe, write_result
from bench.serving import FULL, SMALL, Service, prompts, publish_variants, serving, write_base
from bench.synthetic import LlamaShapes
from deltastore.registry import Registry
from demo.table import table

NUM_REQUESTS = 16
VARIANTS = (1, 2, 4, 8, 16)
OURS, SWAPPED = "Peraxis", "merged weights swapped in"
STATIC, CONTINUOUS = "transformers, static", "transformers, continuous"


@dataclass(frozen=True, slots=True)
class Load:
    """What every subject is asked for."""

    prompts: Sequence[Sequence[int]]
    num_new: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompts) * self.num_new


@dataclass(slots=True)
class Subject:
    """One way to answer the load."""

    name: str
    num_variants: int  # 0 is the base alone
    answer: Callable[[], object]
    seconds: list[float] = field(default_factory=list)

    def tokens_per_s(self, load: Load) -> float:
        return load.num_tokens / median(self.seconds)


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # the model library's
    shapes = SMALL if args.small else FULL
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        directory = Path(name)
        base, registry = write_base(directory / "base", shapes), Registry(directory / "registry")
        records = publish_variants(registry, directory, shapes, max(VARIANTS))
        load = Load(prompts(NUM_REQUESTS, args.prompt, shapes.vocabulary), args.new)
        with serving(base, registry, records, max_num_seqs=NUM_REQUESTS) as service:
            subjects = [*ours(service, load), *swapped(base, load), *libraries(base, load)]
            measure(subjects, args.repeats)
    rates = {(s.name, s.num_variants): s.tokens_per_s(load) for s in subjects}
    print(
        f"{describe(device)}; median of {args.repeats}\n\n{rate_table(subjects, load)}\n\n{goal_table(rates)}"
    )
    if out := args.out or (None if args.small else RESULTS / "throughput.json"):
        write_result(out, "throughput", device, _document(args, shapes, subjects, load, rates))


def ours(service: Service, load: Load) -> list[Subject]:
    """The engine, with requests spread evenly over so many variants."""

    def answer(num_variants: int) -> None:
        asked = [
            service.ask(
                service.records[i % num_variants] if num_variants else None, list(prompt), load.num_new
            )
            for i, prompt in enumerate(load.prompts)
        ]
        for one in asked:
            assert len(one.token_times()) == load.num_new

    return [Subject(OURS, k, partial(answer, k)) for k in (0, *VARIANTS)]


def swapped(base: Path, load: Load) -> list[Subject]:
    """One variant after another: its merged weights, in memory already, are copied over the model's."""
    model = _model(base)
    merged = [
        {name: value.clone() for name, value in model.state_dict().items()} for _ in range(max(VARIANTS))
    ]

    def answer(num_variants: int) -> None:
        for index in range(num_variants):
            model.load_state_dict(merged[index])
            _generate(model, load.prompts[index::num_variants], load.num_new)

    return [Subject(SWAPPED, k, partial(answer, k)) for k in VARIANTS]


def libraries(base: Path, load: Load) -> list[Subject]:
    """The model library's own batching, of the base alone."""
    static, continuous = _model(base), _model(base)
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=load.num_new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )

    def batch() -> None:
        outputs = continuous.generate_batch(  # type: ignore[operator]
            [list(prompt) for prompt in load.prompts], generation_config=config, progress_bar=False
        )
        assert sum(len(output.generated_tokens) for output in outputs.values()) == load.num_tokens

    return [
        Subject(STATIC, 0, lambda: _generate(static, load.prompts, load.num_new)),
        Subject(CONTINUOUS, 0, batch),
    ]


def measure(subjects: Sequence[Subject], repeats: int) -> None:
    """Time every subject `repeats` times, in turns; the first turn warms up and is not counted."""
    for turn in range(repeats + 1):
        for subject in subjects:
            begun = time.perf_counter()
            subject.answer()
            if turn:
                subject.seconds.append(time.perf_counter() - begun)
        print(f"turn {turn} of {repeats} is done", file=sys.stderr, flush=True)


def rate_table(subjects: Sequence[Subject], load: Load) -> str:
    """Tokens per second by who answers, and over how many variants."""
    counts = (0, *VARIANTS)
    names = list(dict.fromkeys(subject.name for subject in subjects))
    rates = {(s.name, s.num_variants): f"{s.tokens_per_s(load):.0f}" for s in subjects}
    rows = [(name, *(rates.get((name, count), "") for count in counts)) for name in names]
    heads = ("tokens/s", "base", *(f"{count} variant{'s' * (count > 1)}" for count in VARIANTS))
    return table(heads, rows)


def goals(rates: dict[tuple[str, int], float]) -> list[dict[str, Any]]:
    """What the figures are held against."""
    ours, best_peer = rates[OURS, 0], max(rates[STATIC, 0], rates[CONTINUOUS, 0])
    many = rates[OURS, 8]
    asked = [
        ("base alone / the best peer's base", ours / best_peer, 0.8),
        ("8 variants / the smaller of both bases", many / min(ours, best_peer), 0.5),
        ("8 variants / merged weights swapped in", many / rates[SWAPPED, 8], 3.0),
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
    nn.Module.to(model, device)  # the library's own wrapper has lost its signature
    return model


@torch.inference_mode()
def _generate(model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_new: int) -> None:
    ids = torch.tensor([list(prompt) for prompt in prompts], device=model.device)
    output: Tensor = model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False, pad_token_id=0
    )
    assert output.shape[1] == ids.shape[1] + num_new


def _document(
    args: argparse.Namespace,
    shapes: LlamaShapes,
    subjects: Sequence[Subject],
    load: Load,
    rates: dict[tuple[str, int], float],
) -> dict[str, Any]:
    return {
        "settings": {
            "shapes": asdict(shapes),
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
                "tokens_per_s": round(subject.tokens_per_s(load), 1),
                "seconds": [round(value, 4) for value in subject.seconds],
            }
            for subject in subjects
        ],
        "goals": goals(rates),
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.throughput", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny model; writes JSON only with --out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--dir", type=Path, help="where the checkpoint and the registry are made")
    parser.add_argument("--out", type=Path, help="the JSON file; bench/results/throughput.json by default")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
