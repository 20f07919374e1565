"""`peraxis doctor --url`: whether a server answers and is ready, its version, and what the key may do."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from typing import Annotated

import typer

from client.client import Client
from client.http import NoAnswer, ServerAddress, ServerRefused
from client.options import SHARED_FLAGS, Json, KeyFile
from deltastore.console import (
    Diagnosis,
    diagnose,
    has_failed,
    naming_flags,
    print_diagnoses,
    printable,
    with_flags,
)
from deltastore.errors import PeraxisError, UsageError

app = typer.Typer(no_args_is_help=True)

NOT_FOUND = 404


@app.command()
def doctor(
    url: Annotated[
        str | None, typer.Option("--url", envvar="PERAXIS_URL", metavar="URL", help="The server's address.")
    ] = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Check a running server; exit with 1 if something is wrong.

    Example: peraxis doctor --url http://host:8000

    Does it answer, is it ready, which version is it, and what may the key do? `peraxis serve --check` checks this
    machine.
    """
    if url is None:
        raise UsageError("give --url of a running server; `peraxis serve --check` checks this machine")
    with naming_flags(SHARED_FLAGS), Client.at(ServerAddress.of(url, key_file)) as client:
        found = examine(client)
    diagnoses = [replace(each, message=with_flags(each.message, SHARED_FLAGS)) for each in found]
    print_diagnoses(diagnoses, as_json)
    if has_failed(diagnoses):
        raise typer.Exit(1)


def examine(client: Client) -> list[Diagnosis]:
    """Run every check; if the server does not answer, only that."""
    try:
        client.check_alive()
    except PeraxisError as error:
        return [Diagnosis("server", "failed", str(error))]
    found = [Diagnosis("server", "ok", f"{client.address.url} answers")]
    found.append(diagnose("ready", lambda: _ready(client)))
    found.append(_key(client))
    found.append(_version(client))
    return found


def _ready(client: Client) -> str:
    client.check_ready()
    return "requests are admitted"


def _key(client: Client) -> Diagnosis:
    try:
        me = client.me()
    except ServerRefused as error:
        if error.status == NOT_FOUND:
            return Diagnosis("key", "note", "this address does not tell what the key may do")
        return Diagnosis("key", "failed", str(error))
    except NoAnswer as error:
        return Diagnosis("key", "failed", str(error))
    roles = ", ".join(map(printable, me.roles))
    if me.key is None:
        return Diagnosis("key", "ok", f"none is needed; tenant {printable(me.tenant)}, roles {roles}")
    expires = f"expires at {printable(me.key.expires_at)}" if me.key.expires_at else "does not expire"
    return Diagnosis(
        "key", "ok", f"{printable(me.key.id)} of tenant {printable(me.tenant)}, roles {roles}, {expires}"
    )


def _version(client: Client) -> Diagnosis:
    """Compare the server's version with this command's; only administrators may see it."""
    try:
        stats = client.stats()
    except ServerRefused:
        return Diagnosis(
            "version", "note", "unknown: only an admin key sees it, on the admin port if there is one"
        )
    except PeraxisError as error:
        return Diagnosis("version", "failed", str(error))
    own, theirs = version("peraxis"), printable(stats.server.versions.get("peraxis", "unknown"))
    if own == theirs:
        return Diagnosis("version", "ok", f"{own}, as this command")
    return Diagnosis(
        "version", "note", f"{theirs}, and this command has {own}: take the same if a call fails"
    )
