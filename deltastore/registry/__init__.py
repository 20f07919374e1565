"""The registry: a directory of artifacts and of the variants whose versions they are."""

from deltastore.registry.registry import Deleted, Publication, Registry

__all__ = ["Deleted", "Publication", "Registry"]
