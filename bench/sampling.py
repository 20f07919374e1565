"""Time the sampling of a step's tokens beyond the model, beside a greedy step and beside transformers' warpers.

Every figure is of the engine's own call, with its check of the logits. Cases run in turns with the greedy step, and
transformers' warpers with torch's draw compute the same rows one by one, as `generate()` does for one sequence.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
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

from bench.harness import CPU, Bench, Report, in_turns, ms, option, table_of, text
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
    "frequency and presence 0.5": {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    "logit_bias of 1,000 ids": {"logit_bias": tuple((token, 1.0) for token in range(1000))},
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
GENERATED_TOKENS = 500
# Rows that transformers' warpers compute, of which the time is per row.
WARPED_ROWS = 2


COLUMNS = {
    "vocabulary": lambda row: f"{row['vocabulary']:,}",
    "logits": text("distribution"),
    "case": text("case"),
    "greedy, ms": ms("greedy_s"),
    "sampled, ms": ms("sampled_s"),
    "beyond greedy, ms": ms("beyond_greedy_s"),
    "row by row, ms": ms("row_by_row_s", 0),
}


@torch.inference_mode()
def measure(
    vocabulary: int, distribution: tuple[str, float], num_rows: int, repeats: int
) -> list[dict[str, Any]]:
    """Measure every case at one size; medians over turns, of all rows."""
    name, temperature = distribution
    logits = 3 * torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(0))
    greedy = _samplers(num_rows, vocabulary, {"temperature": 0.0})
    results = []
    for case, params in CASES.items():
        samplers = _samplers(num_rows, vocabulary, {"temperature": temperature, **params})
        warpers = _warpers({"temperature": temperature, **params})
        sample(logits, samplers)
        works: dict[str, Callable[[], object]] = {
            "greedy": partial(sample, logits, greedy),
            "sampled": partial(sample, logits, samplers),
            "warped": partial(_row_by_row, logits[:WARPED_ROWS], warpers),
        }
        greedy_s, sampled_s, warped_s = map(median, in_turns(works, repeats).values())
        results.append(
            {
                "vocabulary": vocabulary,
                "distribution": name,
                "case": case,
                "greedy_s": round(greedy_s, 6),
                "sampled_s": round(sampled_s, 6),
                "beyond_greedy_s": round(sampled_s - greedy_s, 6),
                "row_by_row_s": round(warped_s * num_rows / WARPED_ROWS, 6),
            }
        )
    return results


def _samplers(num_rows: int, vocabulary: int, params: dict[str, Any]) -> list[tuple[Sampler, int]]:
    generator = torch.Generator().manual_seed(1)
    prompt = PromptHistory(tuple(torch.randint(vocabulary, (PROMPT_TOKENS,), generator=generator).tolist()))
    generated = torch.randint(vocabulary, (GENERATED_TOKENS,), generator=generator).tolist()
    samplers = [Sampler(SamplingParams(seed=0, **params), index, prompt) for index in range(num_rows)]
    for sampler in samplers:
        for token in generated:
            sampler.add(token)
    return [(sampler, vocabulary) for sampler in samplers]


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


def report(args: Namespace) -> Report:
    kernels.prepare(CPU)
    results = [
        row
        for vocabulary in ((1000,) if args.small else VOCABULARIES)
        for distribution in DISTRIBUTIONS.items()
        for row in measure(vocabulary, distribution, args.rows, args.repeats)
    ]
    settings = {"rows": args.rows, "repeats": args.repeats, "num_threads": torch.get_num_threads()}
    conditions = f"{args.rows} rows, medians of {args.repeats} turns"
    return Report(settings, results, [table_of(COLUMNS, results)], conditions=conditions)


main = Bench(
    "sampling", __doc__, report, [option("--rows", 64), option("--repeats", 11)], small="a tiny vocabulary"
)

if __name__ == "__main__":
    sys.exit(main())
