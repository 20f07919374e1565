"""The artifact format, the registry on disk and the loader. Imports no other package of Peraxis and builds no model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltastore.base import Base
    from deltastore.format.artifact import Artifact
    from deltastore.registry.records import VersionRecord
    from deltastore.registry.registry import Registry

__all__ = ["Artifact", "Base", "Registry", "VersionRecord"]
_MODULES = {
    "Artifact": "deltastore.format.artifact",
    "Base": "deltastore.base",
    "Registry": "deltastore.registry.registry",
    "VersionRecord": "deltastore.registry.records",
}


def __getattr__(name: str) -> Any:
    # Deferred, because the artifact's module imports torch, which takes seconds.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
