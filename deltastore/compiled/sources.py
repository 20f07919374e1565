"""The source files that compiled code was made from. Imports no numba: a server on CUDA runs without it."""

from __future__ import annotations

import hashlib
import marshal
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path

# Later formats contain references, which depend on what else the process has loaded.
MARSHAL_FORMAT = 2


@dataclass(frozen=True, slots=True)
class Sources:
    """The Python files of one folder when its package was imported, before the modules in it.

    Functions that numba compiles may inline functions and constants of their own folder only.
    """

    folder: Path
    # The digest is that of the code that an import runs, which is not that of the text when Python takes an outdated
    # .pyc file for new.
    digest: str
    text_digest: str

    @classmethod
    def of(cls, folder: Path) -> Sources:
        """Read the files of `folder`."""
        code = hashlib.sha256()
        for path in _paths(folder):
            loaded = SourceFileLoader(path.stem, str(path)).get_code(path.stem)
            code.update(f"{path.name}\n".encode() + marshal.dumps(loaded, MARSHAL_FORMAT))
        return cls(folder, code.hexdigest(), _text_digest(folder))

    def are_known(self) -> bool:
        """Return False if a file was replaced since, or if there are none, as in a zip archive.

        It is then unknown which files the imported functions are of.
        """
        return bool(_paths(self.folder)) and _text_digest(self.folder) == self.text_digest


def _paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.py"))


def _text_digest(folder: Path) -> str:
    text = hashlib.sha256()
    for path in _paths(folder):
        content = path.read_bytes()
        text.update(f"{path.name} {len(content)}\n".encode() + content)
    return text.hexdigest()
