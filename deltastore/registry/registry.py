"""The registry: artifacts, and the variants whose versions they are. Its class is the only way in.

Owns which changes are allowed and in which order they become durable. Must not know HTTP, keys, devices or an
artifact's contents. No change waits for a lock: `REGISTRY.md` describes how servers agree.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from deltastore.errors import UsageError, VariantNotFound, VariantQuarantined
from deltastore.registry.backend import Backend, ObjectWriter, open_backend
from deltastore.registry.claims import Claims, taken
from deltastore.registry.directory.backend import DirectoryBackend
from deltastore.registry.listing import Listing
from deltastore.registry.object_cache import ObjectCache
from deltastore.registry.records import (
    PUBLIC,
    ArtifactFacts,
    VariantState,
    VersionRecord,
    Visibility,
    check_names,
    is_name,
)
from deltastore.registry.reports import CheckReport, GcReport, Usage
from deltastore.registry.sequence import attempts
from deltastore.registry.storage import Storage
from deltastore.registry.uploads import SealedUpload, Upload
from deltastore.registry.variants import History, Variant, VariantDirectory


@dataclass(frozen=True, slots=True)
class Publication:
    """The result of publishing an upload."""

    record: VersionRecord
    created: bool  # False if the variant had a live version of these bytes, which is then `record`
    active_version: int | None


class Registry:
    """Variants and artifacts in one store, which any number of servers may share.

    Every method raises StorageFull or RegistryError if the store fails; to promote, delete or quarantine, a full disk
    has a reserve. A change that returned survives a crash. A change that raised happened entirely or not at all, and
    may be retried.
    """

    def __init__(self, place: Path | Backend, storage: Storage | None = None, *, make: bool = True) -> None:
        """Open a registry.

        Args:
            place: Its directory, or another store.
            storage: Changes the files of a directory.
            make: Create what is missing. Without it, nothing is read or written now: a process that another one has
                started must neither wait for a volume that hangs, nor make a registry where a volume is gone.
        """
        backend = DirectoryBackend(place, storage or Storage()) if isinstance(place, Path) else place
        self._backend: Backend = backend
        self.files = backend.files
        self._claims = Claims(self.files)
        self._listing = Listing(self.files)
        if make:
            backend.prepare()

    @property
    def root(self) -> Path:
        """The directory of a registry in a directory. Raises UsageError for a bucket."""
        if not isinstance(self._backend, DirectoryBackend):
            raise UsageError(f"{self._backend.location} is no directory: give --registry one for this")
        return self._backend.root

    @classmethod
    def open(cls, location: str, cache: ObjectCache | None = None, *, is_made: bool = True) -> Self:
        """Open the registry of `--registry`; arguments and errors are those of `open_backend`."""
        return cls(open_backend(location, cache, is_made=is_made))

    def open_upload(self, max_bytes: int | None) -> Upload:
        """Begin an upload. Use it as a context manager; write, seal and publish it inside the block."""
        return self._backend.open_upload(max_bytes)

    def publish(
        self, sealed: SealedUpload, facts: ArtifactFacts, *, tenant: str, name: str, activate: bool = True
    ) -> Publication:
        """Publish a sealed upload as the next version of a variant, in one atomic step.

        If a live version of this variant has the same bytes, it is returned instead and not activated.

        Raises:
            UsageError: A name is not allowed.
            ArtifactError: The facts cannot be stored.
        """
        check_names(tenant, name)
        directory = self._directory(tenant, name)
        with self._backend.explained(), self._backend.writing(sealed) as writer:
            directory.make()
            return self._publish(writer, sealed, facts, directory, activate)

    def variant(self, tenant: str, name: str) -> Variant:
        """Return the tenant's own variant of this name.

        Raises:
            VariantNotFound: It has no live version.
        """
        directory = self._readable(tenant, name)
        with self._backend.explained():
            history = directory.history()
            if not history.live:
                self._backend.check_present()
                raise directory.not_found()
            return self._listing.shown(directory, history)

    def variants(self, tenant: str | None = None) -> list[Variant]:
        """Return every variant, or only a tenant's own. A variant with damaged files is left out and logged."""
        with self._backend.explained():
            self._backend.check_present()
            return self._listing.of(tenant)

    def usable(self, tenant: str) -> list[Variant]:
        """Return what a tenant's requests may name: its own variants, and public ones that these do not hide."""
        with self._backend.explained():
            self._backend.check_present()
            return self._listing.usable_by(tenant)

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
        with self._backend.explained():
            for owner in (tenant,) if owned else self._owners(tenant, name):
                directory = self._readable(owner, name)
                if live := (history := directory.history()).live:
                    number = directory.active(history) if version is None else version
                    if number is None:
                        raise VariantNotFound(
                            f"variant {name!r} has no active version: promote one of {live}"
                        )
                    if number not in live:
                        raise directory.not_found(number)
                    record = directory.record(number)
                    self.check_not_quarantined(record)
                    return record
        self._backend.check_present()
        # Of the caller's own directory, whatever other tenants have.
        raise self._directory(tenant, name).not_found()

    def is_live(self, record: VersionRecord) -> bool:
        """True until a version is deleted, by any server. Reads one small file, so it may be called often.

        Raises:
            RegistryError: The variant's state is damaged, so its deleted versions are unknown.
        """
        with self._backend.explained():
            self._backend.check_present()
            return record.version in self._directory(record.tenant, record.name).history().live

    def activate(self, tenant: str, name: str, version: int) -> VersionRecord:
        """Make a version the active one, to promote or roll back.

        Raises:
            VariantNotFound: There is no such live version.
            VariantQuarantined: Its object was found corrupt.
        """

        def promoted(directory: VariantDirectory, history: History) -> VariantState:
            if version not in history.live:
                raise directory.not_found(version)
            self.check_not_quarantined(directory.record(version))
            previous = directory.previous(history, version)
            return replace(history.state, active=version, as_of=history.newest, previous=previous)

        return self._change(tenant, name, promoted).record(version)

    def delete(self, tenant: str, name: str, version: int | None = None) -> None:
        """Delete an inactive version, or the whole variant. gc frees the bytes; numbers are not assigned again.

        Raises:
            VariantNotFound: There is no such live variant or version.
            UsageError: The version is the active one.
        """

        def remaining(directory: VariantDirectory, history: History) -> VariantState:
            if version not in history.live:
                raise directory.not_found(version)
            active = directory.active(history)
            if version == active:
                raise UsageError(
                    f"version {version} of {name!r} is active: promote another, or delete the whole variant"
                )
            if history.live == [version]:
                # With its last version the variant ends, and with it its claim of a public name.
                return _nothing(directory, history)
            state = replace(history.state, deleted=(*history.state.deleted, version))
            previous = directory.previous(replace(history, state=state), active)
            return replace(state, active=active, as_of=history.newest, previous=previous)

        if version is None:
            # Deleting the whole variant is the way out of a damaged state.
            self._change(tenant, name, _nothing, ignore_damage=True)
        else:
            self._change(tenant, name, remaining)

    def set_visibility(self, tenant: str, name: str, visibility: Visibility) -> None:
        """Let every tenant use a tenant's variant, or this tenant alone. Running requests keep their version.

        Raises:
            VariantNotFound: It has no live version.
            PublicNameTaken: Another tenant's variant of this name is public.
            UsageError: It is of the tenant `public`, all of whose variants are.
        """
        directory = self._readable(tenant, name)
        with self._backend.explained():
            self._backend.check_present()
            directory.check_exists()
            directory.sync_names()
            history = directory.history()
            if not history.live:
                raise directory.not_found()
            if tenant == PUBLIC:
                if visibility == "private":
                    raise UsageError(
                        f"variants of the tenant {PUBLIC!r} are public: publish it for another tenant"
                    )
            elif visibility == "private":
                self._claims.release(directory)
            else:
                self.check_name_free(tenant, name)
                self._claims.claim(directory, history.state)

    def check_name_free(self, tenant: str, name: str) -> None:
        """Check that no other tenant's variant of this name is public.

        Raises:
            PublicNameTaken: One is.
        """
        with self._backend.explained():
            is_legacy = tenant != PUBLIC and self._readable(PUBLIC, name).history().live
            if is_legacy or self._claims.owner(name) not in (None, tenant):
                raise taken(name)

    def object_path(self, record: VersionRecord) -> Path:
        """Return the path of a version's bytes, unverified or missing. Read with length checks; do not map the file."""
        with self._backend.explained():
            return self._backend.object_path(record)

    def is_local(self, record: VersionRecord) -> bool:
        """True if `object_path` downloads nothing now: always in a directory, with a local copy in a bucket."""
        return self._backend.is_local(record)

    def quarantine(self, record: VersionRecord, reason: str, found_in: os.stat_result | None = None) -> bool:
        """Stop serving a corrupt object until its artifact is uploaded again; True if it is quarantined now.

        Args:
            record: A version that has the object.
            reason: The mismatch, for messages.
            found_in: The status of the file with the mismatch. If the object is no longer this file, because an upload
                replaced it or it was removed, it is left as it is. A quarantined object's bytes are kept as evidence.
        """
        with self._backend.explained():
            return self._backend.quarantine(record, reason, found_in)

    def recover(self, record: VersionRecord) -> bool:
        """Put an object back that a server was about to remove; False if there is none.

        Call it before an object counts as missing: a gc may have begun before a version of these bytes was published.
        """
        with self._backend.explained():
            return self._backend.recover(record)

    def is_quarantined(self, record: VersionRecord) -> bool:
        with self._backend.explained():
            return self._backend.is_quarantined(record)

    def check_not_quarantined(self, record: VersionRecord) -> None:
        """Check that a version's object may be served.

        Raises:
            VariantQuarantined: It was found corrupt.
        """
        if self.is_quarantined(record):
            label, reason = f"version {record.version} of {record.name!r}", self._backend.reason(record)
            raise VariantQuarantined(f"{label} is quarantined ({reason}): upload its artifact again")

    def probe(self) -> None:
        """Read files that no tenant owns, past all caches; raise RegistryUnavailable if that fails or they are gone."""
        with self._backend.explained():
            self._backend.probe()

    def usage(self) -> Usage:
        with self._backend.explained():
            return self._backend.usage()

    def gc(self, *, dry_run: bool = False) -> GcReport:
        """Remove objects without a live version, and leftovers of crashes.

        Raises:
            RegistryError: A record or state is damaged, so the objects in use are unknown; nothing was removed.
        """
        with self._backend.explained():
            return self._backend.collect(dry_run=dry_run)

    def remove_abandoned_uploads(self) -> int:
        """Remove the partial files of uploads whose process has died, and return their number."""
        with self._backend.explained():
            return self._backend.remove_abandoned_uploads()

    def check(self) -> CheckReport:
        """Read and check every file. Takes no lock and changes nothing, so servers go on meanwhile."""
        with self._backend.explained():
            return self._backend.check()

    def _publish(
        self,
        writer: ObjectWriter,
        sealed: SealedUpload,
        facts: ArtifactFacts,
        directory: VariantDirectory,
        activate: bool,
    ) -> Publication:
        for _ in attempts(directory.path):
            history = directory.history()
            known = directory.find(history, sealed.digest)
            record = known or directory.new_record(
                sealed, facts, history.newest + 1, activate, writer.stored_as
            )
            # Refuse a record that cannot be stored before its object is stored.
            record.to_json()
            writer.store(record, is_known=known is not None)
            if known is not None:
                directory.sync_names()
            elif not directory.add(record):
                continue
            writer.confirm()
            history = directory.history()
            if known is None or history.state.is_live(known.version):
                return Publication(record, known is None, directory.active(history))
        raise AssertionError("attempts() ends with an exception")

    def _change(
        self,
        tenant: str,
        name: str,
        decide: Callable[[VariantDirectory, History], VariantState],
        *,
        ignore_damage: bool = False,
    ) -> VariantDirectory:
        """Change a variant's state to what `decide` makes of its history. It is called again if another was first."""
        directory = self._readable(tenant, name)
        with self._backend.explained():
            self._backend.check_present()
            directory.check_exists()
            for _ in attempts(directory.path):
                # An answer, a refusal included, must not rest on names that a failed change left unsynced.
                directory.sync_names()
                history = directory.history(ignore_damage=ignore_damage)
                if directory.change(history, decide(directory, history)):
                    break
        return directory

    def _owners(self, tenant: str, name: str) -> Iterator[str]:
        """Yield the tenants whose variant a request for a name may mean, the first that has one first."""
        yield tenant
        owner = self._claims.owner(name)
        if owner not in (None, tenant):
            yield owner
        if tenant != PUBLIC:
            yield PUBLIC

    def _readable(self, tenant: str, name: str) -> VariantDirectory:
        directory = self._directory(tenant, name)
        if not (is_name(tenant) and is_name(name)):
            raise directory.not_found()
        return directory

    def _directory(self, tenant: str, name: str) -> VariantDirectory:
        return VariantDirectory(self.files, tenant, name)


def _nothing(directory: VariantDirectory, history: History) -> VariantState:
    """Return the state of a variant after its deletion."""
    if not history.live:
        raise directory.not_found()
    return VariantState(as_of=history.newest, deleted_through=history.newest)
