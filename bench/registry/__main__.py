"""Measure the cost of a thousand registered variants.

The same traffic goes to the same ten variants, with ten registered and with a thousand, in turns. Then the start of a
whole server on both registries; then traffic to all thousand by Zipf's law: where requests find their delta, and the
time to their first token.
"""

from __future__ import annotations

import random
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from bench.engine import SMALL, BenchEngine, prompts, publish_variants, serving, write_base
from bench.harness import BEST_DEVICE, Bench, Report, at_least, say
from deltastore.console import table
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from peraxis.demo.service import running

PROMPT_TOKENS, ANSWER_TOKENS = 16, 16
NUM_ACTIVE, NUM_SLOTS = 10, 32
HOST_CACHE_SHARE = 0.25  # of all deltas' bytes


@dataclass(frozen=True, slots=True)
class RegistryScope:
    num_variants: int = 1000
    num_requests: int = 400  # of one measurement
    repeats: int = 5


FULL_SCOPE, SMALL_SCOPE = RegistryScope(), RegistryScope(num_variants=40, num_requests=40, repeats=1)


def same_traffic(
    base: Path, registries: Sequence[tuple[Registry, list[VersionRecord]]], scope: RegistryScope
) -> list[float]:
    """Measure tokens per second of the same requests to ten variants on each registry, in turns."""
    seconds: list[list[float]] = [[] for _ in registries]
    for turn in range(scope.repeats + 1):
        for index, (registry, records) in enumerate(registries):
            with serving(base, registry, records, max_gpu_deltas=NUM_SLOTS) as service:
                active = records[:NUM_ACTIVE]
                # Warms up: loads, first calls.
                _run(service, active, scope)
                begun = time.perf_counter()
                _run(service, active, scope)
                if turn:
                    seconds[index].append(time.perf_counter() - begun)
        say(f"turn {turn} of {scope.repeats} is done")
    return [scope.num_requests * ANSWER_TOKENS / median(one) for one in seconds]


def zipf(
    base: Path, registry: Registry, records: list[VersionRecord], scope: RegistryScope
) -> dict[str, float]:
    """Measure traffic to all variants by Zipf's law, with slots for 3% of them and host memory for a quarter."""
    draw = random.Random(5)
    chosen = draw.choices(records, [1 / rank for rank in range(1, len(records) + 1)], k=scope.num_requests)
    host = int(HOST_CACHE_SHARE * sum(record.device_bytes for record in records))
    with serving(base, registry, records, max_gpu_deltas=NUM_SLOTS, max_host_cache_gb=host / 1e9) as service:
        times = []
        texts = prompts(len(chosen), PROMPT_TOKENS, SMALL.vocabulary, seed=6)
        for first in range(0, len(chosen), 8):  # eight at a time
            asked = [
                service.ask(record, prompt, ANSWER_TOKENS)
                for record, prompt in zip(chosen[first : first + 8], texts[first : first + 8], strict=True)
            ]
            times += [one.times().first_token_s for one in asked]
        found = {
            level: service.engine.metric("variant_lookups_total", result=level)
            for level in ("device", "host", "disk")
        }
    shares = {f"found_{level}": round(count / len(chosen), 4) for level, count in found.items()}
    return {
        **shares,
        "first_token_p50_s": round(median(times), 6),
        "first_token_p99_s": round(quantiles(times, n=100)[98], 6),
    }


def start_up_s(base: Path, registry: Path) -> float:
    """Time `peraxis serve` in a process of its own from start to ready; seconds."""
    begun = time.perf_counter()
    with running(base, registry, registry.with_suffix(".log")):
        return time.perf_counter() - begun


def _run(service: BenchEngine, active: Sequence[VersionRecord], scope: RegistryScope) -> None:
    texts = prompts(scope.num_requests, PROMPT_TOKENS, SMALL.vocabulary)
    asked = [
        service.ask(active[index % len(active)], prompt, ANSWER_TOKENS) for index, prompt in enumerate(texts)
    ]
    for one in asked:
        one.times()


def report(args: Namespace) -> Report:
    scope, directory = SMALL_SCOPE if args.small else FULL_SCOPE, args.directory
    base = write_base(directory / "base", SMALL)
    few, many = Registry(directory / "few"), Registry(directory / "many")
    ten = publish_variants(few, base, SMALL, NUM_ACTIVE)
    records = publish_variants(many, base, SMALL, scope.num_variants)
    rates = same_traffic(base, [(few, ten), (many, records)], scope)
    starts = [start_up_s(base, directory / folder) for folder in ("few", "many")]
    zipfs, most, ratio = zipf(base, many, records, scope), str(scope.num_variants), rates[1] / rates[0]
    rows = [
        ("tokens/s, traffic to the same ten", *(f"{rate:.0f}" for rate in rates)),
        ("server's start, s", *(f"{value:.1f}" for value in starts)),
        ("Zipf over all: found in a slot", "", f"{zipfs['found_device']:.0%}"),
        ("found in host memory", "", f"{zipfs['found_host']:.0%}"),
        ("first token, median, ms", "", f"{1e3 * zipfs['first_token_p50_s']:.1f}"),
        ("first token, p99, ms", "", f"{1e3 * zipfs['first_token_p99_s']:.1f}"),
    ]
    return Report(
        {"slots": NUM_SLOTS, "active": NUM_ACTIVE, "requests": scope.num_requests},
        {
            "tokens_per_s": {"10": round(rates[0], 1), most: round(rates[1], 1)},
            "start_up_s": {"10": round(starts[0], 3), most: round(starts[1], 3)},
            "zipf": zipfs,
        },
        [table(("registered variants", "10", most), rows)],
        [at_least(f"tokens/s with {most} registered / with 10", ratio, 0.95)],
        conditions=f"median of {scope.repeats}",
        device=BEST_DEVICE,
    )


main = Bench(
    "registry", __doc__, report, small="40 variants", folder="for the checkpoint and the registries: a disk"
)

if __name__ == "__main__":
    sys.exit(main())
