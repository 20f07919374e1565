"""Measure time, memory and exactness of the whole way, from checkpoint to token, at the shapes of published models.

The checkpoint has a published model's configuration, random weights and a tokenizer of its size. Fine-tunes are
compressed, published over HTTP, loaded, and queried beside the base; answers are compared with merged checkpoints.
Random weights say nothing about quality.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.harness import Bench, Goal, Report, at_least, at_most, fixed, option, say, seconds, table_of, text
from bench.process import Ran, Server, module, peraxis, serve_command, serving
from bench.process import run as run_command
from bench.real_models import CONFIGS, MAX_FINETUNES, RealModel
from deltastore.console import table
from peraxis.demo.page_cache import drop

# Larger models do not fit this bench's machine in float32; their logits are compared instead of tokens.
EXACT_WEIGHTS = 1_600_000_000
# Larger checkpoints do not stay in the page cache beside a server.
WARM_WEIGHTS = 5_000_000_000
PROMPT = "def main(arguments):"
COPY_REPEATS = 5
RATE_REPEATS = 3
STREAMS = (1, 4, 16)

Figures = dict[str, Any]


@dataclass(slots=True)
class Run:
    """One model's run: its settings, its files and its figures."""

    model: RealModel
    directory: Path  # scratch of this run, on the disk that is measured
    base: Path
    num_variants: int
    num_new: int  # tokens of an answer, where rates are measured
    flags: Sequence[str]  # of `serve`
    dropped_only: bool  # no figures with a warm page cache
    figures: Figures = field(default_factory=dict)

    @property
    def artifacts(self) -> list[Path]:
        return [
            self.directory / f"variant-{number}.safetensors" for number in range(1, self.num_variants + 1)
        ]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that keep the cache of fingerprints within the run."""
        return {"XDG_CACHE_HOME": str(self.directory / "cache")}

    def say(self, what: str) -> None:
        say(f"{time.strftime('%H:%M:%S')} {self.model.name}: {what}")


def compress(run: Run) -> None:
    """Make each fine-tune, compress it from weights alone, and delete it."""
    rows = []
    for number, artifact in enumerate(run.artifacts, 1):
        finetune = run.directory / f"finetune-{number}"
        run.say(f"writing fine-tune {number}")
        run.model.write_finetune(run.base, finetune, number)
        drop(_files(run.base, finetune))
        run.say(f"compressing fine-tune {number}")
        ran = peraxis(
            "compress", "--base", run.base, "--finetune", finetune, "--out", artifact, "--calibration", "none",
            "--json", "--no-progress", environment=run.environment,
        )  # fmt: skip
        rows.append({"seconds": ran.seconds, "cpu_s": ran.cpu_s, "peak_bytes": ran.peak_bytes})
        if number == 1:
            run.figures["artifact_bytes"] = artifact.stat().st_size
            run.figures["weight_error"] = ran.result["fidelity"]["weight_error"]
            drop(_files(finetune))
            run.say("loading the full checkpoint with safetensors")
            run.figures["checkpoint_dropped"] = _checkpoint_load(finetune)
            if not run.dropped_only:
                run.figures["checkpoint_warm"] = _checkpoint_load(finetune)
        shutil.rmtree(finetune)
    run.figures["compress"] = rows


def compress_fitted(run: Run, num_samples: int) -> None:
    """Compress one fine-tune, fitted to text that it generates, beside the bound of `--plan`."""
    finetune = run.model.write_finetune(run.base, run.directory / "finetune-1", 1)
    command = (
        "compress", "--base", run.base, "--finetune", finetune, "--out", run.artifacts[0], "--calibration", "self",
        "--samples", num_samples, "--json", "--no-progress",
    )  # fmt: skip
    plan = peraxis(*command, "--plan", environment=run.environment).result
    run.say(f"fitting to {num_samples} sequences")
    ran = peraxis(*command, environment=run.environment)
    run.figures["fit"] = {
        "samples": num_samples,
        "planned_bytes": plan["memory"]["host"]["bytes"],
        "seconds": ran.seconds,
        "cpu_s": ran.cpu_s,
        "peak_bytes": ran.peak_bytes,
        "artifact_bytes": run.artifacts[0].stat().st_size,
        "fidelity": ran.result["fidelity"],
    }


def _checkpoint_load(directory: Path) -> Figures:
    ran = _program("load", directory)
    return {**ran.result, "peak_bytes": ran.peak_bytes}


def read_files(run: Run) -> None:
    """Read the base's files once, page cache dropped: the lower bound of a server's start."""
    drop(_files(run.base))
    buffer, start, total = bytearray(4 << 20), time.perf_counter(), 0
    for path in _files(run.base):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    run.figures["read_base"] = {"seconds": time.perf_counter() - start, "bytes": total}


@contextmanager
def started(run: Run, name: str, dtype: str = "bfloat16") -> Iterator[Server]:
    """Start a server with the page cache dropped; store its time and memory in the figures under `name`."""
    drop(_files(run.base))
    run.say(f"starting a server in {dtype}")
    flags = ("--dtype", dtype, "--max-gpu-deltas", max(2, run.num_variants), *run.flags)
    command = serve_command(run.base, run.directory / "registry", *flags)
    with serving(command, run.environment) as server:
        metrics = server.metrics()
        sizes = {
            kind: metrics[f'peraxis_device_memory_bytes{{kind="{kind}"}}'] for kind in ("base", "slots", "kv")
        }
        run.figures[name] = {
            "ready_s": server.ready_s,
            "peak_bytes_at_start": server.peak.num_bytes,
            "resident_bytes": server.memory()["VmRSS"],
            "memory": sizes,
        }
        yield server
        run.figures[name]["resident_bytes_at_end"] = server.memory()["VmRSS"]
        run.figures[name]["peak_bytes"] = max(server.peak.highest, server.memory()["VmHWM"])


def publish(run: Run, server: Server) -> None:
    """Upload every artifact over HTTP, beside `sha256sum` of the same file."""
    rows = []
    for number, artifact in enumerate(run.artifacts, 1):
        run.say(f"uploading variant {number}")
        # Both find the file in the page cache.
        checksum = run_command(["sha256sum", artifact]).seconds
        before = server.memory()["VmRSS"]
        server.peak.restart()
        upload_s = server.upload(f"v{number}", artifact)
        rows.append(
            {"seconds": upload_s, "sha256sum_s": checksum, "growth_bytes": server.memory()["VmHWM"] - before}
        )
    run.figures["upload"] = rows
    listed = server.client.get("/variants").json()["variants"]
    num_artifacts = len({version["digest"] for variant in listed for version in variant["versions"]})
    if num_artifacts != run.num_variants:
        raise RuntimeError(f"{run.num_variants} variants are {num_artifacts} different artifacts")


def load(run: Run, server: Server) -> None:
    """Time loads of variants that are not resident, page cache dropped and warm, and a plain copy of as many bytes."""
    for variant in _names(run):
        # The first touch of a slot's memory is not the load's.
        server.generate(variant, PROMPT, 1)
    server.generate(None, PROMPT, 1)
    run.figures["first_token_resident_s"] = median(
        server.generate("v1", f"{number} {PROMPT}", 1)["timings"]["ttft_s"] for number in range(5)
    )
    run.figures["plain_copy_s"] = _plain_copy(run.figures["artifact_bytes"])
    for cache in ("dropped",) if run.dropped_only else ("dropped", "warm"):
        run.say(f"loading variants, page cache {cache}")
        run.figures[f"load_{cache}"] = [_cold_start(run, server, name, cache) for name in _names(run)]


def _cold_start(run: Run, server: Server, variant: str, cache: str) -> Figures:
    server.unload(variant)
    if cache == "dropped":
        drop(path for path in (run.directory / "registry").rglob("*") if path.is_file())
    before = server.metrics()
    reply = server.generate(variant, f"{cache} {PROMPT}", 1)
    after = server.metrics()
    stages = {
        stage: after[series] - before.get(series, 0.0)
        for stage in ("read", "copy", "total")
        if (series := f'peraxis_variant_load_seconds_sum{{source="disk",stage="{stage}"}}') in after
    }
    if not reply["timings"]["cold"]:
        raise RuntimeError(f"variant {variant} was still in its slot")
    return {**stages, "first_token_s": reply["timings"]["ttft_s"]}


def _plain_copy(num_bytes: int) -> float:
    """Time one copy of bytes to memory that was never touched; median seconds."""
    source = torch.ones(num_bytes, dtype=torch.uint8)
    return median(seconds(source.clone) for _ in range(COPY_REPEATS))


def _program(*args: object) -> Ran:
    return module("bench.real_programs", *args)


def rates(run: Run, server: Server) -> None:
    """Measure tokens per second of the base, of one variant and of all variants mixed, in turns."""
    subjects: dict[str, list[str | None]] = {
        "base": [None],
        "one variant": ["v1"],
        "all variants": list(_names(run)),
    }
    rows = []
    for streams in STREAMS:
        run.say(f"generating with {streams} streams")
        times: dict[str, list[float]] = {name: [] for name in subjects}
        for turn in range(RATE_REPEATS):
            for name, variants in subjects.items():
                times[name].append(_answered(run, server, variants, streams, turn))
        rows.append(
            {
                "streams": streams,
                **{name: streams * run.num_new / median(spent) for name, spent in times.items()},
            }
        )
    run.figures["tokens_per_s"] = rows


def _answered(run: Run, server: Server, variants: Sequence[str | None], streams: int, turn: int) -> float:
    """Send several requests at once; return the seconds until all are answered."""

    def ask(number: int) -> dict[str, Any]:
        # Prompts differ from their beginning, so that no prefix is found.
        return server.generate(
            variants[number % len(variants)], f"{turn}{number}{streams} {PROMPT}", run.num_new
        )

    with ThreadPoolExecutor(streams) as threads:
        start = time.perf_counter()
        replies = list(threads.map(ask, range(streams)))
        answered_s = time.perf_counter() - start
    if any(len(reply["outputs"][0]["token_ids"]) != run.num_new for reply in replies):
        raise RuntimeError(f"an answer is shorter than {run.num_new} tokens")
    return answered_s


def compare_tokens(run: Run, num_new: int = 16) -> None:
    """Compare greedy tokens of all variants and the base in one batch with `generate()` on merged checkpoints."""
    with started(run, "serve_float32", "float32") as server:
        names = [None, *_names(run)]
        with ThreadPoolExecutor(len(names)) as threads:
            replies = list(threads.map(lambda name: server.generate(name, PROMPT, num_new), names))
    served = [reply["outputs"][0]["token_ids"] for reply in replies]
    expected = [_generated(run.base, num_new)]
    for number, artifact in enumerate(run.artifacts, 1):
        run.say(f"merging variant {number}")
        merged = run.directory / "merged"
        peraxis(
            "merge", "--base", run.base, "--delta", artifact, "--out", merged, "--dtype", "float32", "--no-progress",
            environment=run.environment,
        )  # fmt: skip
        expected.append(_generated(merged, num_new))
        shutil.rmtree(merged)
    matches = [one == other for one, other in zip(served, expected, strict=True)]
    run.figures["exact"] = {"sequences": len(matches), "tokens_each": num_new, "equal": sum(matches)}
    run.figures["exact"]["distinct_answers"] = len({tuple(ids) for ids in served})


def _generated(checkpoint: Path, num_new: int) -> list[int]:
    ids: list[int] = _program("generate", checkpoint, PROMPT, num_new).result["token_ids"]
    return ids


def compare_logits(run: Run) -> None:
    """Measure the KL of the first variant's logits, served in bfloat16, to those of its merged checkpoint."""
    merged, artifact = run.directory / "merged", run.artifacts[0]
    outputs = {name: run.directory / f"{name}.pt" for name in ("variant", "base", "merged")}
    drop(_files(run.base))
    run.say("merging variant 1")
    ran = peraxis(
        "merge", "--base", run.base, "--delta", artifact, "--out", merged, "--json", "--no-progress",
        environment=run.environment,
    )  # fmt: skip
    size = sum(path.stat().st_size for path in _files(merged))
    run.figures["merge"] = {"seconds": ran.seconds, "peak_bytes": ran.peak_bytes, "bytes": size}
    run.say("comparing logits")
    _program("logits", merged, outputs["merged"])
    shutil.rmtree(merged)
    _program("served-logits", run.base, artifact, outputs["variant"], outputs["base"])
    logits = {name: torch.load(path).log_softmax(-1) for name, path in outputs.items()}
    run.figures["logits"] = {
        "kl": _kl(logits["merged"], logits["variant"]),
        "kl_of_base": _kl(logits["merged"], logits["base"]),
        "same_likeliest": float((logits["merged"].argmax(-1) == logits["variant"].argmax(-1)).float().mean()),
    }


