"""`peraxis tenants`: list the tenants of a server, show one, and set its limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from client.client import Client
from client.http import ServerAddress
from client.options import Json, print_json, takes_address
from client.replies import TenantReply
from deltastore.console import flag_of, print_table, printable, size_text
from deltastore.errors import PeraxisError, UsageError

app = typer.Typer(help="List the tenants of a server, and set their limits.", no_args_is_help=True)

UNLIMITED = "unlimited"
# More digits than the largest limit has.
MAX_DIGITS = 16
# The limits of a tenant by name: the title of the column, and the form of a value in it.
LIMITS: Mapping[str, tuple[str, Callable[[int], str]]] = {
    "requests_per_minute": ("REQUESTS/MIN", str),
    "tokens_per_minute": ("TOKENS/MIN", str),
    "max_running": ("RUNNING", str),
    "max_uploads": ("UPLOADS", str),
    "max_stored_bytes": ("STORED", size_text),
    "max_stored_versions": ("STORED-VERSIONS", str),
    "max_variants": ("MAX-VARIANTS", str),
    "max_versions": ("MAX-VERSIONS", str),
    "max_pinned": ("PINNED", str),
}

TenantName = Annotated[str, typer.Argument(metavar="NAME", help="The tenant.")]


@app.command("list")
@takes_address(tenant=False)
def list_tenants(address: ServerAddress, as_json: Json = False) -> None:
    """List every tenant that has a key, a variant or limits of its own.

    Example: peraxis tenants list
    """
    with Client.at(address) as client:
        listed = client.tenants()
    tenants = listed.tenants
    if as_json:
        print_json(listed.as_json())
        return
    head = ("TENANT", "KEYS", "VARIANTS", "LIMITS", *(title for title, _ in LIMITS.values()))
    rows = [
        (each.name, str(each.num_keys), str(each.num_variants), _whose(each), *_cells(each.limits))
        for each in tenants
    ]
    print_table(head, rows)


@app.command()
@takes_address(tenant=False)
def show(address: ServerAddress, name: TenantName, as_json: Json = False) -> None:
    """Show a tenant: how many keys and variants it has, and its limits.

    Example: peraxis tenants show acme
    """
    with Client.at(address) as client:
        listed = client.tenants()
    tenant = next((each for each in listed.tenants if each.name == name), None)
    if tenant is None:
        raise PeraxisError(
            f"tenant {name!r} has no key, no variant and no limits of its own: `peraxis tenants list` lists tenants"
        )
    if as_json:
        print_json(next(each for each in listed.as_json()["tenants"] if each["name"] == name))
        return
    print(f"keys: {tenant.num_keys}\nvariants: {tenant.num_variants}\nlimits: {_whose(tenant)}")
    _print_limits(tenant.limits)


@app.command("set")
@takes_address(tenant=False)
def set_limits(
    address: ServerAddress,
    name: TenantName,
    requests_per_minute: Annotated[
        str | None, typer.Option(metavar="N", help="Most requests for tokens in a minute.")
    ] = None,
    tokens_per_minute: Annotated[
        str | None, typer.Option(metavar="N", help="Most prompt and generated tokens in a minute.")
    ] = None,
    max_running: Annotated[
        str | None, typer.Option(metavar="N", help="Most requests that wait or run at a time.")
    ] = None,
    max_uploads: Annotated[str | None, typer.Option(metavar="N", help="Most uploads at a time.")] = None,
    max_stored_bytes: Annotated[
        str | None, typer.Option(metavar="N", help="Most bytes of stored artifacts.")
    ] = None,
    max_stored_versions: Annotated[
        str | None, typer.Option(metavar="N", help="Most live versions of all variants together.")
    ] = None,
    max_variants: Annotated[
        str | None, typer.Option(metavar="N", help="Most variants with a live version.")
    ] = None,
    max_versions: Annotated[
        str | None, typer.Option(metavar="N", help="Most live versions of a variant.")
    ] = None,
    max_pinned: Annotated[str | None, typer.Option(metavar="N", help="Most pinned versions.")] = None,
    as_json: Json = False,
) -> None:
    """Set limits of a tenant; those that are not given stay. Every server on the registry obeys within a second.

    Examples: peraxis tenants set acme --requests-per-minute 60; peraxis tenants set acme --max-pinned unlimited
    """
    given = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_running": max_running,
        "max_uploads": max_uploads,
        "max_stored_bytes": max_stored_bytes,
        "max_stored_versions": max_stored_versions,
        "max_variants": max_variants,
        "max_versions": max_versions,
        "max_pinned": max_pinned,
    }
    changes = _parsed_limits(given)
    with Client.at(address) as client:
        reply = client.set_limits(name, **changes)
    if as_json:
        print_json(reply.as_json())
        return
    _print_limits(reply.limits)


def _parsed_limits(given: Mapping[str, str | None]) -> dict[str, int | None]:
    """Return the limits that were given; None is unlimited.

    Raises:
        UsageError: none was given, or one is no limit.
    """
    limits: dict[str, int | None] = {}
    for name, text in given.items():
        if text is None:
            continue
        is_number = text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS
        if not is_number and text != UNLIMITED:
            raise UsageError(f"{flag_of(name)} {text!r}: give a whole number, or {UNLIMITED}")
        limits[name] = int(text) if is_number else None
    if not limits:
        raise UsageError(f"give a limit to set: {', '.join(map(flag_of, given))}")
    return limits


def _whose(tenant: TenantReply) -> str:
    return "own" if tenant.has_own_limits else "default"


def _cells(limits: Mapping[str, int | None]) -> list[str]:
    """Return a row's cells of limits; ``-`` is unlimited."""
    values = [(limits.get(name), form) for name, (_, form) in LIMITS.items()]
    return ["-" if value is None else form(value) for value, form in values]


def _print_limits(limits: Mapping[str, int | None]) -> None:
    """Print a line per limit, also of those that only a newer server has."""
    for name, value in limits.items():
        print(f"{printable(name)}: {UNLIMITED if value is None else value}")
