"""Checks of a registry's directory: rights, fsync, hard links, space, and the bases of its variants.

Of a bucket: rights, and that the store refuses to create an object twice.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

from deltastore.base.base import Base
from deltastore.diagnosis import Diagnosis
from deltastore.errors import RegistryError, UsageError
from deltastore.quantities import size_text
from deltastore.registry import Registry
from deltastore.registry.directory.layout import FORMAT_FILE
from deltastore.registry.storage import TEMPORARY, Storage, explained

# Versions that a message names.
MAX_NAMED = 3


def check_registry(root: Path) -> str:
    """Write, sync, link, rename and remove a file as the registry does. A missing directory is not created.

    Raises:
        RegistryError, StorageFull: a step failed.
    """
    directory = _existing(root)
    # Named like other temporary files, so that gc removes it if this process is killed.
    path, second = (directory / f".{secrets.token_hex(8)}{TEMPORARY}" for _ in range(2))
    storage = Storage()
    with explained(directory):
        try:
            storage.replace(path, b"doctor")
            storage.link(path, second)
        finally:
            path.unlink(missing_ok=True)
            second.unlink(missing_ok=True)
        storage.fsync_dir(directory)
    missing = "" if directory == root else f"; {root} does not exist yet, and `peraxis serve` creates it"
    return f"{directory} can be written, synced and linked{missing}"


def check_bucket(location: str) -> str:
    """List a bucket, and create and remove a file there as the registry does.

    Raises:
        UsageError: the location is malformed, or obstore is missing.
        RegistryError, StorageFull: a step failed.
    """
    try:
        from deltastore.registry.bucket.client import Bucket
        from deltastore.registry.bucket.files import BucketFiles
    except ModuleNotFoundError as error:
        raise UsageError(f"{location} needs obstore: run `pip install 'peraxis[s3]'`") from error
    bucket = Bucket.open(location)
    files = BucketFiles(bucket)
    is_made = FORMAT_FILE in files.names(bucket.root)
    path = bucket.root / f".{secrets.token_hex(8)}{TEMPORARY}"
    try:
        files.add(path, b"doctor")
        if files.add(path, b"another"):
            raise RegistryError(
                f"{location} creates an object that exists: use a store with conditional writes (If-None-Match)"
            )
    finally:
        files.remove([path])
    missing = "" if is_made else "; it has no registry yet, and `peraxis serve` creates it"
    return f"{location} can be listed and written, with conditional writes{missing}"


def check_disk(root: Path, delta_bytes: int | None) -> str:
    """Return the free space, and how many deltas fit there if the size of one is known."""
    with explained(root):
        free = shutil.disk_usage(_existing(root)).free
    fit = "" if not delta_bytes else f", {free // delta_bytes} deltas of {size_text(delta_bytes)}"
    return f"{size_text(free)} are free{fit}"


def check_variants(root: Path, base: Base) -> Diagnosis:
    """Report the versions of a registry that a server with this base does not serve."""
    if not (root / "variants").is_dir():
        return Diagnosis("variants", "note", f"{root} is no registry yet")
    registry = Registry(root)
    records = [record for variant in registry.variants() for record in variant.versions]
    foreign = [record.label for record in records if record.base_fingerprint != base.fingerprint]
    quarantined = [record.label for record in records if registry.is_quarantined(record)]
    problems = [
        f"{len(labels)} {problem} ({', '.join(labels[:MAX_NAMED])}{', ...' if labels[MAX_NAMED:] else ''})"
        for labels, problem in (
            (foreign, "were made from another base: compress them again"),
            (quarantined, "are quarantined: push their artifacts again"),
        )
        if labels
    ]
    message = f"{len(records)} versions"
    return Diagnosis("variants", "note" if problems else "ok", "; ".join([message, *problems]))


def _existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists; raise RegistryError if that is no directory."""
    found = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if not found.is_dir():
        raise RegistryError(f"{found} is no directory: give --registry another path")
    return path if found == path.absolute() else found
