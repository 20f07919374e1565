"""Time the sampling of a step's tokens beyond the model, beside a greedy step and beside transformers' warpers.

Every figure is of the engine's own call, with its check of the logits. Cases run in turns with the greedy step, and
transformers' warpers with torch's draw compute the same rows one by one, as `generate()` does for one sequence.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from bench.report import RESULTS, describe, write_result
from deltastore.console import table
from server import kernels
from server.engine.sampler import NO_TOKENS, PromptHistory, Sampler, sample
from server.protocol.request import SamplingParams
from server.protocol.rules import NEUTRAL, GenerationRules, ban_table, id_list

VOCABULARIES = (32_000, 128_256, 262_144)
# Peaked as a language model's, and so flat that no few tokens have most of the probability.
DISTRIBUTIONS = {"peaked": 1.0, "flat": 100.0}
CASES: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_p 0.9": {"top_p": 0.9},
    "top_p 0.99": {"top_p": 0.99},
    "top_k 50": {"top_k": 50},
    "top_k 20, top_p 0.95": {"top_k": 20, "top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
    "repetition_penalty 1.1": {"repetition_penalty": 1.1},
    "logprobs 5": {"logprobs": 5},
    # Rows with rules of a generation config are changed one by one before.
    "4,096 ids suppressed": {"rules": GenerationRules(suppress_tokens=id_list(range(4096)))},
    "2,048 bad words of two": {
        "rules": GenerationRules(bad_words_ids=ban_table([i, i] for i in range(2048)))
    },
    "typical_p 0.9": {"rules": GenerationRules(typical_p=0.9)},
    "typical_p 0.9, top_p 0.95": {"rules": GenerationRules(typical_p=0.9), "top_p": 0.95},
    "eta_cutoff 0.0003": {"rules": GenerationRules(eta_cutoff=0.0003)},
}
PROMPT_TOKENS = 1000
# Rows that transformers' warpers compute, of which the time is per row.
WARPED_ROWS = 2


@dataclass(frozen=True, slots=True)
class SamplingFigure:
    """Medians over turns, of all rows."""

    vocabulary: int
    distribution: str
    case: str
    greedy_s: float
    sampled_s: float
    warped_s: float

    def as_json(self) -> dict[str, Any]:
        return {
            "vocabulary": self.vocabulary,
            "distribution": self.distribution,
            "case": self.case,
            "greedy_s": round(self.greedy_s, 6),
            "sampled_s": round(self.sampled_s, 6),
            "beyond_greedy_s": round(self.sampled_s - self.greedy_s, 6),
            "row_by_row_s": round(self.warped_s, 6),
        }


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    device = torch.device("cpu")
    kernels.prepare(device)
    vocabularies = (1000,) if args.small else VOCABULARIES
    figures = [
        figure
        for vocabulary in vocabularies
        for name, temperature in DISTRIBUTIONS.items()
        for figure in measure(vocabulary, (name, temperature), args.rows, args.repeats)
    ]
    print(f"{describe(device)}; {args.rows} rows, medians of {args.repeats} turns\n")
    heads = (
        "vocabulary",
        "logits",
        "case",
        "greedy, ms",
        "sampled, ms",
        "beyond greedy, ms",
        "row by row, ms",
    )
    print(table(heads, [_row(figure) for figure in figures]))
    if out := args.out or (None if args.small else RESULTS / "sampling.json"):
        settings = {"rows": args.rows, "repeats": args.repeats, "num_threads": torch.get_num_threads()}
        write_result(
            out, "sampling", device, {"settings": settings, "results": [f.as_json() for f in figures]}
        )


@torch.inference_mode()
def measure(
    vocabulary: int, distribution: tuple[str, float], num_rows: int, repeats: int
) -> list[SamplingFigure]:
    """Measure every case at one size."""
    name, temperature = distribution
    logits = 3 * torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(0))
    greedy = _samplers(num_rows, vocabulary, {"temperature": 0.0})
    figures = []
    for case, params in CASES.items():
        samplers = _samplers(num_rows, vocabulary, {"temperature": temperature, **params})
        warpers = _warpers({"temperature": temperature, **params})
        sample(logits, samplers)
        turns = [
            (
                _seconds(lambda: sample(logits, greedy)),
                _seconds(lambda own=samplers: sample(logits, own)),  # type: ignore[misc]
                _seconds(lambda own=warpers: _row_by_row(logits[:WARPED_ROWS], own)),  # type: ignore[misc]
            )
            for _ in range(repeats)
        ]
        greedy_s, sampled_s, warped_s = (median(times) for times in zip(*turns, strict=True))
        warped_s *= num_rows / WARPED_ROWS
        figures.append(SamplingFigure(vocabulary, name, case, greedy_s, sampled_s, warped_s))
    return figures


def _samplers(num_rows: int, vocabulary: int, params: dict[str, Any]) -> list[tuple[Sampler, int]]:
    generator = torch.Generator().manual_seed(1)
    prompt = PromptHistory(tuple(torch.randint(vocabulary, (PROMPT_TOKENS,), generator=generator).tolist()))
    sampling = SamplingParams(seed=0, **params)
    return [(Sampler(sampling, index, prompt), vocabulary) for index in range(num_rows)]


def _warpers(params: dict[str, Any]) -> LogitsProcessorList:
    """Return transformers' warpers for sampling parameters, without the rules that are none."""
    rules, given = params.get("rules", NEUTRAL), {"temperature": 1.0, **params}
    kinds = {"temperature": TemperatureLogitsWarper, "top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper}
    chosen = LogitsProcessorList(kind(given[name]) for name, kind in kinds.items() if name in given)
    if "min_p" in given:
        chosen.append(MinPLogitsWarper(given["min_p"]))
    if rules.typical_p < 1:
        chosen.append(TypicalLogitsWarper(rules.typical_p))
    if rules.eta_cutoff:
        chosen.append(EtaLogitsWarper(rules.eta_cutoff))
    return chosen


def _row_by_row(logits: Tensor, warpers: LogitsProcessorList) -> None:
    for row in logits:
        scores: Tensor = warpers(NO_TOKENS, row[None])  # type: ignore[arg-type]
        torch.multinomial(scores.softmax(-1), 1)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _row(figure: SamplingFigure) -> tuple[str, ...]:
    return (
        f"{figure.vocabulary:,}",
        figure.distribution,
        figure.case,
        f"{1e3 * figure.greedy_s:.1f}",
        f"{1e3 * figure.sampled_s:.1f}",
        f"{1e3 * (figure.sampled_s - figure.greedy_s):.1f}",
        f"{1e3 * figure.warped_s:.0f}",
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.sampling", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny vocabulary; writes JSON only with --out")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--out", type=Path, help="the JSON file; under bench/results/ by default")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
