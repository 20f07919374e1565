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
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.http.constrained import measure_constrained
from bench.http.secured import measure_secured
from bench.http.subjects import (
    BASELINE,
    ENGINE,
    HTTP,
    KV_CACHE_GB,
    PROMPT_TOKENS,
    Subject,
    measure,
    server_for,
    streamed_requests,
    through_engine,
    through_http,
)
from bench.http.tables import cpu_table, goal_table, goals, rate_table, results, tokenizing_table
from bench.http.tokenizing import LongPrompts, measure_tokenizing
from bench.report import RESULTS, describe, write_result
from bench.serving import FULL, SMALL, prompts, publish_variants, serving, tokenizer_files, write_base
from bench.synthetic import LlamaShapes
from deltastore.registry import Registry


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
