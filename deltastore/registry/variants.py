"""The directories `variants/<tenant>/<name>/`: read records and state, add a version, change the state.

Owns the files and the order in which they are written; `registry.py` decides which changes are allowed. Nothing is
cached, so that every server on a shared volume sees what the others acknowledged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePath

from deltastore.errors import RegistryError, VariantNotFound
from deltastore.registry.files import SmallFiles
from deltastore.registry.records import (
    ArtifactFacts,
    VariantState,
    VersionRecord,
    Visibility,
    is_name,
    parse_record,
    parse_state,
)
from deltastore.registry.sequence import Entry, EntrySequence
from deltastore.registry.uploads import SealedUpload

DIRECTORY = "variants"
# The state is the newest of the files `state-nnnnnn.json`.
STATE = "state-"
# The state of older versions of Peraxis, which locked the variant by another file.
OLD_STATE = "state.json"
OLD_LOCK = "lock"
RECORD = re.compile(r"([1-9][0-9]{0,17})\.json")


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant and its versions at one moment."""

    tenant: str
    name: str
    versions: tuple[VersionRecord, ...]  # oldest first, without the deleted ones
    active: int | None
    previous: int | None = None  # the live version that was active before it
    visibility: Visibility = "private"


@dataclass(frozen=True, slots=True)
class History:
    """A variant's version numbers and state. Records are read one by one, on demand."""

    state: VariantState
    numbers: tuple[int, ...]  # ascending, of every record, deleted or not
    entry: Entry  # that holds the state

    @property
    def live(self) -> list[int]:
        return [number for number in self.numbers if self.state.is_live(number)]

    @property
    def newest(self) -> int:
        """The newest version number ever assigned; 0 before the first."""
        return max(self.state.newest_known(), *self.numbers, 0)


