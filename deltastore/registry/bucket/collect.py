"""Garbage collection of a registry in a bucket. Servers publish meanwhile; `REGISTRY.md` says why nothing is lost."""

from __future__ import annotations

from datetime import datetime, timedelta

from deltastore.errors import RegistryError
from deltastore.registry import claims
from deltastore.registry.bucket.files import BucketFiles
from deltastore.registry.bucket.objects import INTENTS, STORED, BucketObjects, identity_of, stored_name
from deltastore.registry.checker import leftovers, listed_reports, records_in_use
from deltastore.registry.claims import Claims
from deltastore.registry.reports import GcReport
from deltastore.registry.uploads import Uploads
from deltastore.registry.variants import DIRECTORY, directories

ABANDONED_AFTER = timedelta(days=1)
# Written by gc, to read the clock of the store from its time.
CLOCK = "clock"


def collect(files: BucketFiles, objects: BucketObjects, uploads: Uploads, *, dry_run: bool) -> GcReport:
    """Remove garbage, and abandoned uploads on this machine, or with `dry_run` only report it.

    Raises:
        RegistryError: A record or state is damaged, so the objects in use are unknown; nothing was removed.
    """
    num_partials, partial_bytes = uploads.remove_abandoned(dry_run=dry_run)
    # In this order: reports and objects, intents, records.
    reports = listed_reports(files)
    stored = objects.stored()
    intents = {
        name: meta["last_modified"] for name, meta in objects.intents().items() if STORED.fullmatch(name)
    }
    # Listed before the records are read: the publication of an abandoned intent has ended by now.
    abandoned = _abandoned(files, intents)
    files = files.listed(files.root / DIRECTORY, files.root / claims.DIRECTORY)
    try:
        needed = {stored_name(record) for record in records_in_use(files)}
        left = leftovers(files, reports, intents.keys() - abandoned)
    except RegistryError as error:
        raise RegistryError(f"nothing was collected: {error}") from error
    unused = sorted(stored.keys() - needed - (intents.keys() - abandoned))
    marks = [
        name
        for name, identity in objects.marks().items()
        if name not in needed or (name in stored and identity_of(stored[name]) != identity)
    ]
    entries = [
        *left,
        *(path for name in Claims(files).names() for path in Claims(files).entries(name).superseded()),
        *(path for directory in directories(files) for path in directory.entries.superseded()),
    ]
    if not dry_run:
        objects.remove(unused)
        objects.remove_marks(marks)
        files.remove_surely([*entries, *(files.root / INTENTS / name for name in sorted(abandoned))])
    return GcReport(
        tuple(sorted({name.partition(".")[0] for name in unused})),
        num_partials,
        len(entries) + len(abandoned) + len(marks),
        sum(stored[name]["size"] for name in unused) + partial_bytes,
        dry_run,
    )


def _abandoned(files: BucketFiles, intents: dict[str, datetime]) -> set[str]:
    """Return the intents that are older than a day by the clock of the store."""
    if not intents:
        return set()
    path = files.root / INTENTS / CLOCK
    files.replace(path, b"{}\n")
    now = files.status(path)["last_modified"]
    return {name for name, begun in intents.items() if begun < now - ABANDONED_AFTER}
