"""The commands of registered variants, and those that move them in and out of slots."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec
import typer

from client.client import Client
from client.http import ServerAddress
from client.names import parse_reference, path_of
from client.options import Json, Name, Reference, print_json, takes_address
from client.replies import SharedVariant, StatusReply, VariantReply, VersionReply
from deltastore.console import mark, print_table, printable, short, size_text, to_second
from deltastore.errors import shown

app = typer.Typer(no_args_is_help=True)

# The columns of `ls`. `registry ls` in deltastore has the same titles for the same things.
LISTED = (
    "NAME", "OWNER", "ACTIVE", "VERSIONS", "SIZE", "LEVEL", "PINNED", "VISIBILITY", "DIGEST", "CREATED",
)  # fmt: skip


@app.command()
@takes_address()
def ls(address: ServerAddress, as_json: Json = False) -> None:
    """List the registered variants, and those that other tenants have made public.

    Example: peraxis ls
    """
    with Client.at(address) as client:
        variants = client.variants()
        shared = client.shared_variants([variant.name for variant in variants])
        if not (as_json or variants):
            _tell_none(client, "no variants")
    if as_json:
        listed = [variant.as_json() for variant in variants]
        print_json({"variants": listed, "shared": msgspec.to_builtins(shared)})
        return
    rows = [*map(_listed, variants), *map(_listed_as_shared, shared)]
    print_table(LISTED, [[row.get(title, "-") for title in LISTED] for row in rows])


@app.command()
@takes_address()
def ps(address: ServerAddress, as_json: Json = False) -> None:
    """List the versions that are in memory or have requests.

    Example: peraxis ps
    """
    with Client.at(address) as client:
        variants = client.variants()
        resident = [
            (variant, version)
            for variant in variants
            for version in _all_versions(client, variant)
            if version.is_resident
        ]
        if not (as_json or resident):
            _tell_none(client, "no variants in memory or with requests" if variants else "no variants")
    if as_json:
        found = [{"name": variant.name, **msgspec.to_builtins(version)} for variant, version in resident]
        print_json({"resident": found})
        return
    head = ("NAME", "MEMORY", "LEVEL", "PINNED", "REQUESTS", "DIGEST")
    rows = [
        (
            f"{variant.name}@{version.version}",
            size_text(version.device_bytes),
            version.level,
            mark(version.pinned, "pinned"),
            str(version.num_requests),
            short(version.digest),
        )
        for variant, version in resident
    ]
    print_table(head, rows)


@app.command()
@takes_address()
def show(address: ServerAddress, name: Name, as_json: Json = False) -> None:
    """Show one variant: its versions, and how close the active one is to its fine-tune.

    Example: peraxis show instruct
    """
    with Client.at(address) as client:
        variant = client.variant(name)
    if as_json:
        print_json(variant.as_json())
        return
    head = ("ACTIVE", "VERSION", "SIZE", "METHOD", "LEVEL", "PINNED", "REQUESTS", "DIGEST", "CREATED")
    print_table(head, [_shown(version, version.version == variant.active) for version in variant.versions])
    if (active := variant.active_version) is not None:
        for key, value in active.fidelity.items():
            print(f"fidelity {printable(key)}: {_fidelity(value)}")


@app.command()
@takes_address()
def promote(
    address: ServerAddress,
    name: Name,
    version: Annotated[int, typer.Argument(metavar="VERSION", help="The version to make active.", min=1)],
    as_json: Json = False,
) -> None:
    """Make a version the active one. Running requests keep theirs.

    Example: peraxis promote instruct 3
    """
    with Client.at(address) as client:
        variant = client.promote(name, version)
    _print_active(variant, as_json)


@app.command()
@takes_address()
def rollback(address: ServerAddress, name: Name, as_json: Json = False) -> None:
    """Make the version active again that was active before; a second rollback undoes the first.

    Running requests keep their version.

    Example: peraxis rollback instruct
    """
    with Client.at(address) as client:
        variant = client.rollback(name)
    _print_active(variant, as_json)


@app.command()
@takes_address()
def share(address: ServerAddress, name: Name, as_json: Json = False) -> None:
    """Make a variant public: every tenant may use it under its name. Only its owner changes it.

    Example: peraxis share instruct
    """
    _set_visibility(address, name, "public", as_json)


@app.command()
@takes_address()
def unshare(address: ServerAddress, name: Name, as_json: Json = False) -> None:
    """Make a public variant private again: only its owner may use it.

    Example: peraxis unshare instruct
    """
    _set_visibility(address, name, "private", as_json)


@app.command()
@takes_address()
def rm(
    address: ServerAddress,
    reference: Annotated[
        str,
        typer.Argument(
            metavar="NAME[@VERSION]", help="The variant; without a version, it and all its versions."
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask on a terminal.")] = False,
    as_json: Json = False,
) -> None:
    """Delete a variant, or one version that is not active. Asks on a terminal.

    A version's number is never assigned again: a later push of the same name gets the next number.

    Examples: peraxis rm instruct@2; peraxis rm instruct --yes
    """
    # Before the question.
    path_of(parse_reference(reference)[0])
    everything = "" if "@" in reference else " with all its versions"
    if (
        not yes
        and sys.stdin.isatty()
        and not _confirmed(f"Delete {reference}{everything} from {address.url}?")
    ):
        raise typer.Abort
    with Client.at(address) as client:
        deleted = client.delete(reference)
    if as_json:
        print_json(deleted.as_json())
        return
    print(f"deleted {printable(deleted.name)}: version {', '.join(map(str, deleted.deleted))}")


def _all_versions(client: Client, variant: VariantReply) -> tuple[VersionReply, ...]:
    """Return every version of a listed variant, which may show only the newest ones."""
    if variant.num_versions <= len(variant.versions):
        return variant.versions
    return client.versions(variant.name)


def _tell_none(client: Client, what: str) -> None:
    """Say on stderr that a list is empty, and whose it is."""
    tenant = client.acting_tenant()
    print(what if tenant is None else f"{what} of tenant {printable(tenant)}", file=sys.stderr)


def _print_active(variant: VariantReply, as_json: bool) -> None:
    if as_json:
        print_json(variant.as_json())
        return
    print(f"{printable(variant.name)}: version {variant.active} is active")


def _set_visibility(
    address: ServerAddress, name: str, visibility: Literal["private", "public"], as_json: bool
) -> None:
    with Client.at(address) as client:
        variant = client.set_visibility(name, visibility)
    if as_json:
        print_json(variant.as_json())
        return
    users = "every tenant" if variant.visibility == "public" else f"only tenant {variant.owner}"
    print(printable(f"{variant.name} is {variant.visibility}: {users} may use it"))


def _confirmed(question: str) -> bool:
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _listed(variant: VariantReply) -> dict[str, str]:
    """Return the cells of a variant in `ls`, by title; its sizes are the active version's."""
    found = {
        "NAME": variant.name,
        "OWNER": variant.owner,
        "VERSIONS": str(max(variant.num_versions, len(variant.versions))),
        "VISIBILITY": variant.visibility,
    }
    if (active := variant.active_version) is None:
        return found
    return {
        **found,
        "ACTIVE": str(active.version),
        "SIZE": size_text(active.size_bytes),
        "LEVEL": active.level,
        "PINNED": mark(active.pinned, "pinned"),
        "DIGEST": short(active.digest),
        "CREATED": to_second(active.created_at),
    }


