"""`peraxis keys` over HTTP: create, list and revoke tenants' API keys."""

from __future__ import annotations

import re
import sys
from enum import StrEnum
from typing import Annotated

import typer
from msgspec import Struct

from client.http import RemoteServer, ServerAddress, parsed
from client.options import Json, takes_address
from client.output import print_reply
from client.pages import whole_list
from client.reference import key_id_of
from deltastore.errors import UsageError
from deltastore.tables import print_table, printable, to_second

app = typer.Typer(
    help="Create, list and revoke tenants' API keys, on a server or, with --registry DIR, in a registry.",
    no_args_is_help=True,
)

DURATION = re.compile(r"([1-9][0-9]{0,8})([smhd])")
UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class RoleOption(StrEnum):
    """A role that a key may have."""

    inference = "inference"
    publish = "publish"
    metrics = "metrics"
    admin = "admin"


class KeyReply(Struct, frozen=True, kw_only=True):
    """A key without its text."""

    id: str
    tenant: str
    roles: tuple[str, ...]
    created_at: str
    expires_at: str | None = None


class CreatedKeyReply(KeyReply, frozen=True, kw_only=True):
    """The answer that has a key's text, which the server does not keep."""

    key: str


class KeysReply(Struct, frozen=True):
    """The answer of `GET /keys`."""

    keys: tuple[KeyReply, ...]


@app.command()
@takes_address(tenant=False)
def create(
    address: ServerAddress,
    tenant: Annotated[str, typer.Option("--tenant", metavar="NAME", help="The tenant that gets the key.")],
    roles: Annotated[
        list[RoleOption],
        typer.Option("--role", help="What the key may do; give it again for more."),
    ],
    expires_in: Annotated[
        str | None,
        typer.Option("--expires-in", metavar="30d", help="Days (d), hours (h), minutes (m) or seconds (s)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a key and print it. It is shown this once.

    Example: peraxis keys create --tenant acme --role inference --role publish --expires-in 90d

    The first key of a server is made in its registry: peraxis keys create --registry DIR --tenant ops --role admin
    """
    body = {"tenant": tenant, "roles": roles, "expires_in_s": seconds_of(expires_in)}
    with RemoteServer(address) as server:
        content = server.call("POST", "/keys", body=body)
    made = parsed(content, CreatedKeyReply)
    if as_json:
        print_reply(content)
        return
    expires = f"expires at {made.expires_at}" if made.expires_at else "does not expire"
    about = f"key {made.id} of tenant {made.tenant}, roles {', '.join(made.roles)}, {expires}"
    print(f"{printable(about)}; it is not shown again", file=sys.stderr)
    # Alone on stdout, so that a shell can take it.
    print(printable(made.key))


@app.command("list")
@takes_address(tenant=False)
def list_keys(
    address: ServerAddress,
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="NAME", help="Only the keys of this tenant.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the keys, without their text.

    Example: peraxis keys list --tenant acme
    """
    params = {} if tenant is None else {"tenant": tenant}
    with RemoteServer(address) as server:
        content = whole_list(server, "/keys", "keys", params)
    keys = parsed(content, KeysReply).keys
    if as_json:
        print_reply(content)
        return
    head = ("ID", "TENANT", "ROLES", "CREATED", "EXPIRES")
    rows = [
        (
            key.id,
            key.tenant,
            ",".join(key.roles),
            to_second(key.created_at),
            to_second(key.expires_at or "never"),
        )
        for key in keys
    ]
    print_table(head, rows)


@app.command()
@takes_address(tenant=False)
def revoke(
    address: ServerAddress,
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The key's id, as `list` shows it.")],
    as_json: Json = False,
) -> None:
    """Revoke a key. Every server on the registry refuses it within a second.

    Example: peraxis keys revoke 3f9a0c1b2d4e
    """
    # A whole key that was pasted must not reach a URL, where logs would keep it.
    key_id = key_id_of(key_id)
    with RemoteServer(address) as server:
        content = server.call("DELETE", f"/keys/{key_id}")
    if as_json:
        print_reply(content)
        return
    print(f"revoked {key_id}")


def seconds_of(duration: str | None) -> int | None:
    """Return the seconds of a duration such as ``30d``; None for none.

    Raises:
        UsageError: It is no duration.
    """
    if duration is None:
        return None
    found = DURATION.fullmatch(duration)
    if found is None:
        raise UsageError(f"--expires-in {duration!r}: give a number and a unit, as in 30d, 12h, 45m or 90s")
    return int(found[1]) * UNIT_S[found[2]]
