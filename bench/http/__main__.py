"""Measure what HTTP costs: streams of a server over HTTP beside the bare engine, and beside another server.

1, 16 and 64 streams of one model go through `peraxis serve` and through an engine in this process, in turns. Then 300
streams of a tiny model, whose steps take almost no time, go through this repository's server and, with `--baseline`,
through that of another checkout. Then streams that are constrained to JSON run alone and beside free ones, and streams
of a server with keys, limits and JSON logs beside those of a server without. Last, prompts of 10,000 tokens are
tokenized while eight streams run.

The clients run on the same processors as the server; a table says how much of them they take.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.engine import FULL, SMALL, prompts, publish_variants, serving, tokenizer_files, write_base
from bench.http.subjects import (
    BASELINE,
    BESIDE,
    CONSTRAINED,
    ENGINE,
    FREE,
    HTTP,
    KV_CACHE_GB,
    OPEN,
    PROMPT_TOKENS,
    SECURED,
    LongPrompts,
    Subject,
    measure,
    measure_constrained,
    measure_secured,
    measure_tokenizing,
    server_for,
    streamed_requests,
    through_engine,
    through_http,
)
from bench.report import RESULTS, describe, write_result
from bench.synthetic import LlamaShapes
from deltastore.console import table
from deltastore.registry import Registry

HEADS = ("streams", "variants", "")


def rate_table(subjects: Sequence[Subject]) -> str:
    rows = [
        (
            *_names(one),
            f"{one.median('tokens_per_s'):.0f}",
            *(f"{1e3 * one.median(figure):.1f}" for figure in ("p50_gap_s", "p99_gap_s", "first_token_s")),
        )
        for one in subjects
    ]
    return table((*HEADS, "tokens/s", "between tokens, ms", "p99, ms", "first token, ms"), rows)


def cpu_table(subjects: Sequence[Subject]) -> str:
    """Return the processor time per token by process, and the cores that are busy at the measured rate."""
    rows = []
    for one in subjects:
        times, rate = one.cpu_s(), one.median("tokens_per_s")
        parts = ", ".join(f"{part} {1e6 * seconds:.0f}" for part, seconds in times.items())
        cores, clients = rate * sum(times.values()), rate * times.get("clients", 0.0)
        rows.append((*_names(one), parts, f"{cores:.2f}", f"{clients:.2f}"))
    return table((*HEADS, "processor time, µs per token", "cores busy", "of them by clients"), rows)


def tokenizing_table(figures: Mapping[str, Mapping[str, float]], num_tokens: int) -> str:
    rows = [
        (
            name,
            *(f"{1e3 * one[key]:.1f}" for key in ("reply_p50_s", "quiet_p99_s", "busy_p99_s")),
            f"{one['busy_p99_s'] / one['quiet_p99_s']:.2f}",
        )
        for name, one in figures.items()
    ]
    return table(
        (f"{num_tokens} tokens, by", "tokenized in, ms", "others' p99, quiet, ms", "busy, ms", "ratio"), rows
    )


def goals(subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """Compare the figures with their limits; a figure without its peer is `None`."""
    found = {(one.name, one.num_streams, one.num_variants): one for one in subjects}
    most = max(one.num_streams for one in subjects if one.name == ENGINE)
    many = max(one.num_streams for one in subjects if one.name == HTTP)
    engine, http = found[ENGINE, most, 0], found[HTTP, most, 0]
    free, constrained, beside = (found[name, most, 0] for name in (FREE, CONSTRAINED, BESIDE))
    asked = [
        (
            f"{most} streams: tokens/s over HTTP / bare engine",
            _ratio(http, engine, "tokens_per_s"),
            "at least",
            0.95,
        ),
        (f"{most} streams: p99 over HTTP / bare engine", _ratio(http, engine, "p99_gap_s"), "at most", 1.1),
        (
            f"{many} streams of a tiny model: tokens/s / baseline",
            _ratio(found[HTTP, many, 0], found.get((BASELINE, many, 0)), "tokens_per_s"),
            "at least",
            2.0,
        ),
        (
            f"{most} streams: time per token, constrained to JSON / free",
            _ratio(free, constrained, "tokens_per_s"),
            "at most",
            1.15,
        ),
        (
            f"{most} streams: p99 of free ones, beside as many constrained / all free",
            _ratio(beside, free, "p99_gap_s"),
            "at most",
            1.1,
        ),
        (
            f"{most} streams: tokens/s with keys, limits and JSON logs / without",
            _ratio(found[SECURED, most, 0], found[OPEN, most, 0], "tokens_per_s"),
            "at least",
            0.97,
        ),
    ]
    return [
        {"goal": goal, "limit": f"{side} {limit:g}", "reached": value, "met": _met(value, side, limit)}
        for goal, value, side, limit in asked
    ]


def goal_table(subjects: Sequence[Subject]) -> str:
    words = {True: "met", False: "not met", None: "not measured"}
    rows = [
        (g["goal"], g["limit"], "" if g["reached"] is None else f"{g['reached']:.2f}", words[g["met"]])
        for g in goals(subjects)
    ]
    return table(("goal", "limit", "reached", ""), rows)


def results(subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """Return all samples, for the JSON document."""
    return [
        {
            "who": one.name,
            "streams": one.num_streams,
            "variants": one.num_variants,
            "samples": [_rounded(asdict(sample)) for sample in one.samples],
        }
        for one in subjects
    ]


def _names(one: Subject) -> tuple[str, str, str]:
    return str(one.num_streams), str(one.num_variants or "base"), one.name


def _ratio(one: Subject, other: Subject | None, figure: str) -> float | None:
    return None if other is None else round(one.median(figure) / other.median(figure), 3)


def _met(value: float | None, side: str, limit: float) -> bool | None:
    if value is None:
        return None
    return value >= limit if side == "at least" else value <= limit


def _rounded(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _rounded(value) if isinstance(value, Mapping) else round(value, 7)
        for name, value in figures.items()
    }


@dataclass(frozen=True, slots=True)
class HttpScope:
    """Sizes of a run."""

    shapes: LlamaShapes
    streams: tuple[int, ...] = (1, 16, 64)
    num_variants: int = 8  # each with a tokenizer of its own
    num_new: int = 128
    num_tiny: int = 300  # streams of the tiny model
    long: LongPrompts = field(default_factory=LongPrompts)


SMALL_SCOPE = HttpScope(
    SMALL,
    streams=(1, 4),
    num_variants=2,
    num_new=8,
    num_tiny=12,
    long=LongPrompts(num_tokens=500, count=2, num_streams=2, quiet_s=0.2),
)


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    scope = SMALL_SCOPE if args.small else HttpScope(FULL)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        subjects = beside_engine(Path(name) / "engine", scope, args.repeats)
        subjects += tiny_model(Path(name) / "tiny", scope, args.baseline, args.repeats)
        sizes = scope.shapes, max(scope.streams), scope.num_new, args.repeats
        subjects += measure_constrained(Path(name) / "json", *sizes)
        subjects += measure_secured(Path(name) / "secured", *sizes)
        tokenizing = measure_tokenizing(Path(name) / "long", scope.shapes, scope.long)
    print(
        f"{describe(device)}; median of {args.repeats}\n\n{rate_table(subjects)}\n\n{cpu_table(subjects)}\n"
    )
    print(f"{tokenizing_table(tokenizing, scope.long.num_tokens)}\n\n{goal_table(subjects)}")
    if out := args.out or (None if args.small else RESULTS / "http.json"):
        settings = {
            **asdict(scope),
            "prompt_tokens": PROMPT_TOKENS,
            "repeats": args.repeats,
            "statistic": "median",
        }
        figures = {"results": results(subjects), "tokenizing": tokenizing, "goals": goals(subjects)}
        write_result(out, "http", device, {"settings": settings, **figures})


def beside_engine(directory: Path, scope: HttpScope, repeats: int) -> list[Subject]:
    """Measure an engine in this process and a server, in turns, on the same base and variants."""
    base, registry = write_base(directory / "base", scope.shapes), Registry(directory / "registry")
    files = tokenizer_files(directory, scope.shapes)
    records = publish_variants(registry, base, scope.shapes, scope.num_variants, files)
    most, subjects = max(scope.streams), []
    with ExitStack() as stack:
        settings: dict[str, Any] = {"max_num_seqs": most, "kv_cache_gb": KV_CACHE_GB}
        engine = stack.enter_context(serving(base, registry, records, **settings))
        server = stack.enter_context(server_for(base, registry, most, scope.num_variants))
        for num_streams, num_variants in (
            *((count, 0) for count in scope.streams),
            (most, scope.num_variants),
        ):
            asked = prompts(num_streams, PROMPT_TOKENS, scope.shapes.vocabulary)
            bare = partial(through_engine, engine, asked, num_variants, scope.num_new)
            subjects.append(Subject(ENGINE, num_streams, num_variants, bare))
            requests = streamed_requests(asked, num_variants, scope.num_new)
            subjects.append(Subject(HTTP, num_streams, num_variants, partial(through_http, server, requests)))
        measure(subjects, repeats)
    return subjects


def tiny_model(directory: Path, scope: HttpScope, baseline: Path | None, repeats: int) -> list[Subject]:
    """Measure many streams of a model that costs almost nothing, on this server and on the baseline's, in turns."""
    base, registry = write_base(directory / "base", SMALL), Registry(directory / "registry")
    requests = streamed_requests(prompts(scope.num_tiny, PROMPT_TOKENS, SMALL.vocabulary), 0, scope.num_new)
    checkouts = {HTTP: None} if baseline is None else {HTTP: None, BASELINE: baseline}
    subjects = []
    with ExitStack() as stack:
        for name, checkout in checkouts.items():
            server = stack.enter_context(server_for(base, registry, scope.num_tiny, 0, checkout))
            subjects.append(Subject(name, scope.num_tiny, 0, partial(through_http, server, requests)))
        measure(subjects, repeats)
    return subjects


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.http", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny model; writes JSON only with --out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--baseline", type=Path, help="another checkout, whose server runs 300 streams, too")
    parser.add_argument("--dir", type=Path, help="where the checkpoints and the registries are made")
    parser.add_argument("--out", type=Path, help="the JSON file; bench/results/http.json by default")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
