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

app = typer.Typer(add_completion=False)


@app.command()
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server running until Ctrl-C.")] = False,
    work: Annotated[
        Path | None, typer.Option(help="Directory of the trained models; by default in the user's cache.")
    ] = None,
) -> None:
    """Train a small base and three fine-tunes, compress, serve and ask them, and print the tables.

    Training takes a few minutes the first time; its models are found again afterwards.
    """
    began = time.monotonic()

    def progress(line: str) -> None:
        print(f"{time.monotonic() - began:4.0f} s  {line}", file=sys.stderr, flush=True)

    # The operations of models this small are short. OpenMP threads that spin between them, in the demo and its server,
    # multiply the processor time when other processes use the cores. OpenMP reads this when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    progress("importing torch and transformers")
    from transformers.utils.logging import disable_progress_bar

    from peraxis.demo import service, stages

    disable_progress_bar()
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
