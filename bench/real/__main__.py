"""Measure time, memory and exactness of the whole way, from checkpoint to token, at the shapes of published models.

The checkpoint has a published model's configuration, random weights and a tokenizer of its size. Fine-tunes are
compressed, published over HTTP, loaded, and queried beside the base; answers are compared with merged checkpoints.
Random weights say nothing about quality.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.real import stages
from bench.real.models import CONFIGS, MAX_FINETUNES, RealModel
from bench.real.stages import Bench
from bench.real.tables import fit_table, goal_table, goals, likeness, rate_table, stage_table
from bench.report import RESULTS, describe, write_result

# Larger models do not fit this bench's machine in float32; their logits are compared instead of tokens.
EXACT_WEIGHTS = 1_600_000_000
# Larger checkpoints do not stay in the page cache beside a server.
WARM_WEIGHTS = 5_000_000_000


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    model = RealModel.of(args.model, args.layers)
    with tempfile.TemporaryDirectory(dir=_made(args.dir), prefix="real-") as name:
        bench = _bench(args, model, Path(name))
        if args.fit:
            fit(args, bench)
            return
        measure(bench)
    found = goals(bench.figures)
    print(f"{model.name}, {model.num_weights / 1e9:.2f}B weights; {describe(torch.device('cpu'))}\n")
    print(f"{stage_table(bench.figures)}\n\nTokens per second:\n\n{rate_table(bench.figures)}\n")
    print(f"{likeness(bench.figures)}\n\n{goal_table(found)}")
    if out := args.out or (None if args.layers else RESULTS / f"real-{model.name}.json"):
        document: dict[str, Any] = {
            "settings": {
                "model": model.name,
                "layers": model.config["num_hidden_layers"],
                "weights": model.num_weights,
                "variants": args.variants,
                "new_tokens": args.new,
                "serve": list(bench.flags),
                "statistic": "median",
            },
            "results": bench.figures,
            "goals": [goal.as_json() for goal in found],
        }
        write_result(out, "real", torch.device("cpu"), document)


def fit(args: argparse.Namespace, bench: Bench) -> None:
    """Measure one fitted compress, which takes long, beside its plan."""
    stages.compress_fitted(bench, args.samples)
    print(
        f"{bench.model.name}, {bench.model.num_weights / 1e9:.2f}B weights; {describe(torch.device('cpu'))}\n"
    )
    print(fit_table(bench.figures))
    if out := args.out or (None if args.layers else RESULTS / f"real-fit-{bench.model.name}.json"):
        settings = {"model": bench.model.name, "layers": bench.model.config["num_hidden_layers"]}
        write_result(out, "real", torch.device("cpu"), {"settings": settings, "results": bench.figures})


def measure(bench: Bench) -> None:
    """Run all stages, in the order of a variant's life."""
    stages.read_files(bench)
    stages.compress(bench)
    with stages.started(bench, "serve") as server:
        stages.publish(bench, server)
        stages.load(bench, server)
        stages.rates(bench, server)
    with stages.started(bench, "serve_again"):
        pass
    if bench.model.num_weights <= EXACT_WEIGHTS:
        stages.compare_tokens(bench)
    else:
        stages.compare_logits(bench)


def _bench(args: argparse.Namespace, model: RealModel, directory: Path) -> Bench:
    layers = "" if args.layers is None else f"-{args.layers}-layers"
    return Bench(
        model=model,
        directory=directory,
        base=model.write_base(args.dir / f"{model.name}{layers}"),
        num_variants=args.variants,
        num_new=args.new,
        flags=("--kv-cache-gb", str(args.kv_cache_gb), "--max-host-cache-gb", "0", "--slot-headroom", "1.02"),
        dropped_only=model.num_weights > WARM_WEIGHTS,
    )


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(prog="python -m bench.real", description=__doc__)
    parser.add_argument("--model", choices=tuple(CONFIGS), required=True)
    parser.add_argument(
        "--layers", type=int, help="fewer layers than the model has; writes JSON only with --out"
    )
    parser.add_argument("--variants", type=int, choices=range(2, 1 + MAX_FINETUNES), default=4)
    parser.add_argument("--new", type=int, default=32, help="tokens of each answer, where rates are measured")
    parser.add_argument("--fit", action="store_true", help="fit one delta to text instead, which takes long")
    parser.add_argument("--samples", type=int, default=32, help="sequences to fit to")
    parser.add_argument("--kv-cache-gb", type=float, default=0.5)
    parser.add_argument(
        "--dir",
        type=Path,
        default=cache / "peraxis" / "bench",
        help="where the base is kept, and what a run needs: three checkpoints at most (8B: 50 GB)",
    )
    parser.add_argument("--out", type=Path, help="the JSON file; bench/results/real-MODEL.json by default")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
