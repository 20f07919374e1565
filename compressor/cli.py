"""The commands `peraxis compress` and `peraxis merge`: options in, one call, the result out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from tqdm import tqdm

if TYPE_CHECKING:
    from compressor.pipeline import CompressResult

SEQUENCE_TOKENS = 192  # of calibration text; a block sees a few thousand tokens at a time

app = typer.Typer(no_args_is_help=True)

Base = Annotated[str, typer.Option("--base", metavar="DIR|HF_ID", help="The base: a directory or a hub id.")]
Progress = Annotated[bool, typer.Option("--progress/--no-progress", help="Show progress on stderr.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]


@app.command()
def compress(
    base: Base,
    finetune: Annotated[
        str, typer.Option("--finetune", metavar="DIR|HF_ID", help="The fine-tune: a directory or a hub id.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE.safetensors", help="The artifact to write.")],
    method: Annotated[
        Literal["scalar", "per-axis", "both"],
        typer.Option("--method", help="One scale; one per row or column; one per row and one per column."),
    ] = "both",
    calibration: Annotated[
        str,
        typer.Option(
            "--calibration",
            metavar="none|self|FILE|DATASET",
            help="Text to fit signs and scales on: sampled from the fine-tune itself, a .txt or .jsonl file, or a data "
            "set of the hub; 'none' fits the weights alone.",
        ),
    ] = "none",
    samples: Annotated[int, typer.Option("--samples", help="Sequences of calibration text.")] = 128,
    refine_signs: Annotated[
        bool,
        typer.Option("--refine-signs/--no-refine-signs", help="Choose signs by what they do to outputs."),
    ] = True,
    seed: Annotated[int, typer.Option("--seed", help="Of sampled calibration text.")] = 0,
    embeddings: Annotated[
        Literal["compress", "whole"],
        typer.Option("--embeddings", help="Embedding and output head at one bit, or as they are."),
    ] = "compress",
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Make a delta from a base and its fine-tune.

    Example: peraxis compress --base BASE --finetune TUNED --out tuned.safetensors
    """
    from compressor.calibration import Calibration  # imported when needed: torch takes seconds
    from compressor.pipeline import CompressConfig
    from compressor.pipeline import compress as run

    text = None if calibration == "none" else Calibration(calibration, samples, SEQUENCE_TOKENS, seed)
    result = run(CompressConfig(base, finetune, out, method, embeddings, progress, text, refine_signs))
    if as_json:
        _print_json(result.as_json())
        return
    _print_compressed(result)


@app.command()
def merge(
    base: Base,
    delta: Annotated[Path, typer.Option("--delta", metavar="FILE", help="The artifact.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The directory to make.")],
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option("--dtype", help="What to round to; the base's own by default."),
    ] = None,
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Add a delta to its base and write a stock Hugging Face checkpoint.

    Example: peraxis merge --base BASE --delta tuned.safetensors --out tuned-1bit
    """
    from compressor.merge import MergeConfig  # imported when needed: torch takes seconds
    from compressor.merge import merge as run

    result = run(MergeConfig(base, delta, out, dtype, progress))
    if as_json:
        _print_json(result.as_json())
        return
    print(f"{result.out}: {result.num_files} files of weights, {_size(result.size_bytes)} in {result.dtype}")


def _print_compressed(result: CompressResult) -> None:
    manifest = result.manifest
    errors = {name: spec.error for name, spec in manifest.tensors.items() if spec.error is not None}
    worst = max(errors, key=lambda name: errors[name], default=None)
    print(f"{result.out}  sha256:{result.digest}")
    print(
        f"{_size(result.artifact_bytes)} against {_size(result.full_bytes)} at 16 bits: "
        f"{result.ratio:.2f} times smaller"
    )
    print(
        f"{len(manifest.tensors)} tensors changed, {result.num_unchanged} as in the base; method {manifest.method}"
    )
    if worst is not None:
        print(
            f"weight error {manifest.fidelity['weight_error']:.4f} of the difference's norm, "
            f"at most {errors[worst]:.4f} ({worst})"
        )
    print(f"{result.seconds:.1f} s, peak memory {_size(result.peak_memory_bytes)}")


def _size(num_bytes: int) -> str:
    return tqdm.format_sizeof(num_bytes, "B")


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))
