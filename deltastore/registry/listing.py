"""Lists of variants, each at one moment. A variant with damaged files is left out and logged. Changes nothing."""

from __future__ import annotations

import logging
from pathlib import PurePath

from deltastore.errors import RegistryError, VariantNotFound
from deltastore.registry.claims import Claims
from deltastore.registry.files import SmallFiles
from deltastore.registry.records import PUBLIC
from deltastore.registry.variants import DIRECTORY, History, Variant, VariantDirectory, directories

log = logging.getLogger(__name__)


class Listing:
    """The variants of a registry, read anew by each call."""

    def __init__(self, files: SmallFiles) -> None:
        self._claims = Claims(files)
        self._variants = files.root / DIRECTORY
        self._files = files

    def of(self, tenant: str | None) -> list[Variant]:
        """Return a tenant's own variants by name; with None, those of all tenants."""
        listed = self._listed(self._variants if tenant is None else self._variants / tenant)
        return [
            variant
            for directory in directories(listed._files, tenant)
            for variant in listed._found(directory)
        ]

    def usable_by(self, tenant: str) -> list[Variant]:
        """Return a tenant's own variants and the public ones that these do not hide, by name."""
        listed = self._listed(self._variants / PUBLIC, self._variants / tenant)
        found = {variant.name: variant for variant in listed.of(PUBLIC)}
        for name in listed._claims.names():
            found.update((name, variant) for variant in listed._claimed(name))
        found.update((variant.name, variant) for variant in listed.of(tenant))
        return [found[name] for name in sorted(found)]

    def shown(self, directory: VariantDirectory, history: History) -> Variant:
        """Return one variant; raises as `VariantDirectory.variant` does."""
        try:
            is_public = directory.tenant in (PUBLIC, self._claims.owner(directory.name))
        except RegistryError as error:
            log.error("the visibility of %s/%s is unknown: %s", directory.tenant, directory.name, error)
            is_public = False
        return directory.variant(history, "public" if is_public else "private")

    def _listed(self, *variants: PurePath) -> Listing:
        """Return this listing with files that read directories of variants, and the claims, in few calls."""
        return Listing(self._files.listed(*variants, self._claims.directory))

    def _claimed(self, name: str) -> list[Variant]:
        """Return the variant that is public under a name, as a list of at most one."""
        try:
            owner = self._claims.owner(name)
        except RegistryError as error:
            log.error("the public variant %s is left out: %s", name, error)
            return []
        return [] if owner is None else self._found(VariantDirectory(self._files, owner, name))

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