class VariantDirectory:
    """One variant's files."""

    def __init__(self, files: SmallFiles, tenant: str, name: str) -> None:
        self.tenant = tenant
        self.name = name
        self.path = files.root / DIRECTORY / tenant / name
        self.entries = EntrySequence(self.path, STATE, self.path / OLD_STATE, files)
        self._files = files

    def make(self) -> None:
        self._files.make_directory(self.path)

    def check_exists(self) -> None:
        """Raise VariantNotFound if the variant never had a version."""
        # A variant's directory is never removed, so that version numbers are never assigned again.
        if not self._files.is_directory(self.path):
            raise self.not_found()

    def history(self, *, ignore_damage: bool = False) -> History:
        """Read the numbers and the state; with `ignore_damage`, take the initial state for a damaged one.

        Raises:
            RegistryError: The state is damaged.
        """
        names = self._files.names(self.path)
        entry = self.entries.newest(names)
        try:
            state = self._parsed(entry)
        except RegistryError:
            if not ignore_damage:
                raise
            state = VariantState()
        numbers = _numbers(names)
        if len(numbers) < max(state.newest_known(), *numbers, 0):
            # Numbers have no gaps. A version that was published during the listing may lack in it although the state
            # knows it.
            numbers = _numbers(self._files.names(self.path, is_fresh=True))
        return History(state, numbers, entry)

    def state(self) -> VariantState:
        """Read the state; the initial one if none is stored. Raises RegistryError if it is damaged."""
        return self._parsed(self.entries.newest())

    def record(self, number: int) -> VersionRecord:
        """Read a version's record. Raises VariantNotFound if there is none, RegistryError if it is damaged."""
        path = self.record_path(number)
        try:
            record = parse_record(self._files.read(path), str(path))
        except FileNotFoundError as error:
            raise self.not_found(number) from error
        except RegistryError as error:
            raise RegistryError(f"{error}: restore the file, or delete {self.name}@{number}") from error
        if (record.tenant, record.name, record.version) != (self.tenant, self.name, number):
            raise RegistryError(f"{path}: it is the record of {record.label}: move it back")
        return record

    def record_path(self, number: int) -> PurePath:
        return self.path / f"{number}.json"

    def active(self, history: History) -> int | None:
        """Return the active version's number; None if no version is active."""
        return next(self._activated(history), None)

    def previous(self, history: History, active: int | None) -> int | None:
        """Return the live version that was active last, other than `active`; None if none is known.

        A damaged record ends the search: a promotion must not need the record of the version that it replaces.
        """
        try:
            known = (number for number in self._activated(history) if history.state.is_live(number))
            return next((number for number in known if number != active), None)
        except RegistryError:
            return None

    def variant(self, history: History, visibility: Visibility) -> Variant:
        records = tuple(self.record(number) for number in history.live)
        active = self.active(history)
        return Variant(self.tenant, self.name, records, active, self.previous(history, active), visibility)

    def find(self, history: History, digest: str) -> VersionRecord | None:
        """Return the newest live version that has these bytes; None if there is none."""
        records = (self.record(number) for number in reversed(history.live))
        return next((record for record in records if record.digest == digest), None)

    def new_record(
        self, sealed: SealedUpload, facts: ArtifactFacts, version: int, activate: bool, stored_as: str | None
    ) -> VersionRecord:
        """Return the record of a sealed upload as a version of this variant, which is not stored yet."""
        return VersionRecord(
            tenant=self.tenant,
            name=self.name,
            version=version,
            digest=sealed.digest,
            size_bytes=sealed.size_bytes,
            data_start=facts.data_start,
            device_bytes=facts.device_bytes,
            base_fingerprint=facts.base_fingerprint,
            chunk_sha256=sealed.chunk_sha256,
            created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            method=facts.method,
            fidelity=dict(facts.fidelity),
            activate=activate,
            stored_as=stored_as,
        )

    def add(self, record: VersionRecord) -> bool:
        """Publish a record in one atomic step; return False if another server took its number."""
        is_added = self._files.add(self.record_path(record.version), record.to_json())
        if is_added:
            self.sync_names()
        return is_added

    def change(self, history: History, state: VariantState) -> bool:
        """Change the state in one atomic step; return False if another server has changed it since `history`.

        `sync_names` must have run before `history`.
        """
        return self.entries.append(history.entry, state.to_json(history.entry.digest))

    def sync_names(self) -> None:
        """Sync the directories down to this one, so that names written by a process that died are durable."""
        self._files.make_durable(self.path, self.path.parent, self.path.parent.parent)

    def _activated(self, history: History) -> Iterator[int]:
        """Yield the versions that became active, the last one first, as far back as the state remembers."""
        for number in reversed(history.live):
            if number <= history.state.as_of:
                break
            if self.record(number).activate:
                yield number
        yield from (number for number in (history.state.active, history.state.previous) if number is not None)

    def _parsed(self, entry: Entry) -> VariantState:
        if entry.raw is None:
            return VariantState()
        try:
            return parse_state(entry.raw, str(self.entries.path(entry.number)))
        except RegistryError as error:
            raise RegistryError(f"{error}: restore the file, or delete the variant {self.name!r}") from error

    def not_found(self, number: int | None = None) -> VariantNotFound:
        if number is None:
            return VariantNotFound(
                f"there is no variant {self.name!r} of tenant {self.tenant!r}: list the variants, or upload it first"
            )
        return VariantNotFound(
            f"variant {self.name!r} has no version {number}: list its versions, or leave the number out"
        )


def directories(files: SmallFiles, tenant: str | None = None) -> Iterator[VariantDirectory]:
    """Yield every variant's directory, sorted by tenant and name, those without a live version included."""
    root = files.root / DIRECTORY
    for owner in [tenant] if tenant is not None else files.subdirectories(root):
        if is_name(owner):
            for name in files.subdirectories(root / owner):
                if is_name(name):
                    yield VariantDirectory(files, owner, name)


def _numbers(names: Iterable[str]) -> tuple[int, ...]:
    return tuple(sorted(int(found[1]) for name in names if (found := RECORD.fullmatch(name))))
