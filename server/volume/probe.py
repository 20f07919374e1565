"""Tells if a registry's volume or bucket answers, and if its directory may be written, without writing.

Asks for nothing that a tenant owns. Must not know what is done about the answer.
"""

from __future__ import annotations

import os
from pathlib import Path

from deltastore.errors import RegistryUnavailable, RegistryUnwritable
from deltastore.registry import Registry

# In a registry's directory. What is published is written there.
WRITTEN = ("uploads", "variants")


def probe(registry: Registry) -> None:
    """Read the registry's own files, and check a directory's rights.

    Raises:
        RegistryUnavailable: the registry cannot be read.
        RegistryUnwritable: it is in a directory, can be read, and cannot be written.
    """
    registry.probe()
    # Only writing would tell the rights on a bucket.
    if isinstance(root := registry.files.root, Path):
        _check_writable(root)


def _check_writable(root: Path) -> None:
    """Raise RegistryUnwritable if the directory cannot be written. A full disk is none: smaller files may fit."""
    try:
        if os.statvfs(root).f_flag & os.ST_RDONLY:
            raise RegistryUnwritable(
                f"{root} is read-only: mount its volume for writing",
                public="read-only: uploads and changes are refused; ask its operator to mount its volume for writing",
            )
    except OSError as error:
        raise RegistryUnavailable(
            f"{root}: {error.strerror}: check its volume",
            public=f"the registry's volume failed: {error.strerror}: ask its operator to check it",
        ) from error
    for name in WRITTEN:
        if not os.access(root / name, os.W_OK | os.X_OK):
            raise RegistryUnwritable(
                f"{root / name} cannot be written: give the server's user the right to",
                public="not writable: uploads and changes are refused; ask its operator to check the rights on it",
            )
