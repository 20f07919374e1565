"""Stages of the bench, from checkpoint to token. Each runs the commands of a user, and stores its figures."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.process import Server, module, peraxis, run, serve_command, serving
from bench.real.models import RealModel
from peraxis.demo.page_cache import drop

PROMPT = "def main(arguments):"
COPY_REPEATS = 5
RATE_REPEATS = 3
STREAMS = (1, 4, 16)

Figures = dict[str, Any]


@dataclass(slots=True)
class Bench:
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
        print(f"{time.strftime('%H:%M:%S')} {self.model.name}: {what}", file=sys.stderr, flush=True)


def compress(bench: Bench) -> None:
    """Make each fine-tune, compress it from weights alone, and delete it."""
    rows = []
    for number, artifact in enumerate(bench.artifacts, 1):
        finetune = bench.directory / f"finetune-{number}"
        bench.say(f"writing fine-tune {number}")
        bench.model.write_finetune(bench.base, finetune, number)
        drop(_files(bench.base, finetune))
        bench.say(f"compressing fine-tune {number}")
        ran = peraxis(
            "compress", "--base", bench.base, "--finetune", finetune, "--out", artifact, "--calibration", "none",
            "--json", "--no-progress", environment=bench.environment,
        )  # fmt: skip
        rows.append({"seconds": ran.seconds, "cpu_s": ran.cpu_s, "peak_bytes": ran.peak_bytes})
        if number == 1:
            bench.figures["artifact_bytes"] = artifact.stat().st_size
            bench.figures["weight_error"] = ran.result["fidelity"]["weight_error"]
            drop(_files(finetune))
            bench.say("loading the full checkpoint with safetensors")
            bench.figures["checkpoint_dropped"] = _checkpoint_load(finetune)
            if not bench.dropped_only:
                bench.figures["checkpoint_warm"] = _checkpoint_load(finetune)
        shutil.rmtree(finetune)
    bench.figures["compress"] = rows


def compress_fitted(bench: Bench, num_samples: int) -> None:
    """Compress one fine-tune, fitted to text that it generates, beside the bound on memory of `--plan`."""
    finetune = bench.model.write_finetune(bench.base, bench.directory / "finetune-1", 1)
    command = (
        "compress", "--base", bench.base, "--finetune", finetune, "--out", bench.artifacts[0], "--calibration", "self",
        "--samples", num_samples, "--json", "--no-progress",
    )  # fmt: skip
    plan = peraxis(*command, "--plan", environment=bench.environment).result
    bench.say(f"fitting to {num_samples} sequences")
    ran = peraxis(*command, environment=bench.environment)
    bench.figures["fit"] = {
        "samples": num_samples,
        "planned_bytes": plan["memory"]["host"]["bytes"],
        "seconds": ran.seconds,
        "cpu_s": ran.cpu_s,
        "peak_bytes": ran.peak_bytes,
        "artifact_bytes": bench.artifacts[0].stat().st_size,
        "fidelity": ran.result["fidelity"],
    }


def _checkpoint_load(directory: Path) -> Figures:
    ran = module("bench.real.checkpoint_load", directory)
    return {**ran.result, "peak_bytes": ran.peak_bytes}


def read_files(bench: Bench) -> None:
    """Read the base's files once, page cache dropped: the lower bound of a server's start."""
    drop(_files(bench.base))
    buffer, start, total = bytearray(4 << 20), time.perf_counter(), 0
    for path in _files(bench.base):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    bench.figures["read_base"] = {"seconds": time.perf_counter() - start, "bytes": total}


@contextmanager
def started(bench: Bench, name: str, dtype: str = "bfloat16") -> Iterator[Server]:
    """Start a server with the page cache dropped; store its time and memory in the figures under `name`."""
    drop(_files(bench.base))
    bench.say(f"starting a server in {dtype}")
    flags = ("--dtype", dtype, "--max-gpu-deltas", max(2, bench.num_variants), *bench.flags)
    command = serve_command(bench.base, bench.directory / "registry", *flags)
    with serving(command, bench.environment) as server:
        metrics = server.metrics()
        sizes = {
            kind: metrics[f'peraxis_device_memory_bytes{{kind="{kind}"}}'] for kind in ("base", "slots", "kv")
        }
        bench.figures[name] = {
            "ready_s": server.ready_s,
            "peak_bytes_at_start": server.peak.num_bytes,
            "resident_bytes": server.memory()["VmRSS"],
            "memory": sizes,
        }
        yield server
        bench.figures[name]["resident_bytes_at_end"] = server.memory()["VmRSS"]
        bench.figures[name]["peak_bytes"] = max(server.peak.highest, server.memory()["VmHWM"])


def publish(bench: Bench, server: Server) -> None:
    """Upload every artifact over HTTP, beside `sha256sum` of the same file."""
    rows = []
    for number, artifact in enumerate(bench.artifacts, 1):
        bench.say(f"uploading variant {number}")
        # Both find the file in the page cache.
        checksum = run(["sha256sum", artifact]).seconds
        before = server.memory()["VmRSS"]
        server.peak.restart()
        seconds = server.upload(f"v{number}", artifact)
        rows.append(
            {"seconds": seconds, "sha256sum_s": checksum, "growth_bytes": server.memory()["VmHWM"] - before}
        )
    bench.figures["upload"] = rows
    listed = server.client.get("/variants").json()["variants"]
    num_artifacts = len({version["digest"] for variant in listed for version in variant["versions"]})
    if num_artifacts != bench.num_variants:
        raise RuntimeError(f"{bench.num_variants} variants are {num_artifacts} different artifacts")


def load(bench: Bench, server: Server) -> None:
    """Time loads of variants that are not resident, page cache dropped and warm, and a plain copy of as many bytes."""
    for variant in _names(bench):
        # The first touch of a slot's memory is not the load's.
        server.generate(variant, PROMPT, 1)
    server.generate(None, PROMPT, 1)
    bench.figures["first_token_resident_s"] = median(
        server.generate("v1", f"{number} {PROMPT}", 1)["timings"]["ttft_s"] for number in range(5)
    )
    bench.figures["plain_copy_s"] = _plain_copy(bench.figures["artifact_bytes"])
    for cache in ("dropped",) if bench.dropped_only else ("dropped", "warm"):
        bench.say(f"loading variants, page cache {cache}")
        bench.figures[f"load_{cache}"] = [_cold_start(bench, server, name, cache) for name in _names(bench)]


def _cold_start(bench: Bench, server: Server, variant: str, cache: str) -> Figures:
    server.unload(variant)
    if cache == "dropped":
        drop(path for path in (bench.directory / "registry").rglob("*") if path.is_file())
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
    times = []
    for _ in range(COPY_REPEATS):
        start = time.perf_counter()
        source.clone()
        times.append(time.perf_counter() - start)
    return median(times)


def rates(bench: Bench, server: Server) -> None:
    """Measure tokens per second of the base, of one variant and of all variants mixed, in turns."""
    subjects: dict[str, list[str | None]] = {
        "base": [None],
        "one variant": ["v1"],
        "all variants": list(_names(bench)),
    }
    rows = []
    for streams in STREAMS:
        bench.say(f"generating with {streams} streams")
        times: dict[str, list[float]] = {name: [] for name in subjects}
        for turn in range(RATE_REPEATS):
            for name, variants in subjects.items():
                times[name].append(_answered(bench, server, variants, streams, turn))
        rows.append(
            {
                "streams": streams,
                **{name: streams * bench.num_new / median(seconds) for name, seconds in times.items()},
            }
        )
    bench.figures["tokens_per_s"] = rows


def _answered(bench: Bench, server: Server, variants: Sequence[str | None], streams: int, turn: int) -> float:
    """Send several requests at once; return the seconds until all are answered."""

    def ask(number: int) -> dict[str, Any]:
        # Prompts differ from their beginning, so that no prefix is found.
        return server.generate(
            variants[number % len(variants)], f"{turn}{number}{streams} {PROMPT}", bench.num_new
        )

    with ThreadPoolExecutor(streams) as threads:
        start = time.perf_counter()
        replies = list(threads.map(ask, range(streams)))
        seconds = time.perf_counter() - start
    if any(len(reply["outputs"][0]["token_ids"]) != bench.num_new for reply in replies):
        raise RuntimeError(f"an answer is shorter than {bench.num_new} tokens")
    return seconds


def compare_tokens(bench: Bench, num_new: int = 16) -> None:
    """Compare greedy tokens of all variants and the base in one batch with `generate()` on merged checkpoints."""
    with started(bench, "serve_float32", "float32") as server:
        names = [None, *_names(bench)]
        with ThreadPoolExecutor(len(names)) as threads:
            replies = list(threads.map(lambda name: server.generate(name, PROMPT, num_new), names))
    served = [reply["outputs"][0]["token_ids"] for reply in replies]
    expected = [_generated(bench.base, num_new)]
    for number, artifact in enumerate(bench.artifacts, 1):
        bench.say(f"merging variant {number}")
        merged = bench.directory / "merged"
        peraxis(
            "merge", "--base", bench.base, "--delta", artifact, "--out", merged, "--dtype", "float32", "--no-progress",
            environment=bench.environment,
        )  # fmt: skip
        expected.append(_generated(merged, num_new))
        shutil.rmtree(merged)
    matches = [one == other for one, other in zip(served, expected, strict=True)]
    bench.figures["exact"] = {"sequences": len(matches), "tokens_each": num_new, "equal": sum(matches)}
    bench.figures["exact"]["distinct_answers"] = len({tuple(ids) for ids in served})


def _generated(checkpoint: Path, num_new: int) -> list[int]:
    ids: list[int] = module("bench.real.oracle", checkpoint, "--prompt", PROMPT, "--num-new", num_new).result[
        "token_ids"
    ]
    return ids


def compare_logits(bench: Bench) -> None:
    """Measure the KL of the first variant's logits, served in bfloat16, to those of its merged checkpoint."""
    merged, artifact = bench.directory / "merged", bench.artifacts[0]
    outputs = {name: bench.directory / f"{name}.pt" for name in ("variant", "base", "merged")}
    drop(_files(bench.base))
    bench.say("merging variant 1")
    ran = peraxis(
        "merge", "--base", bench.base, "--delta", artifact, "--out", merged, "--json", "--no-progress",
        environment=bench.environment,
    )  # fmt: skip
    size = sum(path.stat().st_size for path in _files(merged))
    bench.figures["merge"] = {"seconds": ran.seconds, "peak_bytes": ran.peak_bytes, "bytes": size}
    bench.say("comparing logits")
    module("bench.real.oracle", merged, "--dtype", "bfloat16", "--logits", outputs["merged"])
    shutil.rmtree(merged)
    module(
        "bench.real.served_logits",
        bench.base,
        artifact,
        "--variant-out",
        outputs["variant"],
        "--base-out",
        outputs["base"],
    )
    logits = {name: torch.load(path).log_softmax(-1) for name, path in outputs.items()}
    bench.figures["logits"] = {
        "kl": _kl(logits["merged"], logits["variant"]),
        "kl_of_base": _kl(logits["merged"], logits["base"]),
        "same_likeliest": float((logits["merged"].argmax(-1) == logits["variant"].argmax(-1)).float().mean()),
    }


def _kl(expected: torch.Tensor, found: torch.Tensor) -> float:
    return float((expected.exp() * (expected - found)).sum(-1).mean())


def _names(bench: Bench) -> list[str]:
    return [f"v{number}" for number in range(1, bench.num_variants + 1)]


def _files(*directories: Path) -> list[Path]:
    return [path for directory in directories for path in sorted(directory.glob("*.safetensors"))]
