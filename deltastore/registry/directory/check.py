"""The check of a whole registry: bytes, digests, records, states and names, each against the others.

A finding is damage that no crash explains; a note is a leftover of a crash, which gc removes. The check changes nothing
and takes no lock, so servers go on meanwhile. A missing object is looked for again before it is reported.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from deltastore.registry.checker import Checker
from deltastore.registry.claims import INDEX
from deltastore.registry.directory.collect import temporaries
from deltastore.registry.directory.files import DirectoryFiles
from deltastore.registry.directory.objects import ASIDE, DIGEST, MARK, DirectoryObjects, digest_of
from deltastore.registry.directory.reserve import DIRECTORY, FILE
from deltastore.registry.place import FORMAT_FILE, LAYOUT, OF_SERVERS
from deltastore.registry.records import REPORT, is_name
from deltastore.registry.reports import CheckReport
from deltastore.registry.storage import TEMPORARY
from deltastore.registry.uploads import NAME as PARTIAL_FILE
from deltastore.registry.uploads import ChunkedDigest, Uploads, abandoned, hash_file
from deltastore.registry.variants import RECORD, REPORTS, STATE, directories

DRAFT = rf"\..*{re.escape(TEMPORARY)}"
QUARANTINE_FILE = re.compile(rf"{DRAFT}|{DIGEST.pattern}({re.escape(MARK)})?")
RESERVE_FILE = re.compile(rf"{DRAFT}|{FILE}")
OBJECT_FILE = re.compile(rf"{DIGEST.pattern}|{ASIDE.pattern}")
NUMBERED = r"[0-9]{6,18}\.json"
CLAIM_FILE = re.compile(rf"{DRAFT}|{NUMBERED}")
INDEX_FILE = re.compile(rf"{DRAFT}|{INDEX.pattern}")
REPORT_FILE = re.compile(rf"{DRAFT}|{REPORT.pattern}")
VARIANT_FILE = re.compile(rf"{DRAFT}|{RECORD.pattern}|{STATE}{NUMBERED}")
# Names that file systems create themselves.
FOREIGN = re.compile(r"lost\+found|\.nfs[0-9a-f]+|\.snapshot")


def check(files: DirectoryFiles, objects: DirectoryObjects, uploads: Uploads) -> CheckReport:
    """Read and check every file of a registry. Takes seconds per gigabyte."""
    checker = _DirectoryChecker(files, objects, uploads)
    checker.check_names()
    checker.check_variants()
    checker.check_claims()
    checker.check_reports()
    checker.check_objects()
    checker.check_missing()
    checker.check_leftovers()
    return checker.report()


class _DirectoryChecker(Checker):
    def __init__(self, files: DirectoryFiles, objects: DirectoryObjects, uploads: Uploads) -> None:
        super().__init__(files)
        self._root = files.root
        self._objects = objects
        self._uploads = uploads
        self._seen: set[str] = set()

    def check_names(self) -> None:
        """Report files that the registry's layout has no place for."""
        root, variants = self._root, self._root / "variants"
        folders = (*LAYOUT, DIRECTORY, *OF_SERVERS)
        files = re.compile(rf"{DRAFT}|{re.escape(FORMAT_FILE)}")
        self._check_folder(
            root, lambda entry: entry.name in folders if entry.is_dir() else _is_file(entry, files)
        )
        self._check_folder(Path(self._claims.directory), _is_named_directory)
        for folder in map(Path, self._claims.directories()):
            self._check_folder(folder, lambda entry: _is_file(entry, CLAIM_FILE))
        self._check_folder(Path(self._claims.index), lambda entry: _is_file(entry, INDEX_FILE))
        self._check_folder(root / REPORTS, _is_named_directory)
        for tenant in self._files.subdirectories(root / REPORTS):
            self._check_folder(root / REPORTS / tenant, lambda entry: _is_file(entry, REPORT_FILE))
        self._check_folder(self._objects.directory, lambda entry: _is_file(entry, OBJECT_FILE))
        self._check_folder(self._uploads.directory, lambda entry: _is_file(entry, PARTIAL_FILE))
        self._check_folder(self._objects.quarantine_directory, lambda entry: _is_file(entry, QUARANTINE_FILE))
        if (root / DIRECTORY).is_dir():
            self._check_folder(root / DIRECTORY, lambda entry: _is_file(entry, RESERVE_FILE))
        self._check_folder(variants, _is_named_directory)
        for tenant in self._files.subdirectories(variants):
            self._check_folder(variants / tenant, _is_named_directory)
        for directory in directories(self._files):
            self._check_folder(Path(directory.path), lambda entry: _is_file(entry, VARIANT_FILE))

    def check_objects(self) -> None:
        """Report objects whose bytes do not match their name or the records that refer to them."""
        for digest in self._objects.digests():
            path = self._objects.path(digest)
            # It may be collected or quarantined meanwhile.
            with contextlib.suppress(FileNotFoundError):
                found = hash_file(path)
                self._seen.add(digest)
                self._check_object(path, digest, found)

    def check_missing(self) -> None:
        """Report live versions whose object is neither stored nor quarantined."""
        for directory, record in self.versions:
            if record.digest in self._seen:
                continue
            path = directory.record_path(record.version)
            if self._objects.is_quarantined(record):
                self._note(path, f"quarantined ({self._objects.reason(record)}): upload it again")
            elif self._objects.aside(record.digest):
                self._note(path, "its object was about to be removed: the next use or gc puts it back")
            elif not self._objects.path(record.digest).exists() and self._is_live(directory, record.version):
                self._find(path, f"its object {record.digest} is missing: upload the artifact again")

    def check_leftovers(self) -> None:
        """Note the files that crashes left behind, because they take space."""
        for partial in self._uploads.partials():
            with contextlib.suppress(FileNotFoundError), abandoned(partial, time.time()) as is_abandoned:
                if is_abandoned:
                    self._note(partial, "an abandoned upload: gc removes it")
        variants = list(directories(self._files))
        folders = {Path(path) for each in variants for path in (each.path, each.reports)}
        rest = (
            self._root,
            Path(self._claims.index),
            self._objects.quarantine_directory,
            self._root / DIRECTORY,
        )
        for folder in (*rest, *map(Path, self._claims.directories()), *sorted(folders)):
            for path in temporaries(folder, time.time()):
                self._note(path, "left by a crash: gc removes it")
        for aside in self._objects.aside():
            if self._objects.path(digest_of(aside)).exists():
                self._note(aside, "a second name of an object, left by a crash: gc removes it")
        for digest in self._objects.evidence():
            if self._objects.path(digest).exists() or not self._objects.mark_path(digest).exists():
                self._note(self._objects.evidence_path(digest), "its object was healed: gc removes it")

    def _check_folder(self, folder: Path, is_known: Callable[[os.DirEntry[str]], bool]) -> None:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if not is_known(entry) and not FOREIGN.fullmatch(entry.name):
                    self._find(folder / entry.name, "not a file of the registry: move it away")

    def _check_object(self, path: Path, digest: str, found: ChunkedDigest) -> None:
        if found.digest() != digest and self._objects.mark_path(digest).exists():
            self._note(path, "found corrupt, but its quarantine was cut short: the next read ends it")
            return
        self.num_objects += 1
        if found.digest() != digest:
            self._find(path, f"its bytes have the digest {found.digest()}: upload the artifact again")
            return
        users = [(directory, record) for directory, record in self.versions if record.digest == digest]
        if not users:
            self._note(path, "no live version refers to it: gc removes it")
        for directory, record in users:
            if (record.size_bytes, record.chunk_sha256) != (found.num_bytes, found.chunk_digests()):
                self._find(
                    directory.record_path(record.version), "its size or chunk digests are not its object's"
                )


def _is_file(entry: os.DirEntry[str], pattern: re.Pattern[str]) -> bool:
    return entry.is_file(follow_symlinks=False) and pattern.fullmatch(entry.name) is not None


def _is_named_directory(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False) and is_name(entry.name)
