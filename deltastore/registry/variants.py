"""The directories `variants/<tenant>/<name>/` and `reports/<tenant>/`: read and add versions, change the state.

Owns the files and the order in which they are written; `registry.py` decides which changes are allowed. Nothing is
cached, so that every server on a shared volume sees what the others acknowledged.

The state, as a claim on a public name, is a value that servers change without a lock: a sequence of numbered files, of
which the newest holds the value. A change reads the newest entry, number n, and creates entry n + 1 exclusively. If
another server was first, the change reads again. So every change rests on the one before it, and all servers see one
order. `REGISTRY.md` says why a change that was acknowledged is never lost, also when old entries are removed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePath
from typing import TypeVar

from deltastore.errors import PeraxisError, RegistryError, VariantNotFound
from deltastore.registry.records import (
    NAME_END,
    ArtifactFacts,
    Promotion,
    ReportFile,
    VariantState,
    VersionRecord,
    Visibility,
    check_report,
    held_out_number,
    is_name,
    parse_record,
    parse_state,
)
from deltastore.registry.store import SmallFiles, dropped_when_full
from deltastore.registry.uploads import SealedUpload

# Entries that are kept. A writer that is this many changes late may find that the one after its own is gone.
NUM_KEPT = 64
# A change removes older entries when there are more than this, so that repeated changes do not fill the disk until gc.
MAX_ENTRIES = 2 * NUM_KEPT
MAX_ATTEMPTS = 100
LONGEST_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry. Number 0, without `raw`, is the beginning of the sequence."""

    number: int
    raw: bytes | None

    @property
    def digest(self) -> str:
        """The SHA-256 of the entry, which the next one holds as its `after`."""
        return _sha256(self.raw or b"")


class EntrySequence:
    """The entries `PREFIXnnnnnn.json` of one directory.

    Args:
        directory: Holds the entries; it may be missing.
        prefix: Of the entries' names.
        files: Reads and creates the entries.
    """

    def __init__(self, directory: PurePath, prefix: str, files: SmallFiles) -> None:
        self.directory = directory
        self._prefix = prefix
        self._pattern = re.compile(rf"{re.escape(prefix)}([0-9]{{6,18}})\.json")
        self._files = files

    def path(self, number: int) -> PurePath:
        return self.directory / f"{self._prefix}{number:06}.json"

    def numbers(self, names: Iterable[str]) -> list[int]:
        """Return the numbers of the entries among file names, ascending, without entry 0."""
        begin, match = self._prefix, self._pattern.fullmatch
        return sorted(int(found[1]) for name in names if name.startswith(begin) and (found := match(name)))

    def newest(self, names: Collection[str] | None = None) -> Entry:
        """Read the newest entry; with `names`, the newest of a listing of the directory."""
        listed = self.numbers(self._files.names(self.directory) if names is None else names)
        for _ in attempts(self.directory):
            if not listed:
                return Entry(0, None)
            try:
                return Entry(listed[-1], self._files.read(self.path(listed[-1])))
            except FileNotFoundError:
                pass
            # It was removed, because there are many newer ones.
            listed = self.numbers(self._files.names(self.directory, is_fresh=True))
        raise AssertionError("attempts() ends with an exception")

    def append(self, newest: Entry, raw: bytes) -> bool:
        """Create the entry after `newest`, durably; return False if another change came first and nothing was done.

        Args:
            newest: The entry that the change rests on.
            raw: A JSON document whose `after` is the digest of `newest`.

        Raises:
            RegistryError: So many changes came in between that this one may have been made or not.
        """
        number = newest.number + 1
        # An entry stays, unlike the space of a file that is replaced: repeated changes would use up the reserve.
        if not self._files.add_or_make_room(self.path(number), raw, lambda: self._dispensable(num_kept=1)):
            return False
        # While this writer was suspended, an entry of this number may have been made and removed.
        numbers = self.numbers(self._files.names(self.directory, is_fresh=True))
        is_made = max(numbers, default=number) <= number or self._after(number + 1) == _sha256(raw)
        if len(numbers) > MAX_ENTRIES:
            self._files.remove(self._dispensable(NUM_KEPT))
        return is_made

    def kept(self) -> list[Entry]:
        """Read the newest `NUM_KEPT` entries, newest first, without those that are removed meanwhile."""

        def read(number: int) -> Entry | None:
            try:
                return Entry(number, self._files.read(self.path(number)))
            except FileNotFoundError:
                return None

        numbers = self.numbers(self._files.names(self.directory))[: -NUM_KEPT - 1 : -1]
        return [entry for entry in self._files.each(read, numbers) if entry is not None]

    def superseded(self, num_kept: int = NUM_KEPT) -> list[PurePath]:
        """Return the entries that may be removed, oldest first."""
        numbers = self.numbers(self._files.names(self.directory))
        return [self.path(number) for number in numbers[:-num_kept]]

    def _dispensable(self, num_kept: int) -> list[PurePath]:
        """Return a bounded number of the entries that one change may remove."""
        return self.superseded(num_kept)[:MAX_ENTRIES]

    def _after(self, number: int) -> object:
        """Return the digest of the entry that another one was made after; None if it cannot be read."""
        path = self.path(number)
        try:
            return json.loads(self._files.read(path))["after"]
        except FileNotFoundError as error:
            raise RegistryError(
                f"{path.parent}: other servers made too many changes meanwhile: look at its state and try again"
            ) from error
        except (ValueError, LookupError, TypeError):
            return None


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def attempts(path: PurePath) -> Iterator[None]:
    """Yield for each attempt of a change, after a growing random pause from the second one on.

    Raises:
        RegistryError: Other servers were first at every attempt.
    """
    for number in range(MAX_ATTEMPTS):
        if number:
            time.sleep(random.uniform(0, min(0.001 * 2**number, LONGEST_PAUSE_S)))
        yield
    raise RegistryError(f"{path}: other servers change it all the time: try again in a moment")


