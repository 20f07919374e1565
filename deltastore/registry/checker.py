"""The part of a registry's check and gc that is the same in every store: records, states, reports and claims.

A finding is damage that no crash explains; a note is a leftover of a crash, which gc removes. The check changes nothing
and takes no lock, so servers go on meanwhile.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import PurePath

from deltastore.errors import RegistryError, VariantNotFound
from deltastore.registry.claims import Claims
from deltastore.registry.records import CheckReport, Finding, ReportFile, VersionRecord, check_report, is_name
from deltastore.registry.store import SmallFiles
from deltastore.registry.variants import REPORTS, History, VariantDirectory, directories, report_files

Reports = dict[tuple[str, str], list[ReportFile]]


def records_in_use(files: SmallFiles) -> Iterator[VersionRecord]:
    """Yield the record of every live version, read after the call. A version that is deleted meanwhile may lack.

    Raises:
        RegistryError: A record or state is damaged.
    """
    for directory in directories(files):
        for number in directory.history().live:
            try:
                yield directory.record(number)
            except VariantNotFound as error:
                if directory.state(is_fresh=True).is_live(number):
                    raise RegistryError(f"{directory.record_path(number)} is missing: restore it") from error


def listed_reports(files: SmallFiles) -> Reports:
    """List the fidelity reports of every variant by its tenant and name."""
    found: Reports = {}
    for tenant in filter(is_name, files.subdirectories(files.root / REPORTS)):
        for file in report_files(files, tenant):
            found.setdefault((tenant, file.name), []).append(file)
    return found


def leftovers(files: SmallFiles, reports: Reports, under_way: Collection[str] | None) -> list[PurePath]:
    """Return records, reports and names of the index that nothing refers to, or ever will.

    Args:
        files: The small files.
        reports: Those that were listed.
        under_way: Digests, or names of objects, of the publications under way, listed after the reports; None leaves
            each report above its variant's newest version.

    Raises:
        RegistryError: A record or state is damaged.
    """
    found: list[PurePath] = []
    for directory in directories(files):
        history = directory.history()
        found += directory.dead_records(history.numbers, history.state)
    for (tenant, name), mine in reports.items():
        directory = VariantDirectory(files, tenant, name)
        history = directory.history()
        num_reports = Counter(file.version for file in mine)
        for file in mine:
            path = directory.reports / file.file_name
            if file.version > history.newest:
                is_left = under_way is not None and not {file.digest, f"{file.digest}.{file.token}"} & {
                    *under_way
                }
            elif not history.state.is_live(file.version):
                is_left = True
            else:
                # A live version has a report, so a single one is its.
                is_left = num_reports[file.version] > 1 and _is_of_another(directory, file)
            if is_left:
                found.append(path)
    return [*found, *Claims(files).ended_index()]


def _is_of_another(directory: VariantDirectory, file: ReportFile) -> bool:
    """True if a live version was published with another report."""
    try:
        return directory.record(file.version).report != file.token
    except VariantNotFound:
        # It was deleted meanwhile.
        return False


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
            else:
                self._check_state(directory, history)
            for number in history.live:
                self._check_record(directory, number)

    def check_claims(self) -> None:
        """Report claims of public names that cannot be read."""
        for name in self._claims.names():
            try:
                self._claims.owner(name)
            except RegistryError as error:
                entries = self._claims.entries(name)
                self._find(entries.path(entries.newest().number), error)
        for path in self._claims.unindexed():
            self._find(path, "the index lacks this public name: make the variant private, then public again")

    def check_reports(self) -> None:
        """Report fidelity reports of live versions that are missing or damaged, and note files that gc removes."""
        reports = listed_reports(self._files)
        for directory, record in self.versions:
            mine = reports.get((record.tenant, record.name), [])
            # Its name may differ from the record's where the record is damaged, which is a finding of its own.
            named = (file for file in mine if (file.version, file.token) == (record.version, record.report))
            path = directory.reports / next(named, ReportFile.of(record)).file_name
            try:
                check_report(self._files.read(path, is_fresh=True), str(path))
            except FileNotFoundError:
                if self._is_live(directory, record.version):
                    self._find(path, f"this fidelity report is missing: restore it, or delete {record.label}")
            except RegistryError as error:
                self._find(path, f"{error}: restore the file, or delete {record.label}")
        # A damaged state is a finding of its own.
        with contextlib.suppress(RegistryError):
            for path in leftovers(self._files, reports, None):
                self._note(path, "no live version or claim refers to it: gc removes it")

    def _check_state(self, directory: VariantDirectory, history: History) -> None:
        state = history.state
        if (number := history.first_missing()) is not None:
            self._find(
                directory.record_path(number),
                f"this version's record is missing: restore it, or delete {directory.name}@{number}",
            )
        if state.active is not None and not state.is_live(state.active):
            self._find(
                _state_path(directory, history),
                f"its active version {state.active} is deleted: promote another",
            )

    def _check_record(self, directory: VariantDirectory, number: int) -> None:
        try:
            self.versions.append((directory, directory.record(number)))
        except VariantNotFound as error:
            if self._is_live(directory, number):
                self._find(directory.record_path(number), error)
        except RegistryError as error:
            self._find(directory.record_path(number), error)

    def _is_live(self, directory: VariantDirectory, number: int) -> bool:
        try:
            return directory.state(is_fresh=True).is_live(number)
        except RegistryError:
            # The damaged state is a finding of its own.
            return False

    def _find(self, path: PurePath, problem: object) -> None:
        self.findings.append(Finding(path, str(problem).removeprefix(f"{path}: ")))

    def _note(self, path: PurePath, problem: object) -> None:
        self.notes.append(Finding(path, str(problem).removeprefix(f"{path}: ")))


def _state_path(directory: VariantDirectory, history: History) -> PurePath:
    return directory.entries.path(history.entry.number)
