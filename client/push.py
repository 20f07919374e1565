"""`peraxis push`: parse the options, hash the file, publish it, print the version."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from client.artifact_file import ArtifactFile
from client.http import RemoteServer, ServerAddress, parsed
from client.options import Json, takes_address
from client.output import print_reply
from client.publishing import ANSWER_S, Publishing, publish
from client.reference import check_new_name
from client.replies import UploadReply
from client.tenancy import tenant_of_admin
from deltastore.progress import byte_progress
from deltastore.quantities import size_text
from deltastore.tables import printable

app = typer.Typer(no_args_is_help=True)


@app.command()
@takes_address()
def push(
    address: ServerAddress,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The artifact.")],
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
    as_json: Json = False,
) -> None:
    """Publish an artifact as the next version of a variant.

    Example: peraxis push tuned.safetensors --name instruct

    A broken connection or a busy server is tried again. An artifact that the variant has already is not sent again.
    """
    # Refuse a name that cannot be one before the file is hashed.
    check_new_name(name)
    total = file.stat().st_size if file.is_file() else 0
    with byte_progress(total, f"digest of {file.name}", progress) as bar:
        artifact = ArtifactFile.read(file, bar.update)
    with RemoteServer(address, ANSWER_S) as server:
        content = publish(server, Publishing(artifact, name, activate, visibility), progress)
        owner = None if as_json else tenant_of_admin(server)
    reply = parsed(content, UploadReply)
    if as_json:
        print_reply(content)
        return
    state = "active" if reply.active else f"not active: `peraxis promote {name} {reply.version}` changes that"
    name = printable(reply.name if owner is None else f"{owner}/{reply.name}")
    print(f"{name}@{reply.version}  {size_text(reply.size_bytes)}  {printable(reply.digest)}  {state}")
