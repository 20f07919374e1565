"""The commands `compress`, `merge`, `eval` and `import`: parse options, make a config, call one function, print.

The options of `compress` are the fields of `config.py`. An error of a library function names its arguments in
backticks; a command turns these into flags.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from compressor.config import Calibration, CompressConfig, FitSettings, OptionField, config_of, options_of
from deltastore.console import flag_of, naming_flags, print_table, size_text
from deltastore.errors import UsageError, shown

if TYPE_CHECKING:
    from compressor.batch import Outcome
    from compressor.evaluation import Evaluation
    from compressor.fidelity import Fidelity
    from compressor.pipeline import CompressResult

OPTIONS: Mapping[str, OptionField] = {
    **options_of(CompressConfig),
    **options_of(FitSettings),
    **options_of(Calibration),
}
# The flags that do not have the name of their option.
OTHER_FLAGS = {name: field.option.flag for name, field in OPTIONS.items() if field.option.flag}
REQUIRED = [name for name, field in OPTIONS.items() if field.default is MISSING]
# Of a LoRA of as many bytes, in the table of `--all`.
RIVAL_COLUMNS = ("LORA KL", "LORA AGREEMENT", "LORA GAIN")
# The parameters that go together with `--all`.
BESIDE_ALL = frozenset({"all_of", "progress", "as_json"})
RECIPE_OF_SOLVER = {"lstsq": "ours", "adamw": "paper"}

Command = Callable[..., None]
app = typer.Typer(no_args_is_help=True)

Base = Annotated[
    str,
    typer.Option(
        "--base", metavar="DIR|HF_ID", help="The base: a directory or a hub id, as ORG/NAME or ORG/NAME@REV."
    ),
]
Progress = Annotated[bool, typer.Option("--progress/--no-progress", help="Show progress on stderr.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]


def names_flags(others: Mapping[str, str]) -> Callable[[Command], Command]:
    """Name flags in a command's errors, where library functions name arguments, and print the notes of errors.

    Args:
        others: the flags of arguments that have another name, by argument.
    """

    def decorate(command: Command) -> Command:
        @wraps(command)
        def called(**given: Any) -> None:
            with naming_flags({**{name: flag_of(name) for name in given}, **others}):
                command(**given)

        return called

    return decorate


def takes_options(command: Command) -> Command:
    """Give a command with `**options` the options of `compress`."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    named = [parameter for parameter in own if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters = [*(_parameter(name, field) for name, field in OPTIONS.items()), *named]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameter(name: str, field: OptionField) -> inspect.Parameter:
    flag, shows = OTHER_FLAGS.get(name, flag_of(name)), field.option
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if field.default is True else flag,
        help=shows.help,
        metavar=shows.metavar,
        rich_help_panel=shows.panel,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        # `--all` takes the place of the required ones.
        default=None if field.default is MISSING else field.default,
        annotation=Annotated[field.kind | None if field.default is MISSING else field.kind, option],
    )


@app.command()
@takes_options
@names_flags(OTHER_FLAGS)
def compress(
    *,
    context: typer.Context,
    solver: Annotated[
        Literal["lstsq", "adamw"] | None,
        typer.Option("--solver", hidden=True, help="The old name of --recipe."),
    ] = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Print the memory and disk that this would take at most, and do nothing."
        ),
    ] = False,
    all_of: Annotated[
        Path | None,
        typer.Option(
            "--all",
            metavar="FILE.toml",
            help="Make the deltas of all fine-tunes of one base that the file names, in place of --base, --finetune, "
            "--out and the other options. Given again, it goes on where it ended.",
        ),
    ] = None,
    progress: Progress = True,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Make a delta from a base and its fine-tune.

    Examples: peraxis compress --base BASE --finetune TUNED --out tuned.safetensors; peraxis compress --all tunes.toml
    """
    if all_of is not None:
        _refuse_beside_all(context)
        _compress_all(all_of, progress, as_json)
        return
    if missing := [flag_of(name) for name in REQUIRED if options[name] is None]:
        raise UsageError(
            f"{' and '.join(missing)} missing: give {', '.join(map(flag_of, REQUIRED))}, or --all FILE.toml"
        )
    if solver is not None:
        options["recipe"] = _recipe_of_solver(solver, context)
    config = config_of(**options, progress=progress)
    # Deferred, because importing torch takes seconds and `--help` needs none of it.
    from compressor.pipeline import compress as run
    from compressor.pipeline import plan as run_plan

    if plan:
        requirements = run_plan(config)
        if as_json:
            _print_json(requirements.as_json())
        else:
            print("\n".join(requirements.lines()))
        return
    result = run(config)
    if result.artifact_bytes > result.full_bytes:
        print(
            f"warning: {result.out}: {size_text(result.artifact_bytes)}, more than the fine-tune itself at 16 bits "
            f"({size_text(result.full_bytes)}), because tensors that are no matrices are stored whole",
            file=sys.stderr,
        )
    if not result.manifest.tensors:
        print(
            f"warning: {result.out}: the fine-tune's tensors are the base's, so this delta changes nothing: "
            "check --finetune and --base",
            file=sys.stderr,
        )
    if as_json:
        _print_json(result.as_json())
    else:
        _print_compressed(result)


@app.command()
@names_flags({})
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


def _refuse_beside_all(context: typer.Context) -> None:
    """Refuse flags that the file of `--all` has in their place."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in BESIDE_ALL and source is not None and source.name != "DEFAULT":
            flag = OTHER_FLAGS.get(name, flag_of(name))
            raise UsageError(f"{flag} does nothing beside --all: give it in the file, or leave it away")


