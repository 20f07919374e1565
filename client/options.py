"""The options that all commands of this package share. Must not import what only some of them need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_URL = "http://127.0.0.1:8000"
SERVER = "Server"

Url = Annotated[
    str,
    typer.Option(
        "--url", envvar="PERAXIS_URL", metavar="URL", help="The server's address.", rich_help_panel=SERVER
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        metavar="FILE",
        help="File with the API key; by default the key is taken from PERAXIS_API_KEY.",
        rich_help_panel=SERVER,
    ),
]
Tenant = Annotated[
    str | None,
    typer.Option(
        "--tenant", metavar="NAME", help="With an admin key: act for this tenant.", rich_help_panel=SERVER
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The variant.")]
Reference = Annotated[
    str, typer.Argument(metavar="NAME[@VERSION]", help="The variant; without a version, its active one.")
]
