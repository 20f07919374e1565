"""How a registry is told from other places: its location, the names in its root, and the format in `format.json`.

Opens no registry and makes nothing. A registry of any other format is refused: its files would be misread.
"""

from __future__ import annotations

import json
from pathlib import Path

from deltastore.errors import RegistryError, RegistryUnavailable, UsageError
from deltastore.registry import claims, variants
from deltastore.registry.directory import reserve

SCHEME = "s3://"
FORMAT_FILE = "format.json"
FORMAT = 3
STATED_FORMAT = json.dumps({"format": FORMAT}).encode() + b"\n"
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
# In a registry that another process is making now, or at the root of a volume that was just formatted.
HARMLESS = frozenset({*LAYOUT, *OF_SERVERS, FORMAT_FILE, reserve.DIRECTORY, "lost+found"})


def is_bucket(location: str) -> bool:
    """True if a value of `--registry` names a bucket and not a directory."""
    return location.startswith(SCHEME)


def is_registry(path: Path) -> bool:
    return (path / variants.DIRECTORY).is_dir()


def check_place(path: Path) -> None:
    """Check that `path` is a registry, or that one may be made there because it is missing or empty.

    Raises:
        UsageError: it is a file, or a directory with other contents, such as a checkpoint.
        RegistryError: it cannot be read.
    """
    try:
        if is_registry(path) or not path.exists():
            return
        if not path.is_dir():
            raise UsageError(f"{path} is a file and not a registry: give --registry a directory")
        foreign = min((entry.name for entry in path.iterdir() if entry.name not in HARMLESS), default=None)
    except OSError as error:
        raise RegistryError(
            f"{path}: {error.strerror}: give --registry a directory that can be read"
        ) from error
    if foreign is not None:
        raise UsageError(
            f"{path} is not a registry: it has other contents, such as {foreign!r}; give --registry the directory of "
            "a registry, or an empty or missing one"
        )


def check_present(root: Path) -> None:
    """Raise RegistryUnavailable if a registry's directory is gone: it must not look like one without variants."""
    if not is_registry(root):
        raise RegistryUnavailable(
            f"{root} is gone: mount its volume again",
            public="the registry's volume is gone: ask its operator to mount it again",
        )


def check_format(raw: bytes, where: str) -> None:
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
