"""Everything that a registry is asked without changing it: versions, variants, and the names of both.

Names come from listings alone; a summary or a resolution reads a number of files that does not grow with a variant's
versions. `REGISTRY.md` says why what is read together belongs together.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from deltastore.errors import RegistryError, VariantNotFound, VariantQuarantined
from deltastore.registry.claims import Claims, taken
from deltastore.registry.records import Promotion, ReportFile, VersionRecord, Visibility, is_name
from deltastore.registry.store import SmallFiles, Store
from deltastore.registry.variants import (
    DIRECTORY,
    REPORTS,
    History,
    Variant,
    VariantDirectory,
    VariantSummary,
    directories,
    report_files,
    report_names,
)

T = TypeVar("T")

# Version numbers in a message.
MAX_SHOWN = 20

log = logging.getLogger(__name__)


# Names between two rests of a listing.
REST_NAMES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """The versions and bytes of a tenant. Publications under way count, and until a gc those that were cut short.

    Names and digests are their hashes, with a key of this process: 24 bytes for each version.
    """

    num_versions: int
    num_variants: int
    num_bytes: int  # of each artifact once
    _names: array[int]  # of each version, sorted
    _versions: array[int]  # name and digest of each, sorted
    _digests: array[int]  # sorted

    @classmethod
    def of(cls, files: Iterable[ReportFile]) -> Stored:
        """Count the versions that reports belong to."""
        # The supervisor imports this module and counts nothing.
        import numpy as np

        numbers, names, versions, digests, sizes = (array("q") for _ in range(5))
        for file in files:
            numbers.append(hash((file.name, file.version)))
            names.append(hash(file.name))
            versions.append(hash((file.name, file.digest)))
            digests.append(hash(file.digest))
            sizes.append(file.size_bytes)
        # A publication that is under way may have the number of another one.
        _, first = np.unique(np.asarray(numbers), return_index=True)
        own = np.asarray(names)[first]
        distinct, first_of = np.unique(np.asarray(digests), return_index=True)
        return cls(
            len(own),
            len(np.unique(own)),
            int(np.asarray(sizes)[first_of].sum()),
            array("q", np.sort(own).tobytes()),
            array("q", np.unique(np.asarray(versions)).tobytes()),
            array("q", distinct.tobytes()),
        )

    def num_versions_of(self, name: str) -> int:
        """Return the number of versions of a variant."""
        key = hash(name)
        return bisect_right(self._names, key) - bisect_left(self._names, key)

    def has(self, name: str, digest: str) -> bool:
        """True if a version of the variant has these bytes."""
        return _has(self._versions, hash((name, digest)))

    def has_artifact(self, digest: str) -> bool:
        """True if a version of any variant has these bytes."""
        return _has(self._digests, hash(digest))


def _has(keys: array[int], key: int) -> bool:
    index = bisect_left(keys, key)
    return index < len(keys) and keys[index] == key


def _with_rests(files: Iterable[ReportFile], rest: Callable[[], None]) -> Iterator[ReportFile]:
    for number, file in enumerate(files, 1):
        yield file
        if number % REST_NAMES == 0:
            rest()


class RegistryReader:
    """The reading calls of `Registry`, whose errors they raise."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._claims = Claims(store.files)
        self.files = store.files

    def probe(self) -> None:
        """Read the registry's own files by calls that no cache answers. Resolves no name.

        Raises:
            RegistryUnavailable: They cannot be read, or are gone.
        """
        with self._store.explained():
            self._store.probe()

    def tenants(self) -> list[str]:
        """Return the sorted tenants that have published, from one listing."""
        with self._store.explained():
            self.files.check_present()
            return [name for name in self.files.subdirectories(self.files.root / REPORTS) if is_name(name)]

    def stored(self, tenant: str, rest: Callable[[], None] = lambda: None) -> Stored:
        """Return what a tenant stores, from one listing, of which no list is made.

        Args:
            tenant: The tenant.
            rest: Called now and then, as the names of a tenant may be many.
        """
        with self._store.explained():
            self.files.check_present()
            files = report_files(self.files, tenant) if is_name(tenant) else ()
            return Stored.of(_with_rests(files, rest))

    def names(self, tenant: str) -> list[str]:
        """Return the sorted names of a tenant's variants, from one listing. One may have no live version."""
        with self._store.explained():
            self.files.check_present()
            return report_names(self.files, tenant) if is_name(tenant) else []

    def public_names(self) -> list[str]:
        """Return the sorted names of variants that every tenant may use, from one listing. One may mean nothing."""
        with self._store.explained():
            self.files.check_present()
            return self._claims.public_names()

    def summary(self, tenant: str, name: str) -> VariantSummary:
        """Return the tenant's own variant of this name without its records.

        Raises:
            VariantNotFound: It has no live version.
        """
        with self._store.explained():
            summary = self._summary(tenant, name)
            if summary is None:
                self.files.check_present()
                raise self._directory(tenant, name).not_found()
            return summary

    def summaries(self, tenant: str, names: Sequence[str]) -> list[VariantSummary]:
        """Return a tenant's variants of some names.

        A name without a live version is left out; so is a variant with damaged files, which is logged.
        """
        return self._each(tenant, names, partial(self._summary, tenant))

    def active_records(self, tenant: str, names: Sequence[str]) -> list[VersionRecord]:
        """Return the active versions that some names mean in a tenant's requests.

        A name without one is left out; so is a variant with damaged files, which is logged.
        """

        def read(name: str) -> VersionRecord | None:
            for owner in self._owners(tenant, name):
                if (record := _resolved(self._readable(owner, name), None)) is not None:
                    return record
            return None

        return self._each(tenant, names, read)

    def variant(self, tenant: str, name: str) -> Variant:
        """Return the tenant's own variant of this name with the records of all its versions.

        Raises:
            VariantNotFound: It has no live version.
        """
        directory = self._readable(tenant, name)
        with self._store.explained():
            variant = self._settled_variant(directory)
            if not variant.versions:
                self.files.check_present()
                raise directory.not_found()
            return variant

    def versions(self, tenant: str, name: str, *, after: int = 0, limit: int) -> list[VersionRecord]:
        """Return the records of at most `limit` live versions above a number, the oldest first.

        Raises:
            VariantNotFound: The variant has no live version.
        """
        directory = self._readable(tenant, name)

        def read(history: History) -> list[VersionRecord]:
            if not history.live:
                raise directory.not_found()
            numbers = [number for number in history.live if number > after]
            return self.files.each(directory.record, numbers[:limit])

        with self._store.explained():
            self.files.check_present()
            return directory.settled(read)

    def promotions(self, tenant: str, name: str) -> list[Promotion]:
        """Return the promotions of a variant that its entries remember, newest first.

        Raises:
            VariantNotFound: It never had a version.
        """
        directory = self._readable(tenant, name)
        with self._store.explained():
            self.files.check_present()
            directory.check_exists()
            return directory.promotions()

    def variants(self, tenant: str | None = None) -> list[Variant]:
        """Return every variant with all records, or only a tenant's own. A variant with damaged files is logged.

        It reads every record, so it is for commands and not for requests.
        """
        with self._store.explained():
            self.files.check_present()
            root = self.files.root / DIRECTORY
            files = self.files.listed(root if tenant is None else root / tenant, self._claims.directory)
            return [
                variant
                for directory in directories(files, tenant)
                for variant in self._found(directory, files)
            ]

    def report(self, record: VersionRecord) -> bytes:
        """Return a version's fidelity report, a JSON object; an empty one if it cannot be read."""
        with self._store.explained():
            return self._directory(record.tenant, record.name).report(record)

    def resolve(
        self, tenant: str, name: str, version: int | None = None, *, owned: bool = False
    ) -> VersionRecord:
        """Return the version that a request means. A tenant's own variant hides a public one of the same name.

        Args:
            tenant: The tenant of the request.
            name: The variant's name.
            version: The number of a pinned version; None for the active one.
            owned: Leave out public variants of other tenants.

        Raises:
            VariantNotFound: There is no such variant or version, this tenant may not use it, or none is active.
            VariantQuarantined: Its object was found corrupt.
        """
        with self._store.explained():
            for owner in (tenant,) if owned else self._owners(tenant, name):
                if (record := _resolved(self._readable(owner, name), version)) is not None:
                    self.check_not_quarantined(record)
                    return record
        self.files.check_present()
        # The error is that of the caller's own directory, whatever other tenants have.
        raise self._directory(tenant, name).not_found()

    def is_live(self, record: VersionRecord) -> bool:
        """True until a version is deleted, by any server. Reads one small file, so it may be called often.

        Raises:
            RegistryError: The variant's state is damaged, so its deleted versions are unknown.
        """
        with self._store.explained():
            self.files.check_present()
            return self._directory(record.tenant, record.name).history().is_live(record.version)

    def check_name_free(self, tenant: str, name: str) -> None:
        """Check that no other tenant's variant of this name is public.

        Raises:
            PublicNameTaken: One is.
        """
        with self._store.explained():
            if self._claims.owner(name) not in (None, tenant):
                raise taken(name)

    def is_quarantined(self, record: VersionRecord) -> bool:
        with self._store.explained():
            return self._store.objects.is_quarantined(record)

    def check_not_quarantined(self, record: VersionRecord) -> None:
        """Check that a version's object may be served.

        Raises:
            VariantQuarantined: It was found corrupt.
        """
        if self.is_quarantined(record):
            label, reason = f"version {record.version} of {record.name!r}", self._store.objects.reason(record)
            raise VariantQuarantined(f"{label} is quarantined ({reason}): upload its artifact again")

    def _owners(self, tenant: str, name: str) -> Iterator[str]:
        """Yield the tenants whose variant a request for a name may mean, the first that has one first."""
        yield tenant
        owner = self._claims.owner(name)
        if owner is not None and owner != tenant:
            yield owner

    def _summary(self, tenant: str, name: str) -> VariantSummary | None:
        """Return a variant; None if it has no live version."""
        directory = self._readable(tenant, name)
        found = directory.settled(lambda history: directory.summary(history, "private"))
        if not found.numbers:
            return None
        return replace(found, visibility=self._visibility(directory, self._claims))

    def _each(self, tenant: str, names: Sequence[str], read: Callable[[str], T | None]) -> list[T]:
        """Return what `read` finds of a tenant's names."""

        def found(name: str) -> T | None:
            try:
                return read(name)
            except VariantNotFound:
                return None
            except RegistryError as error:
                log.error("variant %s/%s is left out: %s", tenant, name, error)
                return None

        with self._store.explained():
            self.files.check_present()
            results = self.files.each(found, names)
        return [result for result in results if result is not None]

    def _settled_variant(self, directory: VariantDirectory) -> Variant:
        visibility = self._visibility(directory, self._claims)
        return directory.settled(lambda history: directory.variant(history, visibility))

    def _found(self, directory: VariantDirectory, files: SmallFiles) -> list[Variant]:
        """Return a variant that has a live version, as a list of at most one."""
        try:
            try:
                visibility = self._visibility(directory, Claims(files))
                variant = directory.variant(directory.history(), visibility)
            except VariantNotFound:
                # A version was deleted since the listing.
                variant = self._settled_variant(self._directory(directory.tenant, directory.name))
        except (RegistryError, VariantNotFound) as error:
            log.error("variant %s/%s is left out: %s", directory.tenant, directory.name, error)
            return []
        return [variant] if variant.versions else []

    def _visibility(self, directory: VariantDirectory, claims: Claims) -> Visibility:
        try:
            return "public" if claims.owner(directory.name) == directory.tenant else "private"
        except RegistryError as error:
            log.error("the visibility of %s/%s is unknown: %s", directory.tenant, directory.name, error)
            return "private"

    def _readable(self, tenant: str, name: str) -> VariantDirectory:
        directory = self._directory(tenant, name)
        if not (is_name(tenant) and is_name(name)):
            raise directory.not_found()
        return directory

    def _directory(self, tenant: str, name: str) -> VariantDirectory:
        return VariantDirectory(self.files, tenant, name)


def _resolved(directory: VariantDirectory, version: int | None) -> VersionRecord | None:
    """Return a variant's active version or that of a number; None if it has no live version."""

    def read(history: History) -> VersionRecord | None:
        if not history.live:
            return None
        number = directory.active(history) if version is None else version
        if number is None:
            raise VariantNotFound(
                f"variant {directory.name!r} has no active version: promote one of {_some(history.live)}"
            )
        if version is not None and not history.is_live(version):
            raise directory.not_found(version)
        return directory.record(number)

    return directory.settled(read)


def _some(numbers: Sequence[int]) -> str:
    """Return version numbers for a message, the newest if there are many."""
    return (
        f"{list(numbers)}" if len(numbers) <= MAX_SHOWN else f"{list(numbers[-MAX_SHOWN:])} or an older one"
    )
