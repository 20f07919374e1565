"""`peraxis keys create|list|revoke --registry DIR`: API keys in a registry, without a server. DIR may be a bucket.

The first administrator's key is made so. The commands without `--registry` ask a server and take the same options.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from deltastore.errors import UsageError
from deltastore.registry import Registry
from deltastore.registry.object_cache import ObjectCache
from deltastore.registry.place import check_place, is_bucket, is_registry
from deltastore.tables import print_table
from server.tenants.audit import AuditLog, Auditor
from server.tenants.keys import KEY, KeyStore, key_document

app = typer.Typer(
    help="Create, list and revoke API keys in a registry, without a server.", no_args_is_help=True
)

DURATION = re.compile(r"([1-9][0-9]{0,6})([smhd])")
UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Location = Annotated[
    str,
    typer.Option(
        "--registry",
        metavar="DIR",
        help="The registry's directory, or s3://BUCKET/PREFIX; `create` makes a new one.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]


class KeyRole(StrEnum):
    """A role that a key may have."""

    inference = "inference"
    publish = "publish"
    metrics = "metrics"
    admin = "admin"


@app.command()
def create(
    registry: Location,
    tenant: Annotated[str, typer.Option("--tenant", metavar="NAME", help="The tenant that gets the key.")],
    roles: Annotated[
        list[KeyRole], typer.Option("--role", help="What the key may do; give it again for more.")
    ],
    expires_in: Annotated[
        str | None,
        typer.Option("--expires-in", metavar="30d", help="Days (d), hours (h), minutes (m) or seconds (s)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a key and print it. It is shown this once.

    Example: peraxis keys create --registry ./registry --tenant ops --role admin
    """
    expires_at = _moment_after(expires_in)
    place = _registry(registry, is_made=True)
    made = KeyStore(place).create(_auditor(place), tenant, [role.value for role in roles], expires_at)
    document = key_document(made.id, made.record)
    if as_json:
        _print_json({"key": made.text, **document})
        return
    expires = f"expires at {document['expires_at']}" if document["expires_at"] else "does not expire"
    about = f"key {made.id} of tenant {tenant}, roles {', '.join(made.record.roles)}, {expires}"
    print(f"{about}; it is not shown again", file=sys.stderr)
    # Alone on stdout, so that a shell can take it.
    print(made.text)


@app.command("list")
def list_keys(
    registry: Location,
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="NAME", help="Only the keys of this tenant.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the keys, without their text."""
    records = KeyStore(_registry(registry)).records(tenant)
    documents = [key_document(key_id, record) for key_id, record in records.items()]
    if as_json:
        _print_json({"keys": documents})
        return
    # As `keys list` without --registry prints them.
    rows = [
        (
            key["id"],
            key["tenant"],
            ",".join(key["roles"]),
            key["created_at"][:19],
            (key["expires_at"] or "never")[:19],
        )
        for key in documents
    ]
    print_table(("ID", "TENANT", "ROLES", "CREATED", "EXPIRES"), rows)


@app.command()
def revoke(
    registry: Location,
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The key's id, as `list` shows it.")],
    as_json: Json = False,
) -> None:
    """Revoke a key. Every server on the registry refuses it within a second, on a bucket within two."""
    place = _registry(registry)
    if (whole := KEY.fullmatch(key_id)) is not None:
        key_id = whole[1]
    KeyStore(place).revoke(_auditor(place), key_id)
    if as_json:
        _print_json({"id": key_id, "revoked": True})
    else:
        print(f"revoked {key_id}")


def _registry(location: str, *, is_made: bool = False) -> Path | str:
    """Return the directory of a registry, or its bucket. With `is_made`, an empty or missing one becomes a registry."""
    if is_bucket(location):
        with tempfile.TemporaryDirectory(prefix="peraxis-keys-") as directory:
            # These commands fetch no object.
            Registry.open(location, ObjectCache(Path(directory), 0), is_made=is_made)
        return location
    path = Path(location)
    if not is_registry(path):
        if is_made:
            check_place(path)
        else:
            raise UsageError(
                f"{path} is not a registry: give the directory that `peraxis serve --registry` is given"
            )
        print(f"{path} is a new registry", file=sys.stderr)
    return Registry(path).root


def _auditor(place: Path | str) -> Auditor:
    # A command has no request and no key: the rights on the registry allow it.
    return Auditor(AuditLog(place))


def _moment_after(duration: str | None) -> datetime | None:
    if duration is None:
        return None
    found = DURATION.fullmatch(duration)
    if found is None:
        raise UsageError(f"--expires-in {duration!r}: give a number and a unit, as in 30d, 12h, 45m or 90s")
    try:
        return datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=int(found[1]) * UNIT_S[found[2]])
    except OverflowError as error:
        raise UsageError(
            f"--expires-in {duration!r} ends after the year 9999: give less, or leave it out"
        ) from error


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))
