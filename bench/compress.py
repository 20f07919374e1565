"""Measure the time and memory of `peraxis compress` against the size of the model.

Each pair is random weights of a Llama's shapes in bfloat16 with a random difference, compressed in a fresh process:
from weights alone, or, with --fit, fitted to text that the fine-tune writes itself, on smaller models with less text.
Beside what is measured stands the bound of `compress --plan`. Memory is what that process grows by after its imports,
at its peak. Files are read with `pread`, so the page cache is no part of it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.harness import Bench, Report, fixed, mb, option, table_of
from bench.process import memory_of, reset_peak
from bench.synthetic import LlamaShapes
from compressor.config import Calibration, CompressConfig, FitSettings, Method
from compressor.convert.merge import OutputTensor, split_into_shards, write_index, write_shard
from compressor.pipeline import compress, plan
from deltastore.architecture import architecture

SIZES = (
    LlamaShapes(num_layers=8, hidden=512, intermediate=1408, kv=128),
    LlamaShapes(num_layers=14, hidden=1024, intermediate=2816, kv=256),
    LlamaShapes(num_layers=22, kv=256),  # TinyLlama's 1.1B parameters
)
FITTED_SIZES = (
    LlamaShapes(num_layers=4, hidden=256, intermediate=704, kv=64, vocabulary=8000),
    LlamaShapes(num_layers=6, hidden=384, intermediate=1056, kv=128, vocabulary=8000),
    LlamaShapes(num_layers=8, hidden=512, intermediate=1408, kv=128, vocabulary=16000),
)
FITTED_SAMPLES = 32  # sequences; all costs but those of the weights are in proportion
SMALL = (LlamaShapes(num_layers=2, hidden=256, intermediate=704, kv=64, vocabulary=8000),)
WEIGHT_BYTES = 2
BLOCK_NUMEL = 1 << 22
COLUMNS = {
    "weights": lambda row: f"{row['weights'] / 1e6:.0f}M",
    "largest tensor, MB": mb("largest_tensor_bytes"),
    "seconds": fixed("seconds"),
    "peak growth, MB": mb("peak_growth_bytes"),
    "bound, MB": mb("bound_bytes"),
    "growth / largest tensor": fixed("growth_over_largest_tensor", 2),
    "artifact, MB": mb("artifact_bytes"),
}


def measure(shapes: LlamaShapes, method: Method, fit: bool, parent: Path | None) -> dict[str, Any]:
    """Write a pair, compress it in a fresh process, and remove it; return the row of its figures."""
    numels = [math.prod(shape) for _, shape in shapes.tensors()]
    with tempfile.TemporaryDirectory(dir=parent) as name:
        write_pair(Path(name), shapes)
        command = [sys.executable, "-m", "bench.compress", "--method", method, "--pair", name]
        command += ["--fit"] if fit else []
        figures = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    largest = WEIGHT_BYTES * max(numels)
    more = {"growth_over_largest_tensor": round(figures["peak_growth_bytes"] / largest, 3)}
    return {"weights": sum(numels), "largest_tensor_bytes": largest, **figures, **more}


def write_pair(directory: Path, shapes: LlamaShapes) -> None:
    """Write ``base`` and ``finetune``, sharded as transformers would."""
    config = {
        "model_type": "llama",
        "hidden_size": shapes.hidden,
        "intermediate_size": shapes.intermediate,
        "num_hidden_layers": shapes.num_layers,
        "num_attention_heads": shapes.hidden // 64,
        "num_key_value_heads": shapes.kv // 64,
        "vocab_size": shapes.vocabulary,
        "tie_word_embeddings": False,
    }
    shards = split_into_shards(OutputTensor(name, "BF16", shape) for name, shape in shapes.tensors())
    for model in ("base", "finetune"):
        (directory / model).mkdir()
        (directory / model / "config.json").write_text(json.dumps(config))
        base, tuning = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)

        def blocks(
            output: OutputTensor,
            base: torch.Generator = base,
            tuning: torch.Generator = tuning,
            model: str = model,
        ) -> Iterator[Tensor]:
            numel = math.prod(output.shape)
            for start in range(0, numel, BLOCK_NUMEL):
                block = torch.empty(min(BLOCK_NUMEL, numel - start)).normal_(std=0.02, generator=base)
                if model == "finetune":
                    block += torch.empty_like(block).normal_(std=0.002, generator=tuning)
                yield block.bfloat16()

        for shard in shards:
            write_shard(directory / model, shard, blocks, lambda _: None)
        write_index(directory / model, shards)


def compress_here(directory: Path, method: Method, fit: bool) -> dict[str, Any]:
    """Compress the pair in this process and measure its peak of memory; call it in a fresh process."""
    fit_settings = FitSettings(Calibration("self", FITTED_SAMPLES), device="cpu") if fit else None
    config = CompressConfig(
        str(directory / "base"),
        str(directory / "finetune"),
        directory / "delta",
        method,
        fit_settings=fit_settings,
    )
    needs = plan(config)
    # Imports what compressing imports.
    architecture(json.loads((directory / "base" / "config.json").read_text()))
    reset_peak(os.getpid())
    before, start = memory_of(os.getpid())["VmRSS"], time.perf_counter()
    result = compress(config)
    seconds = time.perf_counter() - start
    growth = memory_of(os.getpid())["VmHWM"] - before
    return {
        "seconds": round(seconds, 2),
        "peak_growth_bytes": growth,
        "artifact_bytes": result.artifact_bytes,
        "bound_bytes": needs.peak("host"),
    }


def report(args: Namespace) -> Report | None:
    if args.pair:
        print(json.dumps(compress_here(args.pair, args.method, args.fit)))
        return None
    sizes = SMALL if args.small else FITTED_SIZES if args.fit else SIZES
    results = [measure(shapes, args.method, args.fit, args.directory) for shapes in sizes]
    settings = {"method": args.method, "dtype": "bfloat16", "page_cache": "warm"}
    settings |= {"fitted_samples": FITTED_SAMPLES} if args.fit else {}
    how = f"fitted to {FITTED_SAMPLES} sequences" if args.fit else "weights alone"
    conditions = f"--method {args.method}, {how}, page cache warm"
    return Report(settings, results, [table_of(COLUMNS, results)], conditions=conditions)


OPTIONS = (
    option("--method", "both", choices=("scalar", "per-axis", "both")),
    option("--fit", False, "fit to text; writes compress-fit.json"),
    option("--pair", None, SUPPRESS, type=Path),
)
main = Bench(
    "compress",
    __doc__,
    report,
    OPTIONS,
    small="one pair of some megabytes",
    folder="for the pairs, of at most 4.5 GB",
    file=lambda args: "compress-fit.json" if args.fit else "compress.json",
)

if __name__ == "__main__":
    sys.exit(main())
