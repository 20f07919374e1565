"""The commands `compress`, `merge`, `eval` and `import`: parse options, make a config, call one function, print."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from tqdm import tqdm

from deltastore.console import size_text
from deltastore.errors import UsageError, shown

if TYPE_CHECKING:
    from compressor.evaluate.evaluation import Evaluation
    from compressor.evaluate.fidelity import Fidelity
    from compressor.fit.shapes import MemoryItem
    from compressor.pipeline import CompressResult
    from compressor.planning import Requirements

SAMPLES, PAPER_RATE = 256, 1e-4
# Defaults of the options that calibration text needs, that lstsq reads and that adamw reads.
TEXT_OPTIONS = {"--samples": SAMPLES, "--seed": 0, "--distill-epochs": None, "--resume": False}
LSTSQ_OPTIONS = {"--no-refine-signs": True, "--no-learn-signs": True}
ADAMW_OPTIONS = {"--rate": PAPER_RATE, "--cosine": False, "--axis-loss": "layer", "--with-scalar": False}
FITTING, PAPER = "Fitting to text", "The paper's recipe"

app = typer.Typer(no_args_is_help=True)

Base = Annotated[str, typer.Option("--base", metavar="DIR|HF_ID", help="The base: a directory or a hub id.")]
Progress = Annotated[bool, typer.Option("--progress/--no-progress", help="Show progress on stderr.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]


@app.command()
def compress(
    base: Base,
    finetune: Annotated[
        str,
        typer.Option(
            "--finetune",
            metavar="DIR|HF_ID",
            help="The fine-tune: a directory or a hub id, of a checkpoint or a LoRA adapter.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE.safetensors", help="The artifact to write.")],
    method: Annotated[
        Literal["scalar", "per-axis", "both"],
        typer.Option(
            "--method",
            help="Scales of each matrix: a single one; one per row or column; or one per row and one per column.",
        ),
    ] = "both",
    embeddings: Annotated[
        Literal["compress", "whole"],
        typer.Option(
            "--embeddings", help="Code embedding and output head at one bit, or store them as they are."
        ),
    ] = "compress",
    budget: Annotated[
        float,
        typer.Option(
            "--budget",
            help="Size as a multiple of one bit per weight; 1.10 adds 10%, spent where it gains most.",
        ),
    ] = 1.0,
    calibration: Annotated[
        str,
        typer.Option(
            "--calibration",
            metavar="self|none|FILE|DATASET",
            help="Text to fit to: sampled from the fine-tune itself, a .txt or .jsonl file, or a data set of the hub; "
            "'none' fits the weights alone.",
            rich_help_panel=FITTING,
        ),
    ] = "self",
    samples: Annotated[
        int,
        typer.Option(
            "--samples",
            help="Number of sequences of calibration text; a tenth is held out.",
            rich_help_panel=FITTING,
        ),
    ] = SAMPLES,
    seed: Annotated[
        int, typer.Option("--seed", help="Seed for sampling calibration text.", rich_help_panel=FITTING)
    ] = 0,
    refine_signs: Annotated[
        bool,
        typer.Option(
            "--refine-signs/--no-refine-signs",
            help="Choose signs by what they do to a layer's output.",
            rich_help_panel=FITTING,
        ),
    ] = True,
    distill_epochs: Annotated[
        int | None,
        typer.Option(
            "--distill-epochs",
            help="Passes over the text that train the delta end to end; 0 trains nothing. By default 3; with adamw 5, "
            "or 1 for scalar.",
            rich_help_panel=FITTING,
        ),
    ] = None,
    learn_signs: Annotated[
        bool,
        typer.Option(
            "--learn-signs/--no-learn-signs",
            help="Let signs move end to end, at two bytes of host memory each.",
            rich_help_panel=FITTING,
        ),
    ] = True,
    solver: Annotated[
        Literal["lstsq", "adamw"],
        typer.Option(
            "--solver",
            help="Fit by least squares and KL distillation, or by AdamW: as the paper does with --method per-axis, as "
            "BitDelta does with scalar.",
            rich_help_panel=PAPER,
        ),
    ] = "lstsq",
    rate: Annotated[
        float, typer.Option("--rate", help="Learning rate of adamw.", rich_help_panel=PAPER)
    ] = PAPER_RATE,
    cosine: Annotated[
        bool,
        typer.Option(
            "--cosine",
            help="Lower the rate along a cosine in the stage that fits layers.",
            rich_help_panel=PAPER,
        ),
    ] = False,
    axis_loss: Annotated[
        Literal["layer", "end"],
        typer.Option(
            "--axis-loss",
            help="Loss that chooses the axis of a matrix: that of its layer's output, or of the whole model's.",
            rich_help_panel=PAPER,
        ),
    ] = "layer",
    with_scalar: Annotated[
        bool,
        typer.Option("--with-scalar", help="Try a single scale for each matrix, too.", rich_help_panel=PAPER),
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="DIR",
            help="Write a model card (README.md) and its figures there; needs the extra 'report'.",
        ),
    ] = None,
    min_agreement: Annotated[
        float | None,
        typer.Option(
            "--min-agreement",
            help="Fail, and write nothing, if fewer held-out tokens than this share (0 to 1) come out the same.",
        ),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Device to fit on.")
    ] = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where an interrupted run for the same --out ended.")
    ] = False,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Print the memory, time and disk that this would take, and do nothing."),
    ] = False,
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Make a delta from a base and its fine-tune.

    Example: peraxis compress --base BASE --finetune TUNED --out tuned.safetensors
    """
    values = {
        "--samples": samples,
        "--seed": seed,
        "--distill-epochs": distill_epochs,
        "--resume": resume,
        "--no-refine-signs": refine_signs,
        "--no-learn-signs": learn_signs,
        "--rate": rate,
        "--cosine": cosine,
        "--axis-loss": axis_loss,
        "--with-scalar": with_scalar,
    }
    _check_options(calibration, solver, budget, values)
    # Deferred, because importing torch takes seconds and `--help` needs none of it.
    from compressor.config import CompressConfig
    from compressor.fit.calibration import Calibration
    from compressor.fit.fit_settings import FitSettings
    from compressor.pipeline import compress as run
    from compressor.pipeline import plan as run_plan

    fit_settings = None
    if calibration != "none":
        fit_settings = FitSettings(
            Calibration(calibration, samples, seed=seed),
            solver=solver,
            refine_signs=refine_signs,
            learn_signs=learn_signs,
            distill_epochs=distill_epochs,
            budget=budget,
            device=device,
            rate=rate,
            cosine=cosine,
            axis_loss=axis_loss,
            with_scalar=with_scalar,
        )
    config = CompressConfig(
        base, finetune, out, method, embeddings, progress, fit_settings, min_agreement, resume, report
    )
    if plan:
        requirements = run_plan(config)
        if as_json:
            _print_json(_plan_json(requirements))
        else:
            print("\n".join(_plan_lines(requirements)))
        return
    try:
        result = run(config)
    except BaseException as error:
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr)
        raise
    if result.artifact_bytes > result.full_bytes:
        print(
            f"warning: {out}: {size_text(result.artifact_bytes)}, more than the fine-tune itself at 16 bits "
            f"({size_text(result.full_bytes)}), because tensors that are no matrices are stored whole",
            file=sys.stderr,
        )
    if not result.manifest.tensors:
        print(
            f"warning: {out}: the fine-tune's tensors are the base's, so this delta changes nothing: "
            "check --finetune and --base",
            file=sys.stderr,
        )
    if as_json:
        _print_json(result.as_json())
    else:
        _print_compressed(result)


