"""The check of a registry in a bucket: objects, records, states and names, each against the others.

Reads every object, so it takes as long as to download them all. Changes nothing; servers go on meanwhile.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import PurePath
from typing import TYPE_CHECKING

from deltastore.registry.bucket.collect import CLOCK
from deltastore.registry.bucket.files import BucketFiles
from deltastore.registry.bucket.objects import (
    INTENTS,
    MARK,
    MARKS,
    OBJECTS,
    STORED,
    BucketObjects,
    identity_of,
    stored_name,
)
from deltastore.registry.checker import Checker
from deltastore.registry.claims import DIRECTORY as CLAIMS
from deltastore.registry.claims import FORMAT_FILE, INDEX, OF_SERVERS, PUBLIC_NAMES
from deltastore.registry.records import NAME, REPORT, VersionRecord
from deltastore.registry.reports import CheckReport
from deltastore.registry.uploads import ChunkedDigest
from deltastore.registry.variants import DIRECTORY, RECORD, REPORTS, STATE

if TYPE_CHECKING:
    from obstore import ObjectMeta

NUMBER = r"[0-9]{6,18}\.json"
NAMED = NAME.pattern.strip("^$")
KNOWN = re.compile(
    "|".join(
        (
            re.escape(FORMAT_FILE),
            *(f"{folder}/.*" for folder in OF_SERVERS),
            rf"{DIRECTORY}/{NAMED}/{NAMED}/(?:{RECORD.pattern}|{STATE}{NUMBER})",
            rf"{REPORTS}/{NAMED}/(?:{REPORT.pattern})",
            rf"{CLAIMS}/{NAMED}/{NUMBER}",
            rf"{PUBLIC_NAMES}/(?:{INDEX.pattern})",
            rf"{OBJECTS}/{STORED.pattern}",
            rf"{INTENTS}/(?:{STORED.pattern}|{CLOCK})",
            rf"{MARKS}/{STORED.pattern}{re.escape(MARK)}",
        )
    )
)


def check(files: BucketFiles, objects: BucketObjects) -> CheckReport:
    """Read and check every file and object of a registry."""
    found = files.below(files.root)
    checker = _BucketChecker(files.listed(files.root / DIRECTORY, files.root / CLAIMS), objects)
    checker.check_names(found)
    checker.check_variants()
    checker.check_claims()
    checker.check_reports()
    checker.check_objects()
    return checker.report()


class _BucketChecker(Checker):
    def __init__(self, files: BucketFiles, objects: BucketObjects) -> None:
        super().__init__(files)
        self._root = files.root
        self._objects = objects

    def check_names(self, found: list[ObjectMeta]) -> None:
        """Report files that the registry's layout has no place for."""
        for meta in found:
            if not KNOWN.fullmatch(meta["path"]):
                self._find(self._root / meta["path"], "not a file of the registry: move it away")

    def check_objects(self) -> None:
        """Report objects that are missing or whose bytes are not their record's, and those without a record."""
        stored, marks = self._objects.stored(), self._objects.marks()
        self.num_objects = len(stored)
        for directory, record in self.versions:
            path = directory.record_path(record.version)
            name = stored_name(record)
            identity = identity_of(stored[name]) if name in stored else None
            if name in marks and marks[name] in (identity, None):
                self._note(path, f"quarantined ({self._objects.reason(record)}): upload it again")
            elif name not in stored:
                if self._is_live(directory, record.version) and self._objects.identity(record) is None:
                    self._find(path, f"its object {name} is missing: upload the artifact again")
            else:
                # It may be collected meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    self._check_object(path, record, self._objects.hash(name))
        for name in sorted(stored.keys() - {stored_name(record) for _, record in self.versions}):
            self._note(self._root / OBJECTS / name, "no live version refers to it: gc removes it")

    def _check_object(self, path: PurePath, record: VersionRecord, found: ChunkedDigest) -> None:
        if found.digest() != record.digest:
            self._find(
                self._root / OBJECTS / stored_name(record),
                f"its bytes have the digest {found.digest()}: upload the artifact again",
            )
        elif (record.size_bytes, record.chunk_sha256) != (found.num_bytes, found.chunk_digests()):
            self._find(path, "its size or chunk digests are not its object's")
