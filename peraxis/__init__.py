"""Peraxis: many fine-tunes of one language model, served from one base.

`compress`, `open`, `merge` and `evaluate` make deltas and look into them; `attach` puts them into a model of
transformers; `Client` and `AsyncClient` talk to a server.
Importing this loads no other module of Peraxis: each comes with the first name that needs it.

Its packages `server`, `client`, `deltastore` and `compressor` are installed beside this one under those names, so a
module of the same name in another directory of `sys.path` would be taken for one of them.

Raises:
    ImportError: There is such a module.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from client.client import AsyncClient, Client
    from peraxis.artifact import Artifact
    from peraxis.library import attach, compress, evaluate, merge, open

__all__ = ["Artifact", "AsyncClient", "Client", "attach", "compress", "evaluate", "merge", "open"]

_MODULES = {
    "Artifact": "peraxis.artifact",
    "AsyncClient": "client.client",
    "Client": "client.client",
    "attach": "peraxis.library",
    "compress": "peraxis.library",
    "evaluate": "peraxis.library",
    "merge": "peraxis.library",
    "open": "peraxis.library",
}
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
    if name not in _MODULES:
        raise AttributeError(f"module 'peraxis' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_check_packages()