def _kl(expected: torch.Tensor, found: torch.Tensor) -> float:
    return float((expected.exp() * (expected - found)).sum(-1).mean())


def _names(run: Run) -> list[str]:
    return [f"v{number}" for number in range(1, run.num_variants + 1)]


def _files(*directories: Path) -> list[Path]:
    return [path for directory in directories for path in sorted(directory.glob("*.safetensors"))]


def stage_table(figures: Mapping[str, Any]) -> str:
    """Return time and memory of each stage."""
    serve, compressed, uploads = figures["serve"], figures["compress"], figures["upload"]
    dropped, growth = figures["checkpoint_dropped"], f"+{_gb(_most(uploads, 'growth_bytes'))}"
    stages = {
        "reading the base's files": (figures["read_base"]["seconds"], ""),
        "compress, weights only": (_median(compressed, "seconds"), _gb(_most(compressed, "peak_bytes"))),
        "full checkpoint with safetensors, page cache dropped": (
            dropped["total_s"],
            _gb(dropped["peak_bytes"]),
        ),
    }
    if "checkpoint_warm" in figures:
        stages["the same, page cache warm"] = (figures["checkpoint_warm"]["total_s"], "")
    stages |= {
        "serve, first start to ready": (serve["ready_s"], _gb(serve["peak_bytes_at_start"])),
        "serve, later start to ready": (figures["serve_again"]["ready_s"], ""),
        "serve, with all slots filled and used": (None, _gb(serve["peak_bytes"])),
        "upload of one variant": (_median(uploads, "seconds"), growth),
        "`sha256sum` of the same file": (_median(uploads, "sha256sum_s"), ""),
        "plain copy of as many bytes": (figures["plain_copy_s"], ""),
    }
    for cache in ("dropped", "warm"):
        if loads := figures.get(f"load_{cache}"):
            stages[f"load of a variant, page cache {cache}"] = (_median(loads, "total"), "")
            first_token_s = _median(loads, "first_token_s")
            stages[f"first token of a cold variant, page cache {cache}"] = (first_token_s, "")
    stages["first token of a resident variant"] = (figures["first_token_resident_s"], "")
    if merge := figures.get("merge"):
        stages["merge to a stock checkpoint"] = (merge["seconds"], _gb(merge["peak_bytes"]))
    rows = [(stage, "" if spent is None else _s(spent), memory) for stage, (spent, memory) in stages.items()]
    return table(("stage", "seconds", "peak memory, GB"), rows)


