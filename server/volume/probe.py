"""The smallest read of a registry that does what a resolution does, to tell whether its volume or bucket answers."""

from __future__ import annotations

import contextlib

from deltastore.errors import VariantNotFound
from deltastore.registry import Registry
from deltastore.registry.records import PUBLIC

# There need be no such variant.
NAME = "probe"


def probe(registry: Registry) -> None:
    """Resolve a name; raise RegistryUnavailable if the registry cannot be read."""
    with contextlib.suppress(VariantNotFound):
        registry.resolve(PUBLIC, NAME)
