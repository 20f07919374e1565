"""Lists of variants, each at one moment. A variant with damaged files is left out and logged. Changes nothing."""

from __future__ import annotations

import logging
from pathlib import Path

from deltastore.errors import RegistryError, VariantNotFound
from deltastore.registry.claims import Claims
from deltastore.registry.records import PUBLIC
from deltastore.registry.storage import Storage
from deltastore.registry.variants import History, Variant, VariantDirectory, directories

log = logging.getLogger(__name__)


class Listing:
    """The variants of a registry, read anew by each call."""

    def __init__(self, root: Path, claims: Claims, storage: Storage) -> None:
        self._variants = root / "variants"
        self._claims = claims
        self._storage = storage

    def of(self, tenant: str | None) -> list[Variant]:
        """Return a tenant's own variants by name; with None, those of all tenants."""
        return [
            variant
            for directory in directories(self._variants, self._storage, tenant)
            for variant in self._found(directory)
        ]

    def usable_by(self, tenant: str) -> list[Variant]:
        """Return a tenant's own variants and the public ones that these do not hide, by name."""
        found = {variant.name: variant for variant in self.of(PUBLIC)}
        for name in self._claims.names():
            found.update((name, variant) for variant in self._claimed(name))
        found.update((variant.name, variant) for variant in self.of(tenant))
        return [found[name] for name in sorted(found)]

    def shown(self, directory: VariantDirectory, history: History) -> Variant:
        """Return one variant; raises as `VariantDirectory.variant` does."""
        try:
            is_public = directory.tenant in (PUBLIC, self._claims.owner(directory.name))
        except RegistryError as error:
            log.error("the visibility of %s/%s is unknown: %s", directory.tenant, directory.name, error)
            is_public = False
        return directory.variant(history, "public" if is_public else "private")

    def _claimed(self, name: str) -> list[Variant]:
        """Return the variant that is public under a name, as a list of at most one."""
        try:
            owner = self._claims.owner(name)
        except RegistryError as error:
            log.error("the public variant %s is left out: %s", name, error)
            return []
        return (
            [] if owner is None else self._found(VariantDirectory(self._variants, owner, name, self._storage))
        )

    def _found(self, directory: VariantDirectory) -> list[Variant]:
        """Return a variant that has a live version, as a list of at most one."""
        try:
            history = directory.history()
            return [self.shown(directory, history)] if history.live else []
        except VariantNotFound:
            # It was deleted meanwhile.
            return []
        except RegistryError as error:
            log.error("variant %s/%s is left out: %s", directory.tenant, directory.name, error)
            return []
