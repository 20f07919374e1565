"""Peraxis: many fine-tunes of one language model, served from one base. Importing this loads no other module of it.

Its packages `server`, `client`, `deltastore` and `compressor` are installed beside this one under those names, so a
module of the same name in another directory of `sys.path` would be taken for one of them.

Raises:
    ImportError: There is such a module.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

_PACKAGES = ("server", "client", "deltastore", "compressor")
_DIRECTORY = Path(__file__).resolve().parent.parent


def _check_packages() -> None:
    """Raise ImportError if one of the packages would be imported from another directory than this one's."""
    for name in _PACKAGES:
        spec, own = find_spec(name), _DIRECTORY / name / "__init__.py"
        if spec is None or spec.origin is None:
            raise ImportError(f"Peraxis' own package {name!r} is not in {_DIRECTORY}: install Peraxis again")
        if Path(spec.origin).resolve() != own:
            raise ImportError(
                f"{spec.origin} is imported in place of Peraxis' own package {name!r}: rename it, or start Python in "
                "another directory or with -P"
            )


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("peraxis")
    raise AttributeError(f"module 'peraxis' has no attribute {name!r}")


_check_packages()
