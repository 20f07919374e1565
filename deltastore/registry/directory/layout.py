"""The names in a registry's root directory, and the format that `format.json` states. Must not know variants.

The file is there so that an older version of Peraxis refuses a registry whose files it would misread.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from deltastore.errors import RegistryError, RegistryUnavailable
from deltastore.registry import claims
from deltastore.registry.storage import Storage

LAYOUT = ("objects", "uploads", "quarantine", "variants", claims.DIRECTORY)
# Kept by servers: keys, limits and the audit log.
OF_SERVERS = ("tenants", "audit")
# Left by versions of Peraxis that locked the registry.
OLD_DIRECTORIES = (claims.OLD_DIRECTORY,)
OLD_FILES = ("objects.lock", "public.lock")
FORMAT_FILE = "format.json"
FORMAT = 2


def make_layout(root: Path, storage: Storage) -> None:
    """Create the missing directories of a registry.

    Raises:
        RegistryError: A newer version of Peraxis wrote it.
        OSError: The disk failed.
    """
    check_format(root)
    for name in LAYOUT:
        storage.make_dirs(root / name)
    if not (root / FORMAT_FILE).exists():
        # Without it, this version reads the registry as well.
        with contextlib.suppress(OSError):
            storage.add(root / FORMAT_FILE, json.dumps({"format": FORMAT}).encode() + b"\n")
    # Existing directories too: the process that made them may have died before its fsync.
    storage.fsync_dir(root)
    # Without the right to open the parent, this user did not create the root either.
    with contextlib.suppress(PermissionError):
        storage.fsync_dir(root.parent)


def check_format(root: Path) -> None:
    """Check that this version of Peraxis can read the registry.

    Raises:
        RegistryError: A newer version wrote it, or the file cannot be read.
    """
    path = root / FORMAT_FILE
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return
    parse_format(raw, str(path))


def parse_format(raw: bytes, where: str) -> None:
    """Check the contents of `format.json`; raises as `check_format` does."""
    try:
        found = json.loads(raw)["format"]
    except (ValueError, LookupError, TypeError) as error:
        raise RegistryError(f'{where} is damaged: write {{"format": {FORMAT}}} to it') from error
    if found not in (1, FORMAT):
        raise RegistryError(
            f"{where} has format {found!r}, written by a newer version of Peraxis, and this one reads up to {FORMAT}: "
            "run the newer version"
        )


def check_present(root: Path) -> None:
    """Raise RegistryUnavailable if a registry's directory is gone: it must not look like one without variants."""
    if not (root / "variants").is_dir():
        raise RegistryUnavailable(
            f"{root} is gone: mount its volume again",
            public="the registry's volume is gone: ask its operator to mount it again",
        )