def _compress_all(file: Path, progress: bool, as_json: bool) -> None:
    # Deferred, because importing torch takes seconds and `--help` needs none of it.
    from compressor.batch import compress_all, read_batch

    outcomes = compress_all(read_batch(file, progress))
    has_rivals = any(outcome.rival is not None for outcome in outcomes)
    if as_json:
        _print_json([outcome.as_json() for outcome in outcomes])
    else:
        print_table(
            [
                *("NAME", "STATE", "SIZE", "SMALLER", "KL", "AGREEMENT", "GAIN"),
                *(RIVAL_COLUMNS if has_rivals else ()),
                *("WEIGHT ERROR", "SECONDS", "FILE"),
            ],
            [_outcome_row(outcome, has_rivals) for outcome in outcomes],
        )
    if any(outcome.state == "failed" for outcome in outcomes):
        raise typer.Exit(1)


def _outcome_row(outcome: Outcome, has_rivals: bool) -> list[str]:
    # Deferred, because importing torch takes seconds and `--help` needs none of it.
    from compressor.rival import recovered_gain

    size, full, fidelity, rival = (
        outcome.artifact_bytes,
        outcome.full_bytes,
        outcome.fidelity,
        outcome.rival,
    )
    held_out = fidelity.get("held_out", {})
    gain = recovered_gain(held_out["kl"], fidelity["base"]["kl"]) if held_out else None
    of_rival = ["-"] * len(RIVAL_COLUMNS)
    if rival is not None:
        of_rival = [f"{rival['kl']:.3g}", f"{rival['agreement']:.2%}", _share(rival["kept"])]
    figures = [
        "-" if size is None else size_text(size),
        "-" if not size or full is None else f"{full / size:.2f}x",
        f"{held_out['kl']:.3g}" if held_out else "-",
        f"{held_out['agreement']:.2%}" if held_out else "-",
        _share(gain),
        *(of_rival if has_rivals else ()),
        f"{fidelity['weight_error']:.4f}" if "weight_error" in fidelity else "-",
        f"{outcome.seconds:.1f}",
    ]
    return [outcome.name, outcome.state, *figures, "-" if size is None else str(outcome.out)]


def _recipe_of_solver(solver: str, context: typer.Context) -> str:
    """Return the recipe that `--solver` asks for by its old name, and say its new one."""
    recipe, given = RECIPE_OF_SOLVER[solver], context.get_parameter_source("recipe")
    if given is not None and given.name != "DEFAULT":
        raise UsageError(f"--solver {solver} is the old name of --recipe {recipe}: give --recipe alone")
    print(f"--solver {solver} is now --recipe {recipe}", file=sys.stderr)
    return recipe


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
    if (rival := result.rival) is not None:
        print(
            f"a LoRA of as many bytes, of rank {rival.rank}: {rival.fidelity.agreement:.2%} of tokens as the "
            f"fine-tune, KL {rival.fidelity.kl:.3g}"
        )
    print(f"{result.seconds:.1f} s, peak memory {size_text(result.peak_memory_bytes)}")


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


@app.command("import")
@names_flags({})
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


