"""`python -m monitoring`: write every file of dashboards and alerts; with `--check`, only compare and report."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from monitoring.check import problems
from monitoring.files import ROOT, expressions, files
from monitoring.known import known_series


def main(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit with 1 if a file is old.")
    ] = False,
) -> None:
    """Write dashboards and alerts, or check them against this source and against the server's metrics."""
    known = known_series()
    found = [f"{name}: {each}" for name, text in expressions() for each in problems(text, known)]
    for path, text in files().items():
        file = ROOT / path
        if not check:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        elif not file.is_file() or file.read_text() != text:
            found.append(f"{path} is not what the source says: run `make monitoring`")
    for each in found:
        print(each, file=sys.stderr)
    raise typer.Exit(1 if found else 0)


if __name__ == "__main__":
    typer.run(main)