T = TypeVar("T")

DIRECTORY = "variants"
REPORTS = "reports"
# The state is the newest of the files `state-nnnnnn.json`.
STATE = "state-"
RECORD = re.compile(r"([1-9][0-9]{0,17})\.json")
# Listings of one entry that lack the same live version: after them it is lost, and not just being made or removed.
MAX_LISTINGS = 3

log = logging.getLogger(__name__)


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
class VariantSummary:
    """A variant at one moment, read from a number of files that does not grow with its versions."""

    tenant: str
    name: str
    numbers: tuple[int, ...]  # of the live versions, ascending
    active_record: VersionRecord | None
    previous: int | None  # the live version that was active before it
    visibility: Visibility

    @property
    def active(self) -> int | None:
        return None if self.active_record is None else self.active_record.version

    @property
    def num_versions(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True, slots=True)
class History:
    """A variant's version numbers and state. Records are read one by one, on demand."""

    state: VariantState
    numbers: tuple[int, ...]  # ascending, of every record, deleted or not
    live: tuple[int, ...]  # of them, those that are not deleted
    entry: Entry  # that holds the state

    @property
    def newest(self) -> int:
        """The newest version number ever assigned; 0 before the first."""
        return max(self.state.newest_known(), *self.numbers[-1:], 0)

    def is_live(self, number: int) -> bool:
        index = bisect_left(self.live, number)
        return index < len(self.live) and self.live[index] == number

    def is_deletable(self, number: int) -> bool:
        """True for live versions, also if the record was lost."""
        return 1 <= number <= self.newest and self.state.is_live(number)

    def first_missing(self) -> int | None:
        """Return the first version that is not deleted and has no record in the listing; None if there is none."""
        newest = self.newest
        if len(self.live) >= self.state.num_live(newest):
            return None
        after = dict(self.state.deleted)
        expected = self.state.deleted_through + 1
        for number in (*self.live, newest + 1):
            while expected in after:
                expected = after[expected] + 1
            if number != expected:
                break
            expected += 1
        return expected if expected <= newest else None


