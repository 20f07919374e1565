"""Parts of a registry's contents as routes and metrics show them. Every function reads files."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from deltastore.errors import VariantNotFound
from deltastore.registry import Registry
from deltastore.registry.records import PUBLIC, VersionRecord, Visibility, is_name
from deltastore.registry.variants import DIRECTORY


@dataclass(frozen=True, slots=True)
class Stored:
    """The live versions of a tenant, and the bytes that they need."""

    num_versions: Mapping[str, int]  # by variant
    objects: Mapping[str, int]  # bytes by digest
    versions: frozenset[tuple[str, str]]  # name and digest of each

    def has(self, name: str, digest: str) -> bool:
        """True if a live version of the variant has these bytes."""
        return (name, digest) in self.versions


@dataclass(frozen=True, slots=True)
class VariantSummary:
    """A variant and the numbers of its live versions."""

    tenant: str
    name: str
    visibility: Visibility
    active: int | None
    previous: int | None
    numbers: tuple[int, ...]


def tenants(registry: Registry) -> list[str]:
    """Return the tenants that have published, sorted, from a listing."""
    return _subdirectories(registry, DIRECTORY)


def names(registry: Registry, tenant: str) -> list[str]:
    """Return the names under which a tenant has published, sorted, from a listing. One may have no live version."""
    return _subdirectories(registry, DIRECTORY, tenant)


def usable_names(registry: Registry, tenant: str) -> list[str]:
    """Return the names that a tenant's requests may use, sorted, from listings. One may mean nothing."""
    with registry._backend.explained():
        public = registry._claims.names()
    return sorted({*names(registry, PUBLIC), *public, *names(registry, tenant)})


def stored(registry: Registry, tenant: str) -> Stored:
    """Return what a tenant has stored."""
    found = [(variant.name, record) for variant in registry.variants(tenant) for record in variant.versions]
    return Stored(
        {variant: sum(name == variant for name, _ in found) for variant in {name for name, _ in found}},
        {record.digest: record.size_bytes for _, record in found},
        frozenset((name, record.digest) for name, record in found),
    )


def versions(registry: Registry, tenant: str, name: str, *, after: int, limit: int) -> list[VersionRecord]:
    """Return up to `limit` live versions of a variant whose numbers are above one. Reads no other records."""
    directory = registry._readable(tenant, name)
    with registry._backend.explained():
        numbers = [number for number in directory.history().live if number > after]
        return [directory.record(number) for number in numbers[:limit]]


def summary(registry: Registry, tenant: str, name: str) -> VariantSummary:
    """Return a tenant's own variant. Raises VariantNotFound if it has no live version."""
    directory = registry._readable(tenant, name)
    with registry._backend.explained():
        history = directory.history()
        if not history.live:
            registry._backend.check_present()
            raise directory.not_found()
        active = directory.active(history)
        previous = directory.previous(history, active)
        is_public = tenant in (PUBLIC, registry._claims.owner(name))
    visibility: Visibility = "public" if is_public else "private"
    return VariantSummary(tenant, name, visibility, active, previous, tuple(history.live))


def usable(registry: Registry, tenant: str, name: str) -> VariantSummary | None:
    """Return the variant that a tenant's requests mean by a name; None without one."""
    for owner in registry._owners(tenant, name):
        with suppress(VariantNotFound):
            return summary(registry, owner, name)
    return None


def report(record: VersionRecord) -> dict[str, Any]:
    """Return the report of a version's fidelity."""
    return record.fidelity


def _subdirectories(registry: Registry, *parts: str) -> list[str]:
    with registry._backend.explained():
        registry._backend.check_present()
        found = registry.files.subdirectories(registry.files.root.joinpath(*parts))
    return sorted(name for name in found if is_name(name))
