"""The commands that move variants in and out of slots: load, unload, pin and unpin."""

from __future__ import annotations

import typer

from client.http import RemoteServer, ServerAddress, parsed
from client.options import DEFAULT_URL, Json, KeyFile, Reference, Tenant, Url
from client.output import print_reply
from client.reference import parse_reference, path_of
from client.replies import StatusReply
from deltastore.tables import printable

app = typer.Typer(no_args_is_help=True)


@app.command()
def load(
    reference: Reference,
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """Load a variant into a slot before a request needs it.

    Example: peraxis load instruct
    """
    _act("load", reference, ServerAddress.of(url, key_file, tenant), as_json)


@app.command()
def unload(
    reference: Reference,
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """Free a variant's slot as soon as no request uses it.

    Example: peraxis unload instruct@2
    """
    _act("unload", reference, ServerAddress.of(url, key_file, tenant), as_json)


@app.command()
def pin(
    reference: Reference,
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """Load a variant into a slot and never evict it.

    Example: peraxis pin instruct
    """
    _act("pin", reference, ServerAddress.of(url, key_file, tenant), as_json)


@app.command()
def unpin(
    reference: Reference,
    url: Url = DEFAULT_URL,
    key_file: KeyFile = None,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """Allow the eviction of a pinned variant again.

    Example: peraxis unpin instruct
    """
    _act("unpin", reference, ServerAddress.of(url, key_file, tenant), as_json)


def _act(action: str, reference: str, address: ServerAddress, as_json: bool) -> None:
    """Ask the server to load, unload, pin or unpin a version, and print the state that it answers."""
    name, params = parse_reference(reference)
    with RemoteServer(address) as server:
        content = server.call("POST", f"{path_of(name)}/{action}", params=params)
    status = parsed(content, StatusReply)
    if as_json:
        print_reply(content)
        return
    pinned = ", pinned" if status.pinned else ""
    print(f"{printable(status.name)}@{status.version}: now on level {printable(status.level)}{pinned}")