RATES = {
    "streams": text("streams"),
    "base": fixed("base"),
    "one variant": fixed("one variant"),
    "all variants mixed": fixed("all variants"),
}


def likeness(figures: Mapping[str, Any]) -> str:
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


def fit_table(figures: Mapping[str, Any]) -> str:
    """Return the bounds of `--plan` and the measured figures of a fitted compress."""
    fit = figures["fit"]
    held_out = fit["fidelity"]["held_out"]
    rows = [
        ("minutes", "", f"{fit['seconds'] / 60:.1f}"),
        ("memory beyond the program's own, GB", _gb(fit["planned_bytes"]), ""),
        ("peak memory, GB", "", _gb(fit["peak_bytes"])),
        ("KL on held-out text", "", f"{held_out['kl']:.3g}"),
    ]
    return table((f"fitted to {fit['samples']} sequences", "planned", "measured"), rows)


def goals(figures: Mapping[str, Any]) -> list[Goal]:
    """Return the goals of a served model; the limit of the 8B's artifact holds for smaller models, too."""
    serve, compressed, uploads = figures["serve"], figures["compress"], figures["upload"]
    beside = serve["peak_bytes"] - sum(serve["memory"].values())
    load_s, checkpoint = _median(figures["load_dropped"], "total"), figures["checkpoint_dropped"]["total_s"]
    upload, checksum = _median(uploads, "seconds"), _median(uploads, "sha256sum_s")
    # The first upload starts the worker that checks uploads, which stays.
    growth = _most(uploads[1:], "growth_bytes")
    most_ready = 1.3 * figures["read_base"]["seconds"] + 20
    four = next(row for row in figures["tokens_per_s"] if row["streams"] == 4)
    slowest, largest = _median(compressed, "seconds"), _most(compressed, "peak_bytes")
    mixed = four["all variants"] / four["base"]
    return [
        at_most("artifact, GB", figures["artifact_bytes"] / 1e9, 1.02),
        at_most("load of a variant, dropped / plain copy", load_s / figures["plain_copy_s"], 2.5),
        at_least("full checkpoint / load of a variant, dropped", checkpoint / load_s, 10),
        at_most("upload / `sha256sum`", upload / checksum, 2),
        at_most("memory of an upload, MiB", growth / 2**20, 64),
        at_most("start to ready, s", serve["ready_s"], most_ready),
        at_most("peak of serve beside base, slots and KV cache, GB", beside / 1e9, 1.5),
        at_most("memory of compress, GB", largest / 1e9, 3),
        at_most("compress, minutes", slowest / 60, 10),
        at_least("4 streams: all variants mixed / base", mixed, 0.8),
    ]


