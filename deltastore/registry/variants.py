"""The directories `variants/<tenant>/<name>/`: read what stands there, add a version, replace the state.

Knows files and their order of writing. What a request or a caller may do is the registry's business. Nothing
is kept in memory, so that every server on a shared volume sees what the others acknowledged.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from deltastore.errors import RegistryError, VariantNotFound
from deltastore.registry.records import VariantState, VersionRecord, is_name, parse_record, parse_state
from deltastore.registry.storage import Storage

STATE = "state.json"
LOCK = "lock"
RECORD = re.compile(r"([1-9][0-9]{0,17})\.json")


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant as it is now."""

    tenant: str
    name: str
    versions: tuple[VersionRecord, ...]  # oldest first, without the deleted ones
    active: int | None


@dataclass(frozen=True, slots=True)
class History:
    """Which versions a variant has, by number; the records are read one by one, when needed."""

    state: VariantState
    numbers: tuple[int, ...]  # ascending, of every record, deleted or not

    @property
    def live(self) -> list[int]:
        return [number for number in self.numbers if self.state.is_live(number)]

    @property
    def newest(self) -> int:
        """The newest version number ever given out; 0 before the first."""
        return max(self.state.newest_known(), *self.numbers, 0)


class VariantDirectory:
    """One variant's files. Changes happen under its lock, which the caller holds."""

    def __init__(self, root: Path, tenant: str, name: str, storage: Storage) -> None:
        self.tenant = tenant
        self.name = name
        self.path = root / tenant / name
        self._storage = storage

    def make(self) -> None:
        self._storage.make_dirs(self.path)

    @contextlib.contextmanager
    def locked(self, *, wait: bool = True) -> Iterator[None]:
        """Be the only one who changes this variant. VariantNotFound where it never had a version."""
        if not self.path.is_dir():  # which is never removed, so that numbers are never given out again
            raise self.not_found()
        with self._storage.locked(self.path / LOCK, exclusive=True, wait=wait):
            yield

    def history(self) -> History:
        """The state first, then the names: a version published in between only makes the names newer."""
        state = self.state()
        return History(state, self.numbers())

    def numbers(self) -> tuple[int, ...]:
        """The number of every record, deleted or not, ascending."""
        try:
            names = os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            names = []
        return tuple(sorted(int(found[1]) for name in names if (found := RECORD.fullmatch(name))))

    def state(self) -> VariantState:
        """The stored state; the initial one where there is none."""
        path = self.path / STATE
        try:
            return parse_state(path.read_bytes(), str(path))
        except (FileNotFoundError, NotADirectoryError):
            return VariantState()
        except RegistryError as error:
            raise RegistryError(f"{error}: restore the file, or delete the variant {self.name!r}") from error

    def record(self, number: int) -> VersionRecord:
        """A version's record. VariantNotFound where there is none, RegistryError where it is damaged."""
        path = self.record_path(number)
        try:
            record = parse_record(path.read_bytes(), str(path))
        except FileNotFoundError as error:
            raise self.not_found(number) from error
        except RegistryError as error:
            raise RegistryError(f"{error}: restore the file, or delete {self.name}@{number}") from error
        if (record.tenant, record.name, record.version) != (self.tenant, self.name, number):
            raise RegistryError(
                f"{path}: it is the record of {record.tenant}/{record.name}@{record.version}: move it back"
            )
        return record

    def record_path(self, number: int) -> Path:
        return self.path / f"{number}.json"

    def active(self, history: History) -> int | None:
        """The active version's number, if there is one."""
        for number in reversed(history.live):
            if number <= history.state.as_of:
                break
            if self.record(number).activate:
                return number
        return history.state.active

    def variant(self, history: History) -> Variant:
        records = tuple(self.record(number) for number in history.live)
        return Variant(self.tenant, self.name, records, self.active(history))

    def find(self, history: History, digest: str) -> VersionRecord | None:
        """The newest live version that has these bytes."""
        records = (self.record(number) for number in reversed(history.live))
        return next((record for record in records if record.digest == digest), None)

    def add(self, record: VersionRecord) -> VersionRecord:
        """Publish a record in one atomic step, under the next number where a lockless server took its own."""
        with self._storage.temporary(self.path, record.to_json()) as temporary:
            try:
                self._storage.link(temporary, self.record_path(record.version))
            except FileExistsError:
                return self.add(replace(record, version=record.version + 1))
        self.settle()
        return record

    def set_state(self, state: VariantState) -> None:
        """Replace the state in one atomic step; the directories above must be settled already."""
        self._storage.replace(self.path / STATE, state.to_json())

    def settle(self) -> None:
        """Make the names down to this directory's files durable, whichever process wrote them and died."""
        for directory in (self.path, self.path.parent, self.path.parent.parent):
            self._storage.fsync_dir(directory)

    def not_found(self, number: int | None = None) -> VariantNotFound:
        if number is None:
            return VariantNotFound(f"there is no variant {self.name!r}: list what there is, or push it first")
        return VariantNotFound(
            f"variant {self.name!r} has no version {number}: list its versions, or leave the number out"
        )


def directories(root: Path, storage: Storage, tenant: str | None = None) -> Iterator[VariantDirectory]:
    """Every variant's directory, in the order of tenants and names, also those without a live version."""
    for owner in [tenant] if tenant is not None else subdirectories(root):
        if is_name(owner):
            for name in subdirectories(root / owner):
                if is_name(name):
                    yield VariantDirectory(root, owner, name, storage)


def subdirectories(path: Path) -> list[str]:
    """Names of the directories in a directory, sorted; none where there is no such directory."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
    except FileNotFoundError:
        return []
