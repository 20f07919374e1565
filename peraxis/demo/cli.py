"""The command `peraxis demo`: parse options, run the stages in order, print the tables."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from deltastore.errors import UsageError

OWN_PAIR = "Your own pair"

app = typer.Typer(add_completion=False)


@app.command()
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server running until Ctrl-C.")] = False,
    work: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory of the trained models, by default in the user's cache; with --base the directory that "
            "keeps the delta, by default ./peraxis-demo.",
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="DIR|HF_ID",
            help="Use your own base, a directory or a hub id, and train nothing; needs --finetune.",
            rich_help_panel=OWN_PAIR,
        ),
    ] = None,
    finetune: Annotated[
        str | None,
        typer.Option(
            "--finetune",
            metavar="DIR|HF_ID",
            help="Compress this fine-tune of --base: a directory or a hub id, of a checkpoint or a LoRA adapter.",
            rich_help_panel=OWN_PAIR,
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            metavar="TEXT",
            help="Ask this instead of three built-in prompts; repeatable.",
            rich_help_panel=OWN_PAIR,
        ),
    ] = None,
) -> None:
    """Train a small base and three fine-tunes, compress, serve and ask them, and print the tables.

    Training takes a few minutes the first time; its models are found again afterwards.

    With --base and --finetune, compress, serve and ask a pair of your own:
    peraxis demo --base ./base --finetune ./my-finetune
    """
    _check_pair_options(base, finetune, prompt)
    began = time.monotonic()

    def progress(line: str) -> None:
        print(f"{time.monotonic() - began:4.0f} s  {line}", file=sys.stderr, flush=True)

    # The operations of models this small are short. OpenMP threads that spin between them, in the demo and its server,
    # multiply the processor time when other processes use the cores. OpenMP reads this when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    progress("importing torch and transformers")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if base is not None and finetune is not None:
        from peraxis.demo.own_pair import OwnPair, try_pair

        try_pair(OwnPair(base, finetune, prompt or (), work or Path("peraxis-demo"), keep), progress)
        return
    from peraxis.demo import service, stages

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    models, scores = stages.train_all(work or cache / "peraxis" / "demo", progress)
    with tempfile.TemporaryDirectory(prefix="peraxis-demo-") as scratch:
        made, registry = Path(scratch), Path(scratch) / "registry"
        deltas = stages.compress_all(models, made, progress)
        with service.running(models.base, registry, made / "server.log", progress) as client:
            stages.serve_all(client, models, deltas, progress)
            cold, full = stages.cold_starts(client, models, deltas, registry, progress)
            print(stages.score_table(scores, deltas))
            print()
            print(stages.cold_start_table(cold, full))
            if keep:
                print(f"\nThe server is at {client.url}. Try:\n")
                print("\n".join(stages.curl_lines(client.url, models)))
                progress("running until Ctrl-C")
                signal.pause()
            else:
                print("\n`peraxis demo --keep` leaves the server running, and prints requests to try.")


def _check_pair_options(base: str | None, finetune: str | None, prompts: list[str] | None) -> None:
    if (base is None) != (finetune is None):
        raise UsageError(
            "--base and --finetune go together: give both, or neither to train the demo's own models"
        )
    if prompts and base is None:
        raise UsageError("--prompt is for a pair of your own: give --base and --finetune with it")
    if not all(text.strip() for text in prompts or ()):
        raise UsageError("--prompt is empty: give it a text, or leave it out")