def _median(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(median(row[key] for row in rows))


def _most(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(max(row[key] for row in rows))


def _s(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f}"


def report(args: Namespace) -> Report:
    args.dir.mkdir(parents=True, exist_ok=True)
    model = RealModel.of(args.model, args.layers)
    settings = {"model": model.name, "layers": model.config["num_hidden_layers"]}
    conditions = f"{model.name}, {model.num_weights / 1e9:.2f}B weights"
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="real-") as name:
        run = _run(args, model, Path(name))
        if args.fit:
            compress_fitted(run, args.samples)
            return Report(settings, run.figures, [fit_table(run.figures)], conditions=conditions)
        measure(run)
    settings |= {
        "weights": model.num_weights,
        "variants": args.variants,
        "new_tokens": args.new,
        "serve": list(run.flags),
        "statistic": "median",
    }
    table_of_rates = table_of(RATES, run.figures["tokens_per_s"])
    parts = [stage_table(run.figures), f"Tokens per second:\n\n{table_of_rates}", likeness(run.figures)]
    return Report(settings, run.figures, parts, goals(run.figures), conditions=conditions)


def measure(run: Run) -> None:
    """Run all stages, in the order of a variant's life."""
    read_files(run)
    compress(run)
    with started(run, "serve") as server:
        publish(run, server)
        load(run, server)
        rates(run, server)
    with started(run, "serve_again"):
        pass
    (compare_tokens if run.model.num_weights <= EXACT_WEIGHTS else compare_logits)(run)


def _run(args: Namespace, model: RealModel, directory: Path) -> Run:
    layers = "" if args.layers is None else f"-{args.layers}-layers"
    return Run(
        model=model,
        directory=directory,
        base=model.write_base(args.dir / f"{model.name}{layers}"),
        num_variants=args.variants,
        num_new=args.new,
        flags=("--kv-cache-gb", str(args.kv_cache_gb), "--max-host-cache-gb", "0", "--slot-headroom", "1.02"),
        dropped_only=model.num_weights > WARM_WEIGHTS,
    )


def _file(args: Namespace) -> str | None:
    return None if args.layers else f"real-{'fit-' if args.fit else ''}{args.model}.json"


CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peraxis" / "bench"
OPTIONS = (
    option("--model", choices=CONFIGS, required=True),
    option("--layers", None, "fewer layers than the model has; writes JSON only with --out", type=int),
    option("--variants", 4, choices=range(2, 1 + MAX_FINETUNES)),
    option("--new", 32, "tokens of each answer, where rates are measured"),
    option("--fit", False, "fit one delta to text instead, which takes long"),
    option("--samples", 32, "sequences to fit to"),
    option("--kv-cache-gb", 0.5),
    option(
        "--dir",
        CACHE,
        "where the base is kept, and what a run needs: three checkpoints at most (8B: 50 GB)",
        type=Path,
    ),
)
main = Bench("real", __doc__, report, OPTIONS, file=_file)

if __name__ == "__main__":
    sys.exit(main())