@app.command()
def merge(
    base: Base,
    delta: Annotated[Path, typer.Option("--delta", metavar="FILE", help="The artifact.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The directory to make.")],
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option("--dtype", help="Type to round weights to; by default the base's own."),
    ] = None,
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Add a delta to its base and write a stock Hugging Face checkpoint.

    Example: peraxis merge --base BASE --delta tuned.safetensors --out tuned-1bit
    """
    # Deferred, because importing torch takes seconds and `--help` needs none of it.
    from compressor.convert.merge import MergeConfig
    from compressor.convert.merge import merge as run

    result = run(MergeConfig(base, delta, out, dtype, progress))
    if as_json:
        _print_json(result.as_json())
        return
    print(
        f"{result.out}: {result.num_files} files of weights, {size_text(result.size_bytes)} in {result.dtype}"
    )


def _check_options(calibration: str, solver: str, budget: float, values: Mapping[str, object]) -> None:
    """Refuse options that would have no effect, instead of ignoring them."""
    defaults: dict[str, object] = {**TEXT_OPTIONS, **LSTSQ_OPTIONS, **ADAMW_OPTIONS}
    given = [option for option, default in defaults.items() if values[option] != default]
    if calibration == "none":
        if budget != 1.0 or solver != "lstsq":
            raise UsageError(
                "--budget and --solver adamw need calibration text: give --calibration self or a file"
            )
        if given:
            raise UsageError(
                f"{given[0]} does nothing without calibration text: give --calibration self or a file"
            )
        return
    unread, reader = (ADAMW_OPTIONS, "adamw") if solver == "lstsq" else (LSTSQ_OPTIONS, "lstsq")
    if idle := [option for option in given if option in unread]:
        raise UsageError(f"{idle[0]} does nothing with the other solver: give --solver {reader} with it")


def _plan_json(requirements: Requirements) -> dict[str, Any]:
    """Return totals and every stage with its parts, in bytes and seconds."""
    kinds = requirements.memory_kinds
    return {
        "memory": {
            where: {
                "bytes": requirements.peak(where),
                "least_bytes": requirements.peak(where, least=True),
                "free_bytes": requirements.free[where],
            }
            for where in kinds
        },
        "disk": {"bytes": requirements.disk_bytes, "free_bytes": requirements.free["disk"]},
        "seconds": round(sum(requirements.seconds), 1),
        "stages": [
            {
                "name": stage.name,
                "seconds": round(seconds, 1),
                **{f"{where}_bytes": stage.num_bytes(where) for where in kinds},
                "parts": [_item_as_json(item) for item in stage.items],
            }
            for stage, seconds in zip(requirements.stages, requirements.seconds, strict=True)
        ],
    }


def _plan_lines(requirements: Requirements) -> Iterator[str]:
    """Yield totals, and then each stage with its parts, the largest first."""
    kinds, free = requirements.memory_kinds, requirements.free
    for where in kinds:
        yield (
            f"{where} memory: {size_text(requirements.peak(where))} at most, "
            f"{size_text(requirements.peak(where, least=True))} at least; {size_text(free[where])} are free"
        )
    yield f"disk: {size_text(requirements.disk_bytes)} beside --out at most; {size_text(free['disk'])} are free"
    yield f"time: about {tqdm.format_interval(sum(requirements.seconds))}"
    for stage, seconds in zip(requirements.stages, requirements.seconds, strict=True):
        sizes = ", ".join(f"{size_text(stage.num_bytes(where))} of {where} memory" for where in kinds)
        yield f"{stage.name}: {tqdm.format_interval(seconds)}, {sizes}"
        for item in sorted(stage.items, key=lambda item: -item.num_bytes):
            suffix = "" if item.where == "host" else " (device)"
            yield f"  {size_text(item.num_bytes):>8}  {item.what}{suffix}"


def _item_as_json(item: MemoryItem) -> dict[str, Any]:
    least = item.num_bytes if item.least_bytes is None else item.least_bytes
    return {"what": item.what, "where": item.where, "bytes": item.num_bytes, "least_bytes": least}


def _print_compressed(result: CompressResult) -> None:
    manifest = result.manifest
    errors = {name: spec.error for name, spec in manifest.tensors.items() if spec.error is not None}
    worst = max(errors, key=lambda name: errors[name], default=None)
    print(f"{result.out}  sha256:{result.digest}")
    print(
        f"{size_text(result.artifact_bytes)} against {size_text(result.full_bytes)} at 16 bits: "
        f"{result.ratio:.2f} times smaller"
    )
    print(
        f"{len(manifest.tensors)} tensors changed, {result.num_unchanged} as in the base; method {manifest.method}"
    )
    # Figures on held-out text say more, and fitting to text raises the weight error.
    if worst is not None and "held_out" not in manifest.fidelity:
        print(
            f"weight error {manifest.fidelity['weight_error']:.4f} of the difference's norm, "
            f"at most {errors[worst]:.4f} ({worst})"
        )
    if (held_out := manifest.fidelity.get("held_out")) is not None:
        print(
            f"on held-out text: {held_out['agreement']:.2%} of tokens as the fine-tune, KL {held_out['kl']:.3g} "
            f"(the base's {manifest.fidelity['base']['kl']:.3g}), perplexity {held_out['perplexity']:.4g} "
            f"(the fine-tune's {held_out['perplexity_finetune']:.4g})"
        )
    print(f"{result.seconds:.1f} s, peak memory {size_text(result.peak_memory_bytes)}")


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


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


@app.command("eval")
def evaluate(
    base: Annotated[
        str, typer.Option("--base", metavar="DIR|HF_ID", help="The base: a directory or a hub id.")
    ],
    finetune: Annotated[
        str,
        typer.Option("--finetune", metavar="DIR|HF_ID", help="The fine-tune that the delta was made from."),
    ],
    delta: Annotated[Path, typer.Option("--delta", metavar="FILE", help="The artifact.")],
    text: Annotated[
        str,
        typer.Option(
            "--text",
            metavar="FILE|self|DATASET",
            help="Text that the delta was not fitted to: a .txt or .jsonl file, a data set of the hub, or text "
            "sampled from the fine-tune.",
        ),
    ],
    samples: Annotated[int, typer.Option("--samples", min=1, help="Number of sequences of text.")] = 128,
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            metavar="NAME,...|FILE.yaml",
            help="Tasks of lm-evaluation-harness to run zero-shot; 'paper' runs the five of the paper.",
        ),
    ] = None,
    progress: Annotated[
        bool, typer.Option("--progress/--no-progress", help="Show progress on stderr.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
) -> None:
    """Measure how near a delta is to its fine-tune, beside how near the base is.

    Example: peraxis eval --base BASE --finetune TUNED --delta tuned.safetensors --text held-out.txt --tasks paper

    KL(fine-tune || model) is in nats per token, agreement the share of tokens whose most likely next one is the same,
    both over the fine-tune's whole vocabulary. Where that is longer than the base's, the base is measured with the
    fine-tune's added rows; in tasks it is itself. Paths in a task file count from the working directory.
    """
    names = () if tasks is None else tuple(tasks.split(","))
    if not all(names):
        raise UsageError(f"--tasks {tasks!r}: give names or .yaml files with a comma between two")
    # Deferred, because importing torch takes seconds and `--help` needs none of it.
    from compressor.evaluate.evaluation import EvalConfig
    from compressor.evaluate.evaluation import evaluate as run

    result = run(EvalConfig(base, finetune, delta, text, samples, names, progress))
    if as_json:
        print(json.dumps(result.as_json(), indent=2))
        return
    print("\n".join(_lines(result)))


def _lines(result: Evaluation) -> Iterator[str]:
    head = [
        "",
        "KL to fine-tune",
        "agreement",
        "perplexity",
        *(_title(result, task) for task in result.scores),
    ]
    rows = [
        ["base", *_figures(result.base), *_task_figures(result, "base")],
        [
            "fine-tune",
            "0",
            "100.00%",
            f"{result.delta.perplexity_finetune:.4g}",
            *_task_figures(result, "finetune"),
        ],
        ["delta", *_figures(result.delta), *_task_figures(result, "delta")],
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    yield from (_aligned(row, widths) for row in (head, *rows))
    yield ""
    if result.kept is not None:
        yield f"the delta goes {100 * result.kept:.2f}% of the way from base to fine-tune, by KL"
    yield f"{result.num_sequences} sequences of text, {result.delta.num_tokens} tokens"
    if result.foreign:
        more = f" and {len(result.foreign) - 1} more" if len(result.foreign) > 1 else ""
        yield (
            f"note: tensor {shown(result.foreign[0])}{more} of the delta is not as in the fine-tune: "
            "was it made from another?"
        )


def _title(result: Evaluation, task: str) -> str:
    return f"{task} ({result.scores[task]['delta'].metric})"


def _figures(fidelity: Fidelity) -> list[str]:
    return [f"{fidelity.kl:.4g}", f"{100 * fidelity.agreement:.2f}%", f"{fidelity.perplexity:.4g}"]


def _task_figures(result: Evaluation, model: str) -> list[str]:
    return [f"{scores[model].value:.4f}" for scores in result.scores.values()]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
