"""`peraxis push`: publish an artifact of a disk or a hub."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from rich.markup import escape

from client.client import Client
from client.http import ServerAddress
from client.options import Json, Wait, print_json, print_line, takes_address
from client.publishing import HUB_FORM
from deltastore.console import printable, size_text

app = typer.Typer(no_args_is_help=True)


@app.command()
@takes_address()
def push(
    address: ServerAddress,
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help=f"The artifact: a file, or {escape(HUB_FORM)} of the Hugging Face hub."
        ),
    ],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="The variant to publish it as.")],
    activate: Annotated[
        bool, typer.Option("--activate/--no-activate", help="Make the new version the active one.")
    ] = True,
    visibility: Annotated[
        Literal["private", "public"] | None,
        typer.Option(
            "--visibility", help="Whether other tenants may use it; by default as it is, and private if new."
        ),
    ] = None,
    progress: Annotated[
        bool, typer.Option("--progress/--no-progress", help="Show progress on stderr.")
    ] = True,
    wait_s: Wait = None,
    as_json: Json = False,
) -> None:
    """Publish an artifact as the next version of a variant.

    Examples: peraxis push tuned.safetensors --name instruct; peraxis push hf://ORG/REPO --name instruct

    A broken connection is tried again, and a server that is starting or busy is waited for. An artifact that the
    variant has already is not sent again. A hub's file is kept in huggingface_hub's cache; private ones need
    `hf auth login`.
    """
    with Client.at(address, wait_s, print_line) as client:
        reply = client.push(source, name, activate=activate, visibility=visibility, progress=progress)
        owner = None if as_json else client.acting_tenant(only_admins=True)
    if as_json:
        print_json(reply.as_json())
        return
    state = "active" if reply.active else f"not active: `peraxis promote {name} {reply.version}` changes that"
    name = printable(reply.name if owner is None else f"{owner}/{reply.name}")
    print(f"{name}@{reply.version}  {size_text(reply.size_bytes)}  {printable(reply.digest)}  {state}")