@app.command("push-hub")
@names_flags({})
def push_hub(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The artifact, named NAME.safetensors.")],
    repo: Annotated[str, typer.Argument(metavar="ORG/REPO", help="The model repository of the hub.")],
    card: Annotated[
        Path | None,
        typer.Option(
            "--card",
            metavar="DIR",
            help="Take the model card that `peraxis compress --report DIR` wrote; by default one is made of the "
            "artifact alone, without continuations.",
        ),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(
            "--base-model",
            metavar="ORG/REPO",
            help="The base's id on the hub, for the card; by default the artifact's own, where that is one.",
        ),
    ] = None,
    create: Annotated[
        bool, typer.Option("--create", help="Make the repository if it is not there; it is private then.")
    ] = False,
    replace_card: Annotated[
        bool, typer.Option("--replace-card", help="Replace a README.md in it that is no card of a delta.")
    ] = False,
    progress: Progress = True,
    as_json: Json = False,
) -> None:
    """Upload a delta with its model card to a repository of the Hugging Face hub, in one commit.

    Example: peraxis push-hub tuned.safetensors ORG/REPO --base-model ORG/BASE

    The token is that of HF_TOKEN, or the one that `hf auth login` stored. A server takes the delta from there:
    peraxis push hf://ORG/REPO --name NAME
    """
    # Deferred, because importing torch takes seconds and `--help` needs none of it.
    from compressor.hub import HubPush
    from compressor.hub import push_hub as run

    pushed = run(HubPush(file, repo, card, base_model, create, replace_card, progress))
    if not pushed.has_card:
        print(
            f"note: {repo}: its README.md is no card of a delta and stays: --replace-card replaces it",
            file=sys.stderr,
        )
    if as_json:
        _print_json(pushed.as_json())
        return
    print(f"{pushed.url}  {size_text(pushed.size_bytes)}  sha256:{pushed.digest}")
    print(f"publish it on a server: peraxis push hf://{repo}@{pushed.commit}:{file.name} --name NAME")


@app.command("eval")
@names_flags({})
def evaluate(
    base: Annotated[
        str,
        typer.Option(
            "--base",
            metavar="DIR|HF_ID",
            help="The base: a directory or a hub id, as ORG/NAME or ORG/NAME@REV.",
        ),
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
            help="Text that the delta was not fitted to: a file of text or records, a data set of the hub, or text "
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
    rival: Annotated[
        Literal["lora"] | None,
        typer.Option(
            "--rival",
            help="Measure on the text, too, a LoRA with as many bytes, extracted from the weight differences by "
            "truncated SVD.",
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
    fine-tune's added rows; in tasks it is itself. Paths in a task file count from the working directory. The rival
    adapts every matrix that the delta codes, by one rank for all that fits the delta's bytes; bytes that are left give
    some matrices one rank more. Tensors that the delta stores whole are the same in both. Tasks are not run with it.
    """
    names = () if tasks is None else tuple(tasks.split(","))
    if not all(names):
        raise UsageError(f"--tasks {tasks!r}: give names or .yaml files with a comma between two")
    # Deferred, because importing torch takes seconds and `--help` needs none of it.
    from compressor.evaluation import EvalConfig
    from compressor.evaluation import evaluate as run

    result = run(EvalConfig(base, finetune, delta, text, samples, names, progress, rival))
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
        "gain recovered",
        *(_title(result, task) for task in result.scores),
    ]
    rows = [
        ["base", *_figures(result.base, 0.0 if result.base.kl else None), *_task_figures(result, "base")],
        [
            "fine-tune",
            "0",
            "100.00%",
            f"{result.delta.perplexity_finetune:.4g}",
            _share(1.0 if result.base.kl else None),
            *_task_figures(result, "finetune"),
        ],
        ["delta", *_figures(result.delta, result.kept), *_task_figures(result, "delta")],
    ]
    if (rival := result.rival) is not None:
        rows.append(["LoRA", *_figures(rival.fidelity, rival.kept), *["-"] * len(result.scores)])
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    yield from (_aligned(row, widths) for row in (head, *rows))
    yield ""
    if result.kept is not None:
        yield f"the delta goes {100 * result.kept:.2f}% of the way from base to fine-tune, by KL"
    if rival is not None:
        yield (
            f"the LoRA, by truncated SVD of {rival.num_adapted} matrices, has rank {rival.rank} "
            f"({rival.rank + 1} in {rival.num_raised}): {size_text(rival.size_bytes)}, the delta "
            f"{size_text(rival.artifact_bytes)}"
        )
    yield f"{result.num_sequences} sequences of text, {result.delta.num_tokens} tokens"
    if result.foreign:
        more = f" and {len(result.foreign) - 1} more" if len(result.foreign) > 1 else ""
        yield (
            f"note: tensor {shown(result.foreign[0])}{more} of the delta is not as in the fine-tune: "
            "was it made from another?"
        )


def _title(result: Evaluation, task: str) -> str:
    return f"{task} ({result.scores[task]['delta'].metric})"


def _figures(fidelity: Fidelity, kept: float | None) -> list[str]:
    figures = [f"{fidelity.kl:.4g}", f"{100 * fidelity.agreement:.2f}%", f"{fidelity.perplexity:.4g}"]
    return [*figures, _share(kept)]


def _share(kept: float | None) -> str:
    return "-" if kept is None else f"{100 * kept:.2f}%"


def _task_figures(result: Evaluation, model: str) -> list[str]:
    return [f"{scores[model].value:.4f}" for scores in result.scores.values()]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