class VariantDirectory:
    """One variant's files."""

    def __init__(self, files: SmallFiles, tenant: str, name: str) -> None:
        self.tenant = tenant
        self.name = name
        self.path = files.root / DIRECTORY / tenant / name
        self.reports = files.root / REPORTS / tenant
        self.entries = EntrySequence(self.path, STATE, files)
        self._files = files

    def make(self) -> None:
        self._files.make_directory(self.reports)
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
        seen: list[tuple[int, int]] = []
        for _ in attempts(self.path):
            names = self._files.names(self.path, is_fresh=bool(seen))
            entry = self.entries.newest(names)
            numbers = _numbers(names)
            try:
                state = self._parsed(entry)
            except RegistryError:
                if not ignore_damage:
                    raise
                return History(VariantState(), numbers, numbers, entry)
            history = History(state, numbers, state.live_among(numbers), entry)
            # A listing may lack what was made, and removed after a deletion, while it was taken.
            if (missing := history.first_missing()) is None:
                return history
            seen.append((entry.number, missing))
            if seen.count(seen[-1]) == MAX_LISTINGS:
                return history
        raise AssertionError("attempts() ends with an exception")

    def is_current(self, history: History) -> bool:
        """True if the state has not changed since a history was read: records that were read since are no others'."""
        numbers = self.entries.numbers(self._files.names(self.path, is_fresh=True))
        return max(numbers, default=0) == history.entry.number

    def settled(self, read: Callable[[History], T]) -> T:
        """Return what `read` makes of a history and its records. It is called again if the state changed meanwhile."""
        for _ in attempts(self.path):
            history = self.history()
            try:
                result = read(history)
            except PeraxisError:
                if self.is_current(history):
                    raise
            else:
                if self.is_current(history):
                    return result
        raise AssertionError("attempts() ends with an exception")

    def state(self, *, is_fresh: bool = False) -> VariantState:
        """Read the state, by a new listing if `is_fresh`; the initial one if none is stored. Raises RegistryError."""
        return self._parsed(self.entries.newest(self._files.names(self.path, is_fresh=is_fresh)))

    def promotions(self) -> list[Promotion]:
        """Read the promotions that the kept entries remember, newest first, since the variant was last deleted.

        Damaged entries, and those of servers that stored no time, are left out.
        """
        found: list[Promotion] = []
        for entry in self.entries.kept():
            try:
                state = self._parsed(entry)
            except RegistryError:
                continue
            if state.active is None and state.deleted_through == state.as_of:
                break
            if state.promoted_at is not None and state.active is not None:
                found.append(Promotion(state.active, state.promoted_at, state.promoted_by))
        return found

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

    def report_path(self, record: VersionRecord) -> PurePath:
        return self.reports / ReportFile.of(record).file_name

    def report(self, record: VersionRecord) -> bytes:
        """Read a version's fidelity report as JSON; an empty one, and logged, if it cannot be read. Raises OSError."""
        path = self.report_path(record)
        try:
            return check_report(self._files.read(path, is_fresh=True), str(path))
        except (FileNotFoundError, RegistryError) as error:
            if self.state().is_live(record.version):
                log.error("the fidelity report of %s cannot be read: %s", record.label, error)
            return b"{}"

    def active(self, history: History) -> int | None:
        """Return the active version's number; None if no version is active. Reads at most one record."""
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

    def activated(self, history: History) -> int:
        """Return the newest version above the state's `as_of` that was published to become active; 0 without one."""
        as_of, newest = history.state.as_of, history.newest
        found = self.record(newest).activated if newest > as_of else 0
        return found if found > as_of else 0

    def variant(self, history: History, visibility: Visibility) -> Variant:
        records = tuple(self.record(number) for number in history.live)
        active = self.active(history)
        return Variant(self.tenant, self.name, records, active, self.previous(history, active), visibility)

    def summary(self, history: History, visibility: Visibility) -> VariantSummary:
        active = self.active(history)
        record = None if active is None else self.record(active)
        previous = self.previous(history, active)
        return VariantSummary(self.tenant, self.name, history.live, record, previous, visibility)

    def find(self, history: History, digest: str) -> VersionRecord | None:
        """Return the newest live version that has these bytes; None if there is none."""
        found = (file.version for file in self._own_reports() if file.digest == digest)
        for number in sorted({number for number in found if history.is_live(number)}, reverse=True):
            record = self.record(number)
            # Another publication may have taken the number.
            if record.digest == digest:
                return record
        return None

    def new_record(
        self,
        sealed: SealedUpload,
        facts: ArtifactFacts,
        version: int,
        *,
        activate: bool,
        active_before: int,
        token: str,
        stored_as: str | None,
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
            report=token,
            agreement=held_out_number(facts.fidelity, "agreement"),
            kl=held_out_number(facts.fidelity, "kl"),
            activate=activate,
            active_before=active_before,
            stored_as=stored_as,
            max_positions=facts.max_positions,
        )

    def add(self, record: VersionRecord, report: bytes) -> bool:
        """Publish a record in one atomic step, its report before it; return False if another server took its number."""
        path = self.report_path(record)
        with dropped_when_full(self._files, path, self.record_path(record.version)):
            self._files.add(path, report)
            is_added = self._files.add(self.record_path(record.version), record.to_json())
        if is_added:
            self.sync_publication()
        else:
            # No other publication has a report of this name.
            self._files.remove([path])
        return is_added

    def withdraw(self, record: VersionRecord) -> None:
        """Remove a record that was made with a number that is deleted, and its report."""
        if record.version != max(_numbers(self._files.names(self.path)), default=0):
            self._files.remove([self.record_path(record.version)])
        self._files.remove([self.report_path(record)])

    def change(self, history: History, state: VariantState) -> bool:
        """Change the state in one atomic step; return False if another server has changed it since `history`.

        `sync_names` must have run before `history`.
        """
        return self.entries.append(history.entry, state.to_json(history.entry.digest))

    def remove_deleted(self, history: History, state: VariantState) -> None:
        """Remove the records and reports of the versions that a state has deleted. What fails is left for gc."""
        reports = (
            self.reports / file.file_name
            for file in self._own_reports()
            if file.version <= history.newest and not state.is_live(file.version)
        )
        self._files.remove([*self.dead_records(history.numbers, state), *reports])

    def dead_records(self, numbers: Iterable[int], state: VariantState) -> list[PurePath]:
        """Return the records of deleted versions but that of the highest number.

        By it, numbers are not assigned again even if the state is damaged.
        """
        lower = sorted(numbers)[:-1]
        return [self.record_path(number) for number in lower if not state.is_live(number)]

    def sync_names(self) -> None:
        """Sync the directories down to this one, so that names written by a process that died are durable."""
        self._files.make_durable(self.path, self.path.parent, self.path.parent.parent)

    def sync_publication(self) -> None:
        """Sync also the names of reports, before a publication is acknowledged."""
        self.sync_names()
        self._files.make_durable(self.reports, self.reports.parent)

    def _own_reports(self) -> Iterator[ReportFile]:
        return report_files(self._files, self.tenant, self.name)

    def _activated(self, history: History) -> Iterator[int]:
        """Yield the versions that became active, the last one first, as far back as the state remembers."""
        state = history.state
        number = self.activated(history)
        while number > state.as_of:
            yield number
            number = self.record(number).active_before
        yield from (number for number in (state.active, state.previous) if number is not None)

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


def report_files(files: SmallFiles, tenant: str, name: str | None = None) -> Iterator[ReportFile]:
    """Yield the names of a tenant's fidelity reports from one listing: a superset of those of its live versions.

    Args:
        files: Those of the registry.
        tenant: The tenant.
        name: Of one variant; the reports of others cost little then.
    """
    beginning = "" if name is None else f"{name}{NAME_END}"
    for text in files.each_name(files.root / REPORTS / tenant):
        if text.startswith(beginning) and (found := ReportFile.parse(text)) is not None:
            yield found


def report_names(files: SmallFiles, tenant: str) -> list[str]:
    """Return the sorted names of the variants that a tenant's fidelity reports belong to, from one listing."""
    listed = files.each_name(files.root / REPORTS / tenant)
    found = {name for name, end, _ in (text.partition(NAME_END) for text in listed) if end}
    return sorted(filter(is_name, found))


def _numbers(names: Iterable[str]) -> tuple[int, ...]:
    return tuple(sorted(int(found[1]) for name in names if (found := RECORD.fullmatch(name))))
