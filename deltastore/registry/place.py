"""Checks of a path that an operator names as a registry, before anything is made there. Opens no registry."""

from __future__ import annotations

from pathlib import Path

from deltastore.errors import RegistryError, UsageError
from deltastore.registry.directory.layout import FORMAT_FILE, LAYOUT, OF_SERVERS
from deltastore.registry.directory.reserve import DIRECTORY as RESERVE

SCHEME = "s3://"
# In a registry that another process is making now, or at the root of a volume that was just formatted.
HARMLESS = frozenset({*LAYOUT, *OF_SERVERS, FORMAT_FILE, RESERVE, "lost+found"})


def is_bucket(location: str) -> bool:
    """True if a value of `--registry` names a bucket and not a directory."""
    return location.startswith(SCHEME)


def is_registry(path: Path) -> bool:
    return (path / "variants").is_dir()


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
