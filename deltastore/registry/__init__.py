"""The registry: a directory of artifacts and of the variants whose versions they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltastore.registry.registry import Deleted, Publication, Registry

__all__ = ["Deleted", "Publication", "Registry"]


def __getattr__(name: str) -> Any:
    # Deferred, so that `peraxis registry --help`, whose module is in this package, imports no registry.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from deltastore.registry import registry

    return getattr(registry, name)
