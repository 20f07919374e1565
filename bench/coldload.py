"""Measure how loads of variants affect other traffic.

First: the gaps between the tokens of eight running streams, in turns with no loads and while twenty cold variants load
one after another. Second: the first token of a cold variant beside that of a warm one. Third: twice as many active
variants as slots, Zipf's law, Poisson arrivals at 70% of the measured saturation, every load slowed; beside the same
arrivals with a slot for each variant.
"""

from __future__ import annotations

import random
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from bench.client import Span, gaps_meeting, gaps_within
from bench.engine import (
    FULL,
    MAX_POSITIONS,
    SMALL,
    BenchEngine,
    Mode,
    prompts,
    publish_variants,
    serving,
    write_base,
)
from bench.harness import BEST_DEVICE, Bench, Report, at_most, p99, rounded, say
from bench.synthetic import LlamaShapes
from deltastore.console import table
from deltastore.loader import Loader, LoadReport
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord

PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class TrafficScope:
    """Sizes of the traffic."""

    shapes: LlamaShapes
    num_streams: int = 8
    stream_tokens: int = MAX_POSITIONS - PROMPT_TOKENS  # more than are waited for
    num_turns: int = 5
    quiet_s: float = 4.0
    num_cold: int = 20
    pause_s: float = 0.02  # between two loads
    num_slots: int = 8
    num_active: int = 16  # variants under Zipf's law
    num_arrivals: int = 240
    answer_tokens: int = 16
    slowed_s: float = 0.02  # added to every load

    @property
    def num_variants(self) -> int:
        return self.num_streams + self.num_cold


SMALL_SCOPE = TrafficScope(SMALL, num_turns=1, quiet_s=0.5, num_cold=2, num_arrivals=24, answer_tokens=4)


@dataclass(frozen=True, slots=True)
class Setup:
    """A base, its published variants, the traffic that they get, and settings of the engine."""

    base: Path
    registry: Registry
    records: list[VersionRecord]
    scope: TrafficScope
    settings: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def service(self, num_slots: int, mode: Mode = "process") -> Iterator[BenchEngine]:
        """Serve all variants without a host cache."""
        settings = {"max_gpu_deltas": num_slots, **self.settings}
        with serving(self.base, self.registry, self.records, mode=mode, **settings) as service:
            yield service

    def prompts(self, count: int, seed: int) -> list[list[int]]:
        return prompts(count, PROMPT_TOKENS, self.scope.shapes.vocabulary, seed)


def streams(setup: Setup) -> dict[str, float]:
    """Measure p50 and p99 of the gaps between tokens of running streams, in seconds, without loads and with.

    Raises:
        RuntimeError: a stream ended before the last turn.
    """
    scope = setup.scope
    running, cold = setup.records[: scope.num_streams], setup.records[scope.num_streams :]
    with setup.service(scope.num_variants) as service:
        for record in running:
            service.load(record)
        asked = [
            service.ask(record, prompt, scope.stream_tokens)
            for record, prompt in zip(running, setup.prompts(scope.num_streams, 1), strict=True)
        ]
        while service.engine.metric("time_to_first_token_seconds_count") < len(asked):
            time.sleep(0.01)
        turns = [_turn(service, cold, scope) for _ in range(scope.num_turns)]
        for one in asked:
            service.stop(one)
        times = [one.times() for one in asked]
    if min(len(one.tokens) for one in times) == scope.stream_tokens:
        raise RuntimeError(f"a stream ended after {scope.stream_tokens} tokens, before the last load")
    quiet = gaps_within(times, [without for without, _ in turns])
    loading = gaps_meeting(times, [busy for _, busy in turns])
    return {
        "gaps_quiet": len(quiet),
        "gaps_loading": len(loading),
        "quiet_p50_s": median(quiet),
        "quiet_p99_s": p99(quiet),
        "loading_p50_s": median(loading),
        "loading_p99_s": p99(loading),
    }


def _turn(service: BenchEngine, cold: Sequence[VersionRecord], scope: TrafficScope) -> tuple[Span, Span]:
    """Wait, load all cold variants one after another, and unload them; return the time without and with loads."""
    began = time.perf_counter()
    time.sleep(scope.quiet_s)
    load_began = time.perf_counter()
    for record in cold:
        service.load(record)
        time.sleep(scope.pause_s)
    load_ended = time.perf_counter()
    for record in cold:
        service.unload(record)
    return Span(began, load_began), Span(load_began, load_ended)


def first_tokens(setup: Setup) -> dict[str, float]:
    """Measure the median seconds to the first token of a lone request, with its variant in a slot and on disk."""
    cold, warm = [], []
    with setup.service(setup.scope.num_variants) as service:
        for record, prompt in zip(setup.records, setup.prompts(len(setup.records), 2), strict=True):
            cold.append(_first(service, record, prompt))
            warm.append(_first(service, record, prompt[::-1]))
    return {"cold_p50_s": median(cold[1:]), "warm_p50_s": median(warm[1:])}


