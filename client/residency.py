"""The commands that move variants in and out of slots: load, unload, pin and unpin."""

from __future__ import annotations

import typer

from client.http import RemoteServer, ServerAddress, parsed
from client.options import Json, Reference, print_reply, takes_address
from client.reference import parse_reference, path_of
from client.replies import StatusReply
from deltastore.tables import printable

app = typer.Typer(no_args_is_help=True)


def _add_command(action: str, summary: str, example: str) -> None:
    """Add the command that asks a server for an action on a version."""

    @app.command(action, help=f"{summary}\n\nExample: peraxis {action} {example}")
    @takes_address()
    def command(address: ServerAddress, reference: Reference, as_json: Json = False) -> None:
        _act(action, reference, address, as_json)


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


_add_command("load", "Load a variant into a slot before a request needs it.", "instruct")
_add_command("unload", "Free a variant's slot as soon as no request uses it.", "instruct@2")
_add_command("pin", "Load a variant into a slot and never evict it.", "instruct")
_add_command("unpin", "Allow the eviction of a pinned variant again.", "instruct")
