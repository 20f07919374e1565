"""The command `peraxis import`: parse options, import one diff file, print the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from deltastore.quantities import size_text

app = typer.Typer(no_args_is_help=True)


@app.command("import")
def import_(
    kind: Annotated[
        Literal["bitdelta", "per-axis"],
        typer.Argument(
            metavar="bitdelta|per-axis",
            help="The code that saved the file: BitDelta's, or the per-axis paper's.",
        ),
    ],
    base: Annotated[
        Path, typer.Option("--base", metavar="DIR", help="The base that the delta was made from.")
    ],
    diff: Annotated[
        Path, typer.Option("--diff", metavar="FILE.pt", help="The delta, as torch.save wrote it.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE.safetensors", help="The artifact to write.")],
    finetune: Annotated[
        Path | None,
        typer.Option(
            "--finetune",
            metavar="DIR",
            help="The fine-tune, for its tokenizer, chat template, generation config and configuration; where its "
            "weights are there too, the delta's error is measured against them. Without it: the base's.",
        ),
    ] = None,
    progress: Annotated[
        bool, typer.Option("--progress/--no-progress", help="Show progress on stderr.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
) -> None:
    """Make a delta of a one-bit delta that BitDelta or the per-axis code saved. No code in the file runs.

    Its keys, for bitdelta: MODULE.mask, int32 of shape (in/32, out), bit i of word j being input 32j+i, and one number
    in MODULE.coeff. For per-axis: MODULE.mask_row with MODULE.coeff_row of length in, or MODULE.mask_col with
    MODULE.coeff_col of length out. Any other key is a whole parameter by its own name.

    Example: peraxis import bitdelta --base BASE --finetune TUNED --diff diff.pt --out tuned.safetensors
    """
    # Deferred, because importing torch takes seconds and `--help` needs none of it.
    from compressor.convert.importer import ImportConfig, import_diff

    result = import_diff(ImportConfig(kind, base, diff, out, finetune, progress))
    error = result.manifest.fidelity.get("weight_error")
    if as_json:
        print(json.dumps({**result.as_json(), "weight_error": error}, indent=2))
        return
    print(f"{result.out}  sha256:{result.digest}")
    print(
        f"{size_text(result.artifact_bytes)} against {size_text(result.full_bytes)} at 16 bits: "
        f"{result.ratio:.2f} times smaller"
    )
    num_changed = len(result.manifest.tensors)
    print(
        f"{num_changed} tensors changed, {result.num_unchanged} as in the base; method {result.manifest.method}"
    )
    if error is not None:
        print(f"weight error {error:.4f} of the difference's norm")