def _listed_as_shared(shared: SharedVariant) -> dict[str, str]:
    """Return the cells in `ls` of another tenant's variant."""
    return {"NAME": shared.name, "OWNER": shared.owner, "VISIBILITY": "public"}


def _fidelity(value: Any) -> str:
    """Return a part of a fidelity on one line; the artifact's author wrote it, so its length has a bound."""
    if not isinstance(value, Mapping):
        return shown(value)
    return ", ".join(f"{printable(str(key))[:40]} {shown(each)}" for key, each in [*value.items()][:8])


def _shown(version: VersionReply, is_active: bool) -> tuple[str, ...]:
    return (
        mark(is_active, "active"),
        str(version.version),
        size_text(version.size_bytes),
        version.method,
        version.level,
        mark(version.pinned, "pinned"),
        str(version.num_requests),
        short(version.digest),
        to_second(version.created_at),
    )


def _add_command(act: Callable[[Client, str], StatusReply], summary: str, example: str) -> None:
    """Add the command that asks a server for an action on a version."""
    action = act.__name__

    @app.command(action, help=f"{summary}\n\nExample: peraxis {action} {example}")
    @takes_address()
    def command(address: ServerAddress, reference: Reference, as_json: Json = False) -> None:
        with Client.at(address) as client:
            status = act(client, reference)
        if as_json:
            print_json(status.as_json())
            return
        pinned = ", pinned" if status.pinned else ""
        print(f"{printable(status.name)}@{status.version}: now on level {printable(status.level)}{pinned}")


_add_command(Client.load, "Load a variant into a slot before a request needs it.", "instruct")
_add_command(Client.unload, "Free a variant's slot as soon as no request uses it.", "instruct@2")
_add_command(Client.pin, "Load a variant into a slot and never evict it.", "instruct")
_add_command(Client.unpin, "Allow the eviction of a pinned variant again.", "instruct")
