"""`peraxis doctor` without `--url`: parse the options, run every check, print the findings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from deltastore.diagnosis import has_failed, print_diagnoses

app = typer.Typer(add_completion=False)


@app.command()
def doctor(
    base: Annotated[
        Path | None,
        typer.Option("--base", metavar="DIR", envvar="PERAXIS_BASE", help="The base that is to be served."),
    ] = None,
    registry: Annotated[
        str | None,
        typer.Option(
            "--registry",
            metavar="DIR",
            envvar="PERAXIS_REGISTRY",
            help="The registry's directory, or s3://BUCKET/PREFIX.",
        ),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option("--device", envvar="PERAXIS_DEVICE", help="Device that is to hold the base."),
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        typer.Option("--dtype", envvar="PERAXIS_DTYPE", help="Type of the base's weights in memory."),
    ] = "auto",
    progress: Annotated[
        bool, typer.Option("--progress/--no-progress", help="Show progress on stderr.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
) -> None:
    """Check this machine, or a running server; exit with 1 if something is wrong.

    Examples: peraxis doctor --base BASE --registry REGISTRY; peraxis doctor --url http://host:8000

    Without --url, the settings of the planned server that are no option here are taken from the environment. With
    --url: does the server answer, is it ready, which version is it, and what may the key do.
    """
    # Deferred, because importing torch takes seconds and `--help` needs none of it.
    from server.doctor.examination import PlannedServer, examine

    diagnoses = examine(PlannedServer(base, registry, device, dtype), progress)
    print_diagnoses(diagnoses, as_json)
    if has_failed(diagnoses):
        raise typer.Exit(1)
