"""The names in a registry's root directory, and the format that `format.json` states. Must not know variants.

The file is there so that an older version of Peraxis refuses a registry whose files it would misread.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from deltastore.errors import RegistryError, RegistryUnavailable
from deltastore.registry import claims, variants
from deltastore.registry.storage import Storage, listed_names

LAYOUT = (
    "objects",
    "uploads",
    "quarantine",
    variants.DIRECTORY,
    variants.REPORTS,
    claims.DIRECTORY,
    claims.PUBLIC_NAMES,
)
# Kept by servers: keys, limits and the audit log.
OF_SERVERS = ("tenants", "audit")
FORMAT_FILE = "format.json"
FORMAT = 3


def make_layout(root: Path, storage: Storage) -> None:
    """Create the missing directories of a registry.

    Raises:
        RegistryError: Another version of Peraxis wrote it.
        OSError: The disk failed.
    """
    path = root / FORMAT_FILE
    try:
        parse_format(path.read_bytes(), str(path))
    except FileNotFoundError:
        if listed_names(root / variants.DIRECTORY):
            raise older(str(root)) from None
        storage.make_dirs(root)
        # Before the directories, which older versions of Peraxis would read without it.
        storage.add(path, json.dumps({"format": FORMAT}).encode() + b"\n")
    for name in LAYOUT:
        storage.make_dirs(root / name)
    # Existing directories too: the process that made them may have died before its fsync.
    storage.fsync_dir(root)
    # Without the right to open the parent, this user did not create the root either.
    with contextlib.suppress(PermissionError):
        storage.fsync_dir(root.parent)


def parse_format(raw: bytes, where: str) -> None:
    """Check the contents of `format.json`.

    Raises:
        RegistryError: Another version of Peraxis wrote it, or the file is damaged.
    """
    try:
        found = json.loads(raw)["format"]
    except (ValueError, LookupError, TypeError) as error:
        raise RegistryError(f'{where} is damaged: write {{"format": {FORMAT}}} to it') from error
    if found in (1, 2):
        raise older(where)
    if found != FORMAT:
        raise RegistryError(
            f"{where} has format {found!r}, written by a newer version of Peraxis, and this one reads format {FORMAT}: "
            "run the newer version"
        )


def older(where: str) -> RegistryError:
    """Return the error for a registry that an older version of Peraxis wrote."""
    return RegistryError(
        f"{where} was written by an older version of Peraxis and cannot be read: publish the variants again, into a "
        "new directory or prefix"
    )


def check_present(root: Path) -> None:
    """Raise RegistryUnavailable if a registry's directory is gone: it must not look like one without variants."""
    if not (root / variants.DIRECTORY).is_dir():
        raise gone(root)


def gone(root: Path) -> RegistryUnavailable:
    """Return the error for a registry whose files are missing."""
    return RegistryUnavailable(
        f"{root} is gone: mount its volume again",
        public="the registry's volume is gone: ask its operator to mount it again",
    )
