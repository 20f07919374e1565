"""The registry: a directory of artifacts and of the variants whose versions they are. Its class is the only way in.

Owns which changes are allowed and in which order they become durable. Must not know HTTP, keys, devices or an
artifact's contents. No change waits for a lock: `REGISTRY.md` describes how servers agree.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from deltastore.errors import RegistryError, UsageError, VariantNotFound, VariantQuarantined
from deltastore.registry.check import CheckReport, check
from deltastore.registry.claims import Claims, taken
from deltastore.registry.collect import Collector, GcReport, collect_partials
from deltastore.registry.layout import check_present, make_layout
from deltastore.registry.listing import Listing
from deltastore.registry.objects import Objects, Usage
from deltastore.registry.records import (
    PUBLIC,
    ArtifactFacts,
    VariantState,
    VersionRecord,
    Visibility,
    check_names,
    is_name,
)
from deltastore.registry.reserve import Reserve
from deltastore.registry.sequence import attempts
from deltastore.registry.storage import Storage, explained
from deltastore.registry.uploads import SealedUpload, Upload
from deltastore.registry.variants import History, Variant, VariantDirectory


@dataclass(frozen=True, slots=True)
class Publication:
    """The result of publishing an upload."""

    record: VersionRecord
    created: bool  # False if the variant had a live version of these bytes, which is then `record`
    active_version: int | None


class Registry:
    """Variants and artifacts under one directory, which any number of servers may share.

    Every method raises StorageFull or RegistryError if the disk fails; to promote, delete or quarantine, a full disk
    has a reserve. A change that returned survives a crash. A change that raised happened entirely or not at all, and
    may be retried.
    """

    def __init__(self, root: Path, storage: Storage | None = None) -> None:
        """Open a registry and create its missing directories."""
        self.root = root.absolute()
        self._storage = storage or Storage()
        self._objects = Objects(self.root, self._storage)
        self._reserve = Reserve(self.root, self._storage)
        self._claims = Claims(self.root, self._storage)
        self._listing = Listing(self.root, self._claims, self._storage)
        self._collector = Collector(self.root, self._objects, self._reserve, self._storage)
        with explained(self.root):
            make_layout(self.root, self._storage)
        self._reserve.fill()

    def open_upload(self, max_bytes: int | None) -> Upload:
        """Begin an upload. Use it as a context manager; write, seal and publish it inside the block."""
        return Upload(self.root, self._storage, max_bytes)

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
        with explained(self.root):
            try:
                directory.make()
                return self._publish(sealed, facts, directory, activate)
            except (OSError, RegistryError):
                with contextlib.suppress(OSError, RegistryError):
                    self._collector.withdraw(sealed.digest, sealed.path)
                raise

    def variant(self, tenant: str, name: str) -> Variant:
        """Return the tenant's own variant of this name.

        Raises:
            VariantNotFound: It has no live version.
        """
        directory = self._readable(tenant, name)
        with explained(self.root):
            history = directory.history()
            if not history.live:
                check_present(self.root)
                raise directory.not_found()
            return self._listing.shown(directory, history)

    def variants(self, tenant: str | None = None) -> list[Variant]:
        """Return every variant, or only a tenant's own. A variant with damaged files is left out and logged."""
        with explained(self.root):
            check_present(self.root)
            return self._listing.of(tenant)

    def usable(self, tenant: str) -> list[Variant]:
        """Return what a tenant's requests may name: its own variants, and public ones that these do not hide."""
        with explained(self.root):
            check_present(self.root)
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
        with explained(self.root):
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
        check_present(self.root)
        # Of the caller's own directory, whatever other tenants have.
        raise self._directory(tenant, name).not_found()

    def is_live(self, record: VersionRecord) -> bool:
        """True until a version is deleted, by any server. Reads one small file, so it may be called often.

        Raises:
            RegistryError: The variant's state is damaged, so its deleted versions are unknown.
        """
        with explained(self.root):
            check_present(self.root)
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
        with explained(self.root):
            check_present(self.root)
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
        with explained(self.root):
            is_legacy = tenant != PUBLIC and self._readable(PUBLIC, name).history().live
            if is_legacy or self._claims.owner(name) not in (None, tenant):
                raise taken(name)

    def object_path(self, digest: str) -> Path:
        """Return the path of an artifact's bytes. Read them with length checks; do not map the file."""
        return self._objects.path(digest)

    def quarantine(self, digest: str, reason: str, found_in: os.stat_result | None = None) -> bool:
        """Stop serving a corrupt object and keep its bytes as evidence. Uploading the artifact again ends it.

        Args:
            digest: The object's digest.
            reason: The mismatch, for messages.
            found_in: The status of the file with the mismatch. If the object is no longer this file, because an upload
                replaced it or it was removed, it is left as it is.

        Returns:
            True if the object is quarantined now.
        """
        with explained(self.root):
            return self._objects.quarantine(digest, reason, found_in, self._reserve)

    def recover(self, digest: str) -> bool:
        """Put an object back that a server was about to remove; False if there is none.

        Call it before an object counts as missing: a gc may have begun before a version of these bytes was published.
        """
        with explained(self.root):
            return self._objects.recover(digest)

    def is_quarantined(self, digest: str) -> bool:
        return self._objects.is_quarantined(digest)

    def check_not_quarantined(self, record: VersionRecord) -> None:
        """Check that a version's object may be served.

        Raises:
            VariantQuarantined: It was found corrupt.
        """
        if self._objects.is_quarantined(record.digest):
            raise VariantQuarantined(
                f"version {record.version} of {record.name!r} is quarantined "
                f"({self._objects.reason(record.digest)}): upload its artifact again"
            )

    def usage(self) -> Usage:
        with explained(self.root):
            return self._objects.usage()

    def gc(self, *, dry_run: bool = False) -> GcReport:
        """Remove objects without a live version, and leftovers of crashes.

        Raises:
            RegistryError: A record or state is damaged, so the objects in use are unknown; nothing was removed.
        """
        with explained(self.root):
            report = self._collector.collect(dry_run=dry_run)
            if not dry_run:
                self._reserve.fill()
            return report

    def remove_abandoned_uploads(self) -> int:
        """Remove the partial files of uploads whose process has died, and return their number."""
        with explained(self.root):
            return collect_partials(self.root / "uploads", self._storage, dry_run=False)[0]

    def check(self) -> CheckReport:
        """Read and check every file. Takes no lock and changes nothing, so servers go on meanwhile."""
        with explained(self.root):
            return check(self.root, self._objects, self._storage)

    def _publish(
        self, sealed: SealedUpload, facts: ArtifactFacts, directory: VariantDirectory, activate: bool
    ) -> Publication:
        for _ in attempts(directory.path):
            history = directory.history()
            known = directory.find(history, sealed.digest)
            record = known or directory.new_record(sealed, facts, history.newest + 1, activate)
            # Refuse a record that cannot be stored before its object is stored.
            record.to_json()
            self._objects.put(sealed)
            if known is not None:
                directory.sync_names()
            elif not directory.add(record):
                continue
            # A gc that began before there was this record may have removed the object.
            self._objects.ensure(sealed)
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
        with explained(self.root):
            check_present(self.root)
            directory.check_exists()
            for _ in attempts(directory.path):
                # An answer, a refusal included, must not rest on names that a failed change left unsynced.
                directory.sync_names()
                history = directory.history(ignore_damage=ignore_damage)
                if directory.change(history, decide(directory, history), self._reserve):
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
        return VariantDirectory(self.root / "variants", tenant, name, self._storage)


def _nothing(directory: VariantDirectory, history: History) -> VariantState:
    """Return the state of a variant after its deletion."""
    if not history.live:
        raise directory.not_found()
    return VariantState(as_of=history.newest, deleted_through=history.newest)
