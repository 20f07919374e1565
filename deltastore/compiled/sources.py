"""The source files that compiled code was made from. Imports no numba: a server on CUDA runs without it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Sources:
    """The Python files of one folder when its package was imported, before the modules in it.

    Functions that numba compiles may inline functions and constants of their own folder only.
    """

    folder: Path
    digest: str  # hex

    @classmethod
    def of(cls, folder: Path) -> Sources:
        """Read the files of `folder`."""
        return cls(folder, _digest(folder))

    def are_unchanged(self) -> bool:
        """Return False if a file was replaced: what has been imported may then be of the old files or of the new."""
        return _digest(self.folder) == self.digest


def _digest(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        content = path.read_bytes()
        total.update(f"{path.name} {len(content)}\n".encode() + content)
    return total.hexdigest()
