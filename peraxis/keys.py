"""`peraxis keys`: create, list and revoke tenants' API keys, on a server or, with `--registry`, in a registry.

`server.tenants.keys` is imported only with `--registry`, so that calls of a server need no part of one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Protocol

import msgspec
import typer

from client.client import Client
from client.http import DEFAULT_URL, ServerAddress, converted, parsed
from client.names import key_id_of
from client.options import Json, KeyFile, Url, print_json, takes
from client.replies import CreatedKeyReply, KeyReply, RevokedKeyReply
from deltastore.console import print_table, printable, to_second
from deltastore.errors import UsageError

if TYPE_CHECKING:
    from server.tenants.tenant import Role

app = typer.Typer(
    help="Create, list and revoke tenants' API keys, on a server or, with --registry DIR, in a registry.",
    no_args_is_help=True,
)

DURATION = re.compile(r"([1-9][0-9]{0,8})([smhd])")
UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Location = Annotated[
    str | None,
    typer.Option(
        "--registry",
        metavar="DIR",
        help="The registry's directory, or s3://BUCKET/PREFIX; `create` makes a new one.",
        rich_help_panel="Without a server",
    ),
]


class RoleOption(StrEnum):
    """A role that a key may have."""

    inference = "inference"
    publish = "publish"
    metrics = "metrics"
    admin = "admin"


class Keys(Protocol):
    """The keys of a server or of a registry."""

    def create(self, tenant: str, roles: Collection[Role], expires_in_s: int | None) -> CreatedKeyReply:
        """Make a key."""

    def list(self, tenant: str | None) -> list[KeyReply]:
        """Return the keys, or only a tenant's."""

    def revoke(self, key_id: str) -> RevokedKeyReply:
        """Remove a key."""


class ServerKeys:
    """The keys of a server, over HTTP."""

    def __init__(self, address: ServerAddress) -> None:
        self._address = address

    def create(self, tenant: str, roles: Collection[Role], expires_in_s: int | None) -> CreatedKeyReply:
        with Client.at(self._address) as client:
            return client.create_key(tenant, roles, expires_in_s)

    def list(self, tenant: str | None) -> list[KeyReply]:
        with Client.at(self._address) as client:
            return client.keys(tenant)

    def revoke(self, key_id: str) -> RevokedKeyReply:
        with Client.at(self._address) as client:
            return client.revoke_key(key_id)


class StoredKeys:
    """The keys of a registry, in the documents of a server."""

    def __init__(self, location: str) -> None:
        from server.tenants.keys import RegistryKeys

        self._keys = RegistryKeys(location)

    def create(self, tenant: str, roles: Collection[Role], expires_in_s: int | None) -> CreatedKeyReply:
        return parsed(self._keys.create(tenant, roles, expires_in_s), CreatedKeyReply)

    def list(self, tenant: str | None) -> list[KeyReply]:
        found = msgspec.json.decode(self._keys.list(tenant))["keys"]
        return [converted(key, KeyReply) for key in found]

    def revoke(self, key_id: str) -> RevokedKeyReply:
        return parsed(self._keys.revoke(key_id), RevokedKeyReply)


def _keys(
    url: Url = DEFAULT_URL, key_file: KeyFile = None, registry: Location = None, *, context: typer.Context
) -> Keys:
    """Return the keys that a command's options name."""
    if registry is None:
        return ServerKeys(ServerAddress.of(url, key_file))
    # PERAXIS_URL may be set for other commands.
    source = context.get_parameter_source("url")
    if key_file is not None or (source is not None and source.name == "COMMANDLINE"):
        raise UsageError(
            "--registry needs no server: leave out --url and --key-file, or leave out --registry"
        )
    return StoredKeys(registry)


@app.command()
@takes(_keys)
def create(
    keys: Keys,
    tenant: Annotated[str, typer.Option("--tenant", metavar="NAME", help="The tenant that gets the key.")],
    roles: Annotated[
        list[RoleOption],
        typer.Option("--role", help="What the key may do; give it again for more."),
    ],
    expires_in: Annotated[
        str | None,
        typer.Option(
            "--expires-in",
            metavar="30d",
            help="Time until the key expires, in d, h, m or s; by default it never does.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a key and print it. It is shown this once.

    Example: peraxis keys create --tenant acme --role inference --role publish --expires-in 90d

    The first key of a server is made in its registry: peraxis keys create --registry DIR --tenant ops --role admin
    """
    made = keys.create(tenant, [role.value for role in roles], seconds_of(expires_in))
    if as_json:
        print_json(made.as_json())
        return
    expires = f"expires at {made.expires_at}" if made.expires_at else "does not expire"
    about = f"key {made.id} of tenant {made.tenant}, roles {', '.join(made.roles)}, {expires}"
    print(f"{printable(about)}; it is not shown again", file=sys.stderr)
    # Alone on stdout, so that a shell can take it.
    print(printable(made.key))


@app.command("list")
@takes(_keys)
def list_keys(
    keys: Keys,
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="NAME", help="Only the keys of this tenant.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the keys, without their text.

    Example: peraxis keys list --tenant acme
    """
    found = keys.list(tenant)
    if as_json:
        print_json({"keys": [key.as_json() for key in found]})
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
        for key in found
    ]
    print_table(head, rows)


@app.command()
@takes(_keys)
def revoke(
    keys: Keys,
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The key's id, as `list` shows it.")],
    as_json: Json = False,
) -> None:
    """Revoke a key. Every server on the registry refuses it within a second, on a bucket within two.

    Example: peraxis keys revoke 3f9a0c1b2d4e
    """
    # A whole key that was pasted must not reach a URL, where logs would keep it.
    key_id = key_id_of(key_id)
    reply = keys.revoke(key_id)
    if as_json:
        print_json(reply.as_json())
        return
    print(f"revoked {key_id}")


def seconds_of(duration: str | None) -> int | None:
    """Return the seconds of a duration such as ``30d``; None for none.

    Raises:
        UsageError: It is no duration, or a date after the year 9999.
    """
    if duration is None:
        return None
    found = DURATION.fullmatch(duration)
    if found is None:
        raise UsageError(f"--expires-in {duration!r}: give a number and a unit, as in 30d, 12h, 45m or 90s")
    seconds = int(found[1]) * UNIT_S[found[2]]
    try:
        datetime.now(UTC) + timedelta(seconds=seconds)
    except OverflowError as error:
        raise UsageError(
            f"--expires-in {duration!r} ends after the year 9999: give less, or leave it out"
        ) from error
    return seconds