def zipf(setup: Setup) -> dict[str, float]:
    """Measure first-token times under the same arrivals, with slots for half of the active variants and for all."""
    scope = setup.scope
    with setup.service(scope.num_active, "thread") as service, _slowed_loads(scope.slowed_s):
        rate = 0.7 * saturation(setup, service)
        plenty = arrive(setup, service, rate)
    with setup.service(scope.num_slots, "thread") as service, _slowed_loads(scope.slowed_s):
        scarce = arrive(setup, service, rate)
        loads = service.engine.metric("variant_load_seconds_count", source="disk", stage="total")
    return {
        "arrivals_per_s": rate,
        "slot_for_all_p50_s": median(plenty),
        "slot_for_all_p99_s": p99(plenty),
        "slots_for_half_p50_s": median(scarce),
        "slots_for_half_p99_s": p99(scarce),
        "loads_per_request": loads / scope.num_arrivals,
    }


def saturation(setup: Setup, service: BenchEngine) -> float:
    """Measure the requests per second that the server sustains when all are queued at once."""
    scope, draw = setup.scope, random.Random(3)
    for record in setup.records[: scope.num_active]:
        service.load(record)
    chosen = _by_zipf(setup, draw, scope.num_arrivals)
    texts = setup.prompts(scope.num_arrivals, 3)
    begun = time.perf_counter()
    asked = [service.ask(r, p, scope.answer_tokens) for r, p in zip(chosen, texts, strict=True)]
    for one in asked:
        one.times()
    return scope.num_arrivals / (time.perf_counter() - begun)


def arrive(setup: Setup, service: BenchEngine, rate: float) -> list[float]:
    """Submit requests at random times, `rate` per second; return the seconds to each one's first token."""
    scope, draw = setup.scope, random.Random(4)
    chosen = _by_zipf(setup, draw, scope.num_arrivals)
    texts = setup.prompts(scope.num_arrivals, 4)
    asked, when = [], time.perf_counter()
    for record, prompt in zip(chosen, texts, strict=True):
        when += draw.expovariate(rate)
        time.sleep(max(0.0, when - time.perf_counter()))
        asked.append(service.ask(record, prompt, scope.answer_tokens))
    return [one.times().first_token_s for one in asked]


def _by_zipf(setup: Setup, draw: random.Random, count: int) -> list[VersionRecord]:
    active = setup.records[: setup.scope.num_active]
    return draw.choices(active, [1 / rank for rank in range(1, len(active) + 1)], k=count)


def _first(service: BenchEngine, record: VersionRecord, prompt: list[int]) -> float:
    asked = service.ask(record, prompt, 1)
    return asked.times().first_token_s


@contextmanager
def _slowed_loads(added_s: float) -> Iterator[None]:
    """Add seconds to every load of a delta, as a slower disk would."""
    load: Callable[..., LoadReport] = Loader.load

    def slowly(*args: Any) -> LoadReport:
        time.sleep(added_s)
        return load(*args)

    with patch.object(Loader, "load", slowly):
        yield


def report(args: Namespace) -> Report:
    scope = SMALL_SCOPE if args.small else TrafficScope(FULL)
    base, registry = write_base(args.directory / "base", scope.shapes), Registry(args.directory / "registry")
    records = publish_variants(registry, base, scope.shapes, scope.num_variants)
    setup, results = Setup(base, registry, records, scope), {}
    for name, measure in {"streams": streams, "first_token": first_tokens, "zipf": zipf}.items():
        results[name] = rounded(measure(setup))
        say(f"{name} done")
    gaps, first, zipfs = results["streams"], results["first_token"], results["zipf"]
    figures = {
        "between tokens of 8 streams, nothing loads": (gaps["quiet_p50_s"], gaps["quiet_p99_s"]),
        "the same while cold variants load": (gaps["loading_p50_s"], gaps["loading_p99_s"]),
        "first token, alone, variant in its slot": (first["warm_p50_s"],),
        "first token, alone, variant on disk": (first["cold_p50_s"],),
        "first token, 16 active variants, 16 slots": (
            zipfs["slot_for_all_p50_s"],
            zipfs["slot_for_all_p99_s"],
        ),
        "first token, 16 active variants, 8 slots": (
            zipfs["slots_for_half_p50_s"],
            zipfs["slots_for_half_p99_s"],
        ),
    }
    rows = [(what, *[*(f"{1e3 * value:.1f}" for value in both), ""][:2]) for what, both in figures.items()]
    more = zipfs["slots_for_half_p50_s"] / zipfs["slot_for_all_p50_s"]
    return Report(
        {**asdict(scope), "prompt_tokens": PROMPT_TOKENS},
        results,
        [table(("what", "median, ms", "p99, ms"), rows)],
        [
            at_most(
                "p99 between tokens, while variants load / without",
                gaps["loading_p99_s"] / gaps["quiet_p99_s"],
                1.1,
            ),
            at_most("median first token, slots for half of the variants / for all", more, 5.0),
        ],
        device=BEST_DEVICE,
    )


main = Bench(
    "coldload", __doc__, report, small="a tiny model", folder="for the checkpoint and the registry: a disk"
)

if __name__ == "__main__":
    sys.exit(main())
