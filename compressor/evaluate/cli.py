"""The command `peraxis eval`: parse options, evaluate one delta, print a table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltastore.errors import UsageError, shown

# For types alone, because importing torch takes seconds and `--help` needs none of it.
if TYPE_CHECKING:
    from compressor.evaluate.evaluation import Evaluation
    from compressor.evaluate.fidelity import Fidelity

app = typer.Typer(no_args_is_help=True)


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
