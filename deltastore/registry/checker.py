"""The part of a registry's check that is the same in every store: records, states and claims.

A finding is damage that no crash explains; a note is a leftover of a crash, which gc removes. The check changes nothing
and takes no lock, so servers go on meanwhile.
"""

from __future__ import annotations

from pathlib import PurePath

from deltastore.errors import RegistryError
from deltastore.registry.claims import Claims
from deltastore.registry.files import SmallFiles
from deltastore.registry.records import VersionRecord
from deltastore.registry.reports import CheckReport, Finding
from deltastore.registry.variants import History, VariantDirectory, directories


class Checker:
    """Findings and notes, and the live versions that were read."""

    def __init__(self, files: SmallFiles) -> None:
        self.findings: list[Finding] = []
        self.notes: list[Finding] = []
        self.versions: list[tuple[VariantDirectory, VersionRecord]] = []
        self.num_objects = 0
        self._files = files
        self._claims = Claims(files)

    def report(self) -> CheckReport:
        return CheckReport(tuple(self.findings), tuple(self.notes), self.num_objects, len(self.versions))

    def check_variants(self) -> None:
        """Report records and states that cannot be read or contradict each other."""
        for directory in directories(self._files):
            try:
                history = directory.history()
            except RegistryError as error:
                history = directory.history(ignore_damage=True)
                self._find(_state_path(directory, history), error)
            self._check_state(directory, history)
            for number in history.numbers:
                self._check_record(directory, number, history.state.is_live(number))

    def check_claims(self) -> None:
        """Report claims of public names that cannot be read."""
        for name in self._claims.names():
            try:
                self._claims.owner(name)
            except RegistryError as error:
                entries = self._claims.entries(name)
                self._find(entries.path(entries.newest().number), error)

    def _check_state(self, directory: VariantDirectory, history: History) -> None:
        state, numbers = history.state, set(history.numbers)
        for number in range(1, history.newest + 1):
            if number not in numbers and state.is_live(number):
                self._find(directory.record_path(number), "this version's record is missing: restore it")
        if state.active is not None and not state.is_live(state.active):
            self._find(
                _state_path(directory, history),
                f"its active version {state.active} is deleted: promote another",
            )

    def _check_record(self, directory: VariantDirectory, number: int, is_live: bool) -> None:
        try:
            record = directory.record(number)
        except RegistryError as error:
            # A deleted version's record is never read.
            report = self._find if is_live else self._note
            report(directory.record_path(number), error)
        else:
            if is_live:
                self.versions.append((directory, record))

    def _is_live(self, directory: VariantDirectory, number: int) -> bool:
        try:
            return directory.state().is_live(number)
        except RegistryError:
            # The damaged state is a finding of its own.
            return False

    def _find(self, path: PurePath, problem: object) -> None:
        self.findings.append(Finding(path, str(problem).removeprefix(f"{path}: ")))

    def _note(self, path: PurePath, problem: object) -> None:
        self.notes.append(Finding(path, str(problem).removeprefix(f"{path}: ")))


def _state_path(directory: VariantDirectory, history: History) -> PurePath:
    return directory.entries.path(history.entry.number)
