"""The registry: artifacts, and the variants whose versions they are. Its class is the only way in; `reader.py` reads.

Owns which changes are allowed and in which order they become durable. Must not know HTTP, keys, devices or an
artifact's contents. No change waits for a lock: `REGISTRY.md` describes how servers agree.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Self, TypeVar

from deltastore.errors import (
    ActiveVersionChanged,
    PeraxisError,
    RegistryError,
    RegistryUnavailable,
    UsageError,
    VariantNotFound,
)
from deltastore.registry.claims import is_bucket, is_registry
from deltastore.registry.directory.store import DirectoryStore
from deltastore.registry.object_cache import ObjectCache
from deltastore.registry.reader import RegistryReader
from deltastore.registry.records import (
    ArtifactFacts,
    CheckReport,
    GcReport,
    Usage,
    VariantState,
    VersionRecord,
    Visibility,
    check_names,
    report_to_json,
)
from deltastore.registry.storage import Storage
from deltastore.registry.store import ObjectWriter, Store
from deltastore.registry.uploads import SealedUpload, Upload
from deltastore.registry.variants import History, VariantDirectory, attempts

T = TypeVar("T")

# Readings that fail before the others of one call are left out.
MAX_FAILURES = 3


@dataclass(frozen=True, slots=True)
class Publication:
    """The result of publishing an upload."""

    record: VersionRecord
    created: bool  # False if the variant had a live version of these bytes, which is then `record`
    active_version: int | None


@dataclass(frozen=True, slots=True)
class Deleted:
    """The versions that one call has deleted."""

    versions: list[int]
    records: list[VersionRecord]  # of those that could be read


@dataclass(frozen=True, slots=True)
class Deletion:
    """A state that has deleted versions, and what was there before."""

    versions: list[int]
    history: History
    state: VariantState


class Registry(RegistryReader):
    """Variants and artifacts in one store, which any number of servers may share.

    Every method raises StorageFull, RegistryUnavailable or RegistryError if the store fails; to promote, delete or
    quarantine, a full disk has a reserve. A change that returned survives a crash. A change that raised happened
    entirely or not at all, and may be retried.
    """

    def __init__(self, place: Path | Store, storage: Storage | None = None, *, make: bool = True) -> None:
        """Open a registry.

        Args:
            place: Its directory, or another store.
            storage: Changes the files of a directory.
            make: Create what is missing. Without it, nothing is read or written now: a process that another one has
                started must neither wait for a volume that hangs, nor make a registry where a volume is gone.
        """
        store: Store = DirectoryStore(place, storage or Storage()) if isinstance(place, Path) else place
        super().__init__(store)
        if make:
            store.prepare()

    @property
    def root(self) -> Path:
        """The directory of a registry in a directory. Raises UsageError for a bucket."""
        if not isinstance(root := self.files.root, Path):
            raise UsageError(f"{self.files.location} is no directory: give --registry one for this")
        return root

    @classmethod
    def open(
        cls, location: str, cache: ObjectCache | None = None, *, is_made: bool = True, make: bool = True
    ) -> Self:
        """Open the registry that a location names: a directory, or a bucket as `s3://BUCKET/PREFIX`.

        Args:
            location: The value of `--registry`.
            cache: This machine's copies of a bucket's objects; a directory needs none.
            is_made: A registry that is missing will be made.
            make: As for the class.

        Raises:
            UsageError: The location is malformed or no registry, or a bucket's cache or library is missing.
            RegistryUnavailable: The bucket is no registry, or cannot be reached.
        """
        if not is_bucket(location):
            if not is_made and not is_registry(Path(location)):
                raise UsageError(
                    f"{location} is not a registry: give the directory that `peraxis serve --registry` was given"
                )
            return cls(Path(location), make=make)
        if cache is None:
            raise UsageError(f"{location} needs a cache on a local disk: give --registry-cache a directory")
        try:
            from deltastore.registry.bucket.store import BucketStore
        except ModuleNotFoundError as error:
            raise UsageError(f"{location} needs obstore: run `pip install 'peraxis[s3]'`") from error
        store = BucketStore.open(location, cache)
        if not is_made:
            store.files.check_present()
        return cls(store, make=make)

    def open_upload(self, max_bytes: int | None) -> Upload:
        """Begin an upload. Use it as a context manager; write, seal and publish it inside the block."""
        return self._store.uploads.open(max_bytes)

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
        with self._store.explained(), self._store.writing(sealed) as writer:
            directory.make()
            return self._publish(writer, sealed, facts, directory, activate)

    def activate(
        self, tenant: str, name: str, version: int, *, if_active: int | None = None, key_id: str | None = None
    ) -> VersionRecord:
        """Make a version the active one, to promote or roll back.

        Args:
            tenant: The owner.
            name: Of the variant.
            version: The number of a live version.
            if_active: The number that must be active now, 0 for no active version; None changes whatever is.
            key_id: Of the caller, for the history.

        Raises:
            VariantNotFound: There is no such live version.
            VariantQuarantined: Its object was found corrupt.
            ActiveVersionChanged: Another version than `if_active` is active.
        """

        def promoted(directory: VariantDirectory, history: History) -> tuple[VariantState, VersionRecord]:
            if not history.is_live(version):
                raise directory.not_found(version)
            record = directory.record(version)
            self.check_not_quarantined(record)
            if if_active is not None and (active := directory.active(history) or 0) != if_active:
                now = f"version {active} is" if active else "no version is"
                raise ActiveVersionChanged(
                    f"{now} active now, and not {if_active or 'none'}: look at {name!r} again before you promote"
                )
            state = replace(
                history.state,
                active=version,
                as_of=history.newest,
                previous=directory.previous(history, version),
                promoted_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
                promoted_by=key_id,
            )
            return state, record

        return self._change(tenant, name, promoted)

    def delete(self, tenant: str, name: str, version: int | None = None) -> Deleted:
        """Delete an inactive version, or the whole variant. gc frees the bytes; numbers are not assigned again.

        Returns the versions that it took: one that was published right before is among them.

        Raises:
            VariantNotFound: There is no such live variant or version.
            UsageError: The version is the active one.
        """

        def remaining(directory: VariantDirectory, history: History) -> tuple[VariantState, Deletion]:
            if version is None:
                return _nothing(directory, history)
            if not history.is_deletable(version):
                raise directory.not_found(version)
            active = directory.active(history)
            if version == active:
                raise UsageError(
                    f"version {version} of {name!r} is active: promote another, or delete the whole variant"
                )
            if history.live == (version,):
                # With its last version the variant ends, and with it its claim of a public name.
                return _nothing(directory, history)
            state = history.state.without(version)
            previous = directory.previous(replace(history, state=state), active)
            state = replace(
                state,
                active=active,
                as_of=history.newest,
                previous=previous,
                promoted_at=None,
                promoted_by=None,
            )
            return state, Deletion([version], history, state)

        # Deleting the whole variant is the way out of a damaged state.
        deletion = self._change(tenant, name, remaining, ignore_damage=version is None)
        directory = self._directory(tenant, name)
        records = self._found_records(directory, deletion.versions)
        # The deletion is done; what is left of it is for gc.
        with contextlib.suppress(OSError, PeraxisError):
            directory.remove_deleted(deletion.history, deletion.state)
        if deletion.state.deleted_through == deletion.history.newest:
            self._claims.remove_index(name)
        return Deleted(deletion.versions, records)

    def set_visibility(self, tenant: str, name: str, visibility: Visibility) -> None:
        """Let every tenant use a tenant's variant, or this tenant alone. Running requests keep their version.

        Raises:
            VariantNotFound: It has no live version.
            PublicNameTaken: Another tenant's variant of this name is public.
        """
        directory = self._readable(tenant, name)
        with self._store.explained():
            self.files.check_present()
            directory.check_exists()
            directory.sync_names()
            history = directory.history()
            if not history.live:
                raise directory.not_found()
            if visibility == "private":
                self._claims.release(directory)
            else:
                self.check_name_free(tenant, name)
                self._claims.claim(directory, history.state)

    def object_path(self, record: VersionRecord) -> Path:
        """Return the path of a version's bytes, unverified or missing. Read with length checks; do not map the file."""
        with self._store.explained():
            return self._store.objects.local_path(record)

    def is_local(self, record: VersionRecord) -> bool:
        """True if `object_path` downloads nothing now: always in a directory, with a local copy in a bucket."""
        return self._store.objects.is_local(record)

    def quarantine(self, record: VersionRecord, reason: str, found_in: os.stat_result | None = None) -> bool:
        """Stop serving a corrupt object until its artifact is uploaded again; True if it is quarantined now.

        Args:
            record: A version that has the object.
            reason: The mismatch, for messages.
            found_in: The status of the file with the mismatch. If the object is no longer this file, because an upload
                replaced it or it was removed, it is left as it is. A quarantined object's bytes are kept as evidence.
        """
        with self._store.explained():
            return self._store.objects.quarantine(record, reason, found_in)

    def recover(self, record: VersionRecord) -> bool:
        """Put an object back that a server was about to remove; False if there is none.

        Call it before an object counts as missing: a gc may have begun before a version of these bytes was published.
        """
        with self._store.explained():
            return self._store.objects.recover(record)

    def usage(self) -> Usage:
        with self._store.explained():
            return self._store.objects.usage()

    def gc(self, *, dry_run: bool = False) -> GcReport:
        """Remove objects without a live version, and leftovers of crashes.

        Raises:
            RegistryError: A record or state is damaged, so the objects in use are unknown; nothing was removed.
        """
        with self._store.explained():
            return self._store.collect(dry_run=dry_run)

    def remove_abandoned_uploads(self) -> int:
        """Remove the partial files of uploads whose process has died, and return their number."""
        with self._store.explained():
            return self._store.uploads.remove_abandoned()[0]

    def check(self) -> CheckReport:
        """Read and check every file. Takes no lock and changes nothing, so servers go on meanwhile."""
        with self._store.explained():
            return self._store.check()

    def _publish(
        self,
        writer: ObjectWriter,
        sealed: SealedUpload,
        facts: ArtifactFacts,
        directory: VariantDirectory,
        activate: bool,
    ) -> Publication:
        report = report_to_json(facts.fidelity, directory.name)
        # In a bucket that of the object, so that one intent stands for both.
        token = writer.stored_as.rpartition(".")[2] if writer.stored_as else secrets.token_hex(16)
        for _ in attempts(directory.path):
            found = directory.settled(
                lambda history: (
                    directory.find(history, sealed.digest),
                    history.newest + 1,
                    directory.activated(history),
                )
            )
            known, number, active_before = found
            record = known or directory.new_record(
                sealed,
                facts,
                number,
                activate=activate,
                active_before=active_before,
                token=token,
                stored_as=writer.stored_as,
            )
            writer.store(record, is_known=known is not None)
            if known is not None:
                directory.sync_publication()
            elif not directory.add(record, report):
                continue
            writer.confirm()
            history = directory.history()
            # The highest number was published, and deleted since. A lower one was assigned, deleted and removed while
            # this process was suspended, and is deleted for ever.
            if history.state.is_live(record.version) or (known is None and record.version == history.newest):
                return Publication(record, known is None, directory.settled(directory.active))
            if known is None:
                directory.withdraw(record)
        raise AssertionError("attempts() ends with an exception")

    def _found_records(self, directory: VariantDirectory, numbers: Sequence[int]) -> list[VersionRecord]:
        """Return the records of some versions, without those that cannot be read."""
        failures: list[Exception] = []

        def found(number: int) -> VersionRecord | None:
            # The store itself may fail: a thousand calls must not wait for it.
            if len(failures) < MAX_FAILURES:
                try:
                    return directory.record(number)
                except (OSError, RegistryUnavailable) as error:
                    failures.append(error)
                except (RegistryError, VariantNotFound):
                    pass
            return None

        return [record for record in self.files.each(found, numbers) if record is not None]

    def _change(
        self,
        tenant: str,
        name: str,
        decide: Callable[[VariantDirectory, History], tuple[VariantState, T]],
        *,
        ignore_damage: bool = False,
    ) -> T:
        """Change a variant's state to what `decide` makes of its history, and return what it returns beside that.

        It is called again if another change was first.
        """
        directory = self._readable(tenant, name)
        with self._store.explained():
            self.files.check_present()
            directory.check_exists()
            for _ in attempts(directory.path):
                # An answer, a refusal included, must not rest on names that a failed change left unsynced.
                directory.sync_names()
                history = directory.history(ignore_damage=ignore_damage)
                try:
                    state, result = decide(directory, history)
                except VariantNotFound:
                    if directory.is_current(history):
                        raise
                    # A record was removed after another server's deletion.
                    continue
                if directory.change(history, state):
                    return result
        raise AssertionError("attempts() ends with an exception")


def _nothing(directory: VariantDirectory, history: History) -> tuple[VariantState, Deletion]:
    """Return the state of a variant after its deletion."""
    if not history.live:
        raise directory.not_found()
    state = VariantState(as_of=history.newest, deleted_through=history.newest)
    return state, Deletion(list(history.live), history, state)
