"""The commands `peraxis registry ls|rm|gc|check`. They work on a directory or a bucket and need no server."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltastore.console import mark, print_table, short, size_text, to_second
from deltastore.errors import UsageError

# For types alone: `--help` opens no registry.
if TYPE_CHECKING:
    from deltastore.registry import Registry
    from deltastore.registry.records import CheckReport, GcReport, VersionRecord
    from deltastore.registry.variants import Variant

app = typer.Typer(help="List, delete from, clean and check a registry.", no_args_is_help=True)

# The columns of `ls`. `peraxis ls` and `peraxis show` have the same titles for the same things.
LISTED = ("NAME", "OWNER", "ACTIVE", "VERSION", "SIZE", "METHOD", "VISIBILITY", "DIGEST", "CREATED", "STATE")

Location = Annotated[
    str,
    typer.Option(
        "--registry",
        envvar="PERAXIS_REGISTRY",
        metavar="DIR|s3://BUCKET/PREFIX",
        help="The registry: a directory or a bucket.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]


@app.command()
def ls(registry: Location, as_json: Json = False) -> None:
    """List every version of every variant."""
    with _opened(registry) as opened:
        variants = opened.variants()
        if as_json:
            _print_json([_variant_json(opened, variant) for variant in variants])
            return
        if not variants:
            print("no variants", file=sys.stderr)
        rows = [_row(opened, variant, record) for variant in variants for record in variant.versions]
    print_table(LISTED, rows)


@app.command()
def rm(
    name: Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="The variant, or one version of it.")],
    registry: Location,
    tenant: Annotated[str, typer.Option("--tenant", metavar="T", help="The variant's owner.")],
    as_json: Json = False,
) -> None:
    """Delete a variant or an inactive version without a server, also beside running ones; gc frees the bytes.

    Example: peraxis registry rm instruct --tenant acme --registry ./registry
    """
    variant, at, text = name.partition("@")
    if at and not text.isdecimal():
        raise UsageError(f"{name!r} names no version: give NAME or NAME@VERSION, as in instruct@2")
    version = int(text) if at else None
    with _opened(registry) as opened:
        opened.delete(tenant, variant, version)
    if as_json:
        _print_json({"tenant": tenant, "name": variant, "version": version})
    else:
        print(f"deleted {tenant}/{name}")


@app.command()
def gc(
    registry: Location,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: Json = False,
) -> None:
    """Remove objects that no version refers to, and leftovers of crashes."""
    with _opened(registry) as opened:
        report = opened.gc(dry_run=dry_run)
    if as_json:
        _print_json(asdict(report))
    else:
        print(_gc_text(report))


@app.command()
def check(registry: Location, as_json: Json = False) -> None:
    """Read and verify every file; exit with 1 if something is wrong."""
    with _opened(registry) as opened:
        report = opened.check()
    if as_json:
        _print_json(_check_json(report))
    else:
        print(_check_text(report))
    if not report.is_clean:
        raise typer.Exit(1)


@contextmanager
def _opened(location: str) -> Iterator[Registry]:
    """Open a registry that must exist: a mistyped location must not look like an empty one."""
    # Deferred: `--help` opens no registry.
    from deltastore.registry import Registry
    from deltastore.registry.claims import is_bucket
    from deltastore.registry.object_cache import ObjectCache

    with tempfile.TemporaryDirectory(prefix="peraxis-registry-") as directory:
        # These commands fetch no object.
        cache = ObjectCache(Path(directory), 0) if is_bucket(location) else None
        yield Registry.open(location, cache, is_made=False)


def _row(registry: Registry, variant: Variant, record: VersionRecord) -> tuple[str, ...]:
    return (
        variant.name,
        variant.tenant,
        mark(record.version == variant.active, "active"),
        str(record.version),
        size_text(record.size_bytes),
        record.method,
        variant.visibility,
        short(record.digest),
        to_second(record.created_at),
        mark(registry.is_quarantined(record), "quarantined"),
    )


def _gc_text(report: GcReport) -> str:
    verb = "would remove" if report.dry_run else "removed"
    lines = [f"{verb} object {digest}" for digest in report.objects]
    total = f"{verb} {len(report.objects)} objects, {report.num_partials} abandoned uploads and "
    total += f"{report.num_leftovers} other leftovers: {report.bytes_freed} bytes"
    return "\n".join([*lines, total])


def _check_text(report: CheckReport) -> str:
    lines = [f"note: {note.path}: {note.problem}" for note in report.notes]
    lines += [f"FOUND: {finding.path}: {finding.problem}" for finding in report.findings]
    verdict = "clean" if report.is_clean else f"{len(report.findings)} findings"
    return "\n".join([*lines, f"{report.num_objects} objects, {report.num_versions} versions: {verdict}"])


def _variant_json(registry: Registry, variant: Variant) -> dict[str, Any]:
    versions = [
        {**asdict(record), "quarantined": registry.is_quarantined(record)} for record in variant.versions
    ]
    return {
        "tenant": variant.tenant,
        "name": variant.name,
        "visibility": variant.visibility,
        "active": variant.active,
        "versions": versions,
    }


def _check_json(report: CheckReport) -> dict[str, Any]:
    def plain(findings: Any) -> list[dict[str, str]]:
        return [{"path": str(finding.path), "problem": finding.problem} for finding in findings]

    return {
        "clean": report.is_clean,
        "findings": plain(report.findings),
        "notes": plain(report.notes),
        "num_objects": report.num_objects,
        "num_versions": report.num_versions,
    }


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))
