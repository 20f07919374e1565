"""`peraxis demo`: parse, walk, print."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server running until Ctrl-C.")] = False,
    work: Annotated[
        Path | None, typer.Option(help="Where trained models are kept; by default the user's cache.")
    ] = None,
) -> None:
    """Train a tiny base and three fine-tunes, compress, serve and ask them, and print the table.

    Training takes a few minutes the first time and nothing afterwards.
    """
    from demo import service, walk

    models_dir = work or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peraxis" / "demo"
    models, standings = walk.train_all(models_dir, walk.to_stderr)
    with tempfile.TemporaryDirectory(prefix="peraxis-demo-") as scratch:
        made, registry = Path(scratch), Path(scratch) / "registry"
        deltas = walk.compress_all(models, made, walk.to_stderr)
        with service.running(models.base, registry, made / "server.log") as running:
            walk.serve_all(running, models, deltas, walk.to_stderr)
            cold, full = walk.cold_starts(running, models, deltas, registry)
            print(walk.report(standings, deltas))
            print()
            print(walk.cold_report(cold, full))
            print(f"\nThe server is at {running.url}. Try:\n")
            print("\n".join(walk.curl_lines(running.url, models)))
            if keep:
                walk.to_stderr("\nrunning until Ctrl-C")
                signal.pause()
