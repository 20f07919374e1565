"""Measure time, memory and exactness of the whole way, from checkpoint to token, at the shapes of published models.

The checkpoint has a published model's configuration, random weights and a tokenizer of its size. Fine-tunes are
compressed, published over HTTP, loaded, and queried beside the base; answers are compared with merged checkpoints.
Random weights say nothing about quality.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.real import stages
from bench.real.models import CONFIGS, MAX_FINETUNES, RealModel
from bench.real.stages import Bench
from bench.report import RESULTS, describe, write_result
from deltastore.console import table

Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ServingGoal:
    """A figure and its limit."""

    what: str
    limit: str
    reached: str
    is_met: bool

    def as_json(self) -> dict[str, Any]:
        return {"goal": self.what, "limit": self.limit, "reached": self.reached, "met": self.is_met}


def stage_table(figures: Figures) -> str:
    """Return time and memory of each stage."""
    rows = [
        ("reading the base's files", _s(figures["read_base"]["seconds"]), ""),
        (
            "compress, weights only",
            _s(_median(figures["compress"], "seconds")),
            _gb(_most(figures["compress"], "peak_bytes")),
        ),
        (
            "full checkpoint with safetensors, page cache dropped",
            _s(figures["checkpoint_dropped"]["total_s"]),
            _gb(figures["checkpoint_dropped"]["peak_bytes"]),
        ),
    ]
    if "checkpoint_warm" in figures:
        rows.append(("the same, page cache warm", _s(figures["checkpoint_warm"]["total_s"]), ""))
    serve = figures["serve"]
    rows += [
        ("serve, first start to ready", _s(serve["ready_s"]), _gb(serve["peak_bytes_at_start"])),
        ("serve, later start to ready", _s(figures["serve_again"]["ready_s"]), ""),
        ("serve, with all slots filled and used", "", _gb(serve["peak_bytes"])),
        (
            "upload of one variant",
            _s(_median(figures["upload"], "seconds")),
            f"+{_gb(_most(figures['upload'], 'growth_bytes'))}",
        ),
        ("`sha256sum` of the same file", _s(_median(figures["upload"], "sha256sum_s")), ""),
        ("plain copy of as many bytes", _s(figures["plain_copy_s"]), ""),
    ]
    return table(("stage", "seconds", "peak memory, GB"), [*rows, *_load_rows(figures)])


def rate_table(figures: Figures) -> str:
    """Return tokens per second by number of streams."""
    rows = [
        (str(row["streams"]), f"{row['base']:.1f}", f"{row['one variant']:.1f}", f"{row['all variants']:.1f}")
        for row in figures["tokens_per_s"]
    ]
    return table(("streams", "base", "one variant", "all variants mixed"), rows)


def likeness(figures: Figures) -> str:
    """Return a sentence on the differences between the served model and merged checkpoints."""
    if "exact" in figures:
        exact = figures["exact"]
        return (
            f"float32, base and variants in one batch against `generate()` on merged checkpoints: {exact['equal']} of "
            f"{exact['sequences']} sequences of {exact['tokens_each']} tokens equal, "
            f"{exact['distinct_answers']} of them distinct"
        )
    logits = figures["logits"]
    return (
        f"bfloat16, logits of a served variant against its merged checkpoint: KL {logits['kl']:.2g} nats per token "
        f"(the base's is {logits['kl_of_base']:.2g}), the same likeliest token in {logits['same_likeliest']:.1%}"
    )


def fit_table(figures: Figures) -> str:
    """Return the planned and the measured figures of a fitted compress."""
    fit = figures["fit"]
    held_out = fit["fidelity"]["held_out"]
    rows = [
        ("minutes", "", f"{fit['seconds'] / 60:.1f}"),
        ("memory beyond the program's own, GB", _gb(fit["planned_bytes"]), ""),
        ("peak memory, GB", "", _gb(fit["peak_bytes"])),
        ("KL on held-out text", "", f"{held_out['kl']:.3g}"),
    ]
    return table((f"fitted to {fit['samples']} sequences", "planned", "measured"), rows)


def goal_table(goals: Sequence[ServingGoal]) -> str:
    rows = [(goal.what, goal.limit, goal.reached, "met" if goal.is_met else "not met") for goal in goals]
    return table(("goal", "limit", "reached", ""), rows)


def goals(figures: Figures) -> list[ServingGoal]:
    """Return the goals of a served model; the limit of the 8B's artifact holds for smaller models, too."""
    serve, memory = figures["serve"], figures["serve"]["memory"]
    beside = serve["peak_bytes"] - sum(memory.values())
    load, checkpoint = _median(figures["load_dropped"], "total"), figures["checkpoint_dropped"]["total_s"]
    upload, checksum = _median(figures["upload"], "seconds"), _median(figures["upload"], "sha256sum_s")
    # The first upload starts the worker that checks uploads, which stays.
    growth, compress = _most(figures["upload"][1:], "growth_bytes"), figures["compress"]
    most_ready = 1.3 * figures["read_base"]["seconds"] + 20
    four = next(row for row in figures["tokens_per_s"] if row["streams"] == 4)
    slowest, largest = _median(compress, "seconds"), _most(compress, "peak_bytes")
    mixed = four["all variants"] / four["base"]
    return [
        _at_most("artifact, GB", figures["artifact_bytes"] / 1e9, 1.02),
        _at_most("load of a variant, dropped / plain copy", load / figures["plain_copy_s"], 2.5),
        _at_least("full checkpoint / load of a variant, dropped", checkpoint / load, 10),
        _at_most("upload / `sha256sum`", upload / checksum, 2),
        _at_most("memory of an upload, MiB", growth / 2**20, 64),
        _at_most("start to ready, s", serve["ready_s"], most_ready),
        _at_most("peak of serve beside base, slots and KV cache, GB", beside / 1e9, 1.5),
        _at_most("memory of compress, GB", largest / 1e9, 3),
        _at_most("compress, minutes", slowest / 60, 10),
        _at_least("4 streams: all variants mixed / base", mixed, 0.8),
    ]


def _load_rows(figures: Figures) -> Iterator[tuple[str, str, str]]:
    """Yield loads and first tokens, and the merge of a large model."""
    for cache in ("dropped", "warm"):
        if loads := figures.get(f"load_{cache}"):
            yield f"load of a variant, page cache {cache}", _s(_median(loads, "total")), ""
            first_token_s = _median(loads, "first_token_s")
            yield f"first token of a cold variant, page cache {cache}", _s(first_token_s), ""
    yield "first token of a resident variant", _s(figures["first_token_resident_s"]), ""
    if merge := figures.get("merge"):
        yield "merge to a stock checkpoint", _s(merge["seconds"]), _gb(merge["peak_bytes"])


def _at_most(what: str, reached: float, limit: float) -> ServingGoal:
    return ServingGoal(what, f"at most {limit:.3g}", f"{reached:.2f}", reached <= limit)


def _at_least(what: str, reached: float, limit: float) -> ServingGoal:
    return ServingGoal(what, f"at least {limit:.3g}", f"{reached:.2f}", reached >= limit)


def _median(rows: Sequence[Figures], key: str) -> float:
    return float(median(row[key] for row in rows))


def _most(rows: Sequence[Figures], key: str) -> float:
    return float(max(row[key] for row in rows))


def _s(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.1f}"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f}"


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
