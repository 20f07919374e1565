"""A registry in a directory: publication of objects, garbage collection, and the check of the whole.

Servers publish while gc runs. An object is therefore set aside first; then the sealed uploads are listed and all
versions read again, in this order, and only a file whose digest neither has is removed. `REGISTRY.md` has the argument.

The check compares bytes, digests, records, states and names, each against the others. A finding is damage that no crash
explains; a note is a leftover of a crash, which gc removes. The check changes nothing and takes no lock, so servers go
on meanwhile. A missing object is looked for again before it is reported.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from deltastore.errors import RegistryError, RegistryUnavailable
from deltastore.registry import variants
from deltastore.registry.checker import Checker, leftovers, listed_reports, records_in_use
from deltastore.registry.claims import (
    FORMAT_FILE,
    INDEX,
    LAYOUT,
    OF_SERVERS,
    STATED_FORMAT,
    Claims,
    check_format,
    older,
)
from deltastore.registry.directory.files import (
    ASIDE,
    DIGEST,
    MARK,
    DirectoryFiles,
    DirectoryObjects,
    digest_of,
)
from deltastore.registry.records import REPORT, CheckReport, GcReport, VersionRecord, is_name
from deltastore.registry.storage import (
    RESERVE_DIRECTORY,
    RESERVE_NAME,
    TEMPORARY,
    Storage,
    explained,
    file_size,
    file_time_s,
    listed_names,
    read_from_volume,
)
from deltastore.registry.uploads import NAME as PARTIAL_FILE
from deltastore.registry.uploads import ChunkedDigest, SealedUpload, Uploads, abandoned, hash_file
from deltastore.registry.variants import RECORD, REPORTS, STATE, directories

# Temporary files get their final names in milliseconds.
LEFT_AFTER_S = 60


class Collector:
    """Removes the garbage of a registry."""

    def __init__(
        self, files: DirectoryFiles, objects: DirectoryObjects, uploads: Uploads, storage: Storage
    ) -> None:
        self._root = files.root
        self._files = files
        self._objects = objects
        self._uploads = uploads
        self._storage = storage

    def collect(self, *, dry_run: bool) -> GcReport:
        """Remove garbage, or with `dry_run` only report it.

        Raises:
            RegistryError: A record or state is damaged, so the objects in use are unknown; nothing was removed.
        """
        objects = self._objects
        try:
            needed = self._in_use()
            stored = {*objects.digests(), *objects.marked(), *objects.evidence()}
            unused = {*stored, *map(digest_of, objects.aside())} - needed
            sizes = {digest: self._size_of(digest) for digest in unused}
            removed = unused if dry_run else self._removed(unused)
        except RegistryError as error:
            raise RegistryError(f"nothing was collected: {error}") from error
        evidence, marked = self._healed(needed)
        leftovers = [*evidence, *self._leftovers()]
        freed = sum(sizes[digest] for digest in removed) + _size(leftovers)
        if not dry_run:
            for path in leftovers:
                with contextlib.suppress(FileNotFoundError):
                    self._storage.unlink(path)
            for digest in marked:
                self._objects.drop_mark(digest)
        num_partials, partial_bytes = self._uploads.remove_abandoned(dry_run=dry_run)
        return GcReport(tuple(sorted(removed)), num_partials, len(leftovers), freed + partial_bytes, dry_run)

    def withdraw(self, digest: str, upload: Path) -> None:
        """Remove an object whose publication failed, which a full disk needs, unless something else uses it.

        Args:
            digest: The object's digest.
            upload: The sealed upload that was to be published, which does not count as a use.

        Raises:
            RegistryError: A record or state is damaged, so the objects in use are unknown; nothing was removed.
        """
        self._removed([digest], upload)

    def _removed(self, digests: Iterable[str], except_for: Path | None = None) -> set[str]:
        """Remove the objects of some digests that are really not in use, and return these digests."""
        try:
            for digest in digests:
                self._objects.set_aside(digest)
            # Those of a gc that died, too. They are listed before the versions are read.
            asides = self._objects.aside()
            needed = self._in_use(except_for)
        except BaseException:
            # Also if the volume failed: a server would find each missing at its next load, and put it back then.
            with contextlib.suppress(OSError):
                self._put_back(self._objects.aside())
            raise
        self._put_back([aside for aside in asides if digest_of(aside) in needed])
        self._objects.discard([aside for aside in asides if digest_of(aside) not in needed])
        removed = set(digests) - needed
        self._objects.forget(removed)
        return removed

    def _put_back(self, asides: list[Path]) -> None:
        """Make files that were set aside objects again: each of them, also if others fail."""
        with contextlib.ExitStack() as stack:
            for aside in asides:
                stack.callback(self._objects.put_back, aside)

    def _in_use(self, except_for: Path | None = None) -> set[str]:
        """Return the digests of all sealed uploads but one, and of all live versions, read in this order.

        Raises:
            RegistryError: A record or state is damaged, so some are unknown.
        """
        needed = self._uploads.sealed_digests(except_for)
        return needed | {record.digest for record in records_in_use(self._files)}

    def _size_of(self, digest: str) -> int:
        paths = [self._objects.path(digest), self._objects.evidence_path(digest)]
        return _size([*paths, *self._objects.aside(digest)])

    def _healed(self, needed: set[str]) -> tuple[list[Path], list[str]]:
        """Return the evidence of objects that were uploaded again, and the digests that still have a mark."""
        evidence, marked = set(self._objects.evidence()), set(self._objects.marked())
        # Last: an object that is there after its mark was seen ends the quarantine.
        healed = needed & set(self._objects.digests())
        return [self._objects.evidence_path(digest) for digest in healed & evidence], sorted(healed & marked)

    def _leftovers(self) -> list[Path]:
        """Return temporary files, entries that newer ones replace, and what deletions and publications left."""
        reports = listed_reports(self._files)
        # After the reports were listed.
        under_way = self._uploads.sealed_digests()
        claims = Claims(self._files)
        variants = list(directories(self._files))
        folders = [
            self._objects.quarantine_directory,
            self._root / RESERVE_DIRECTORY,
            Path(claims.index),
            *map(Path, claims.directories()),
            *(Path(directory.path) for directory in variants),
            *{Path(directory.reports) for directory in variants},
        ]
        now_s = self._storage.touch(self._uploads.directory)
        found = [path for folder in folders for path in temporaries(folder, now_s)]
        for name in claims.names():
            found += map(Path, claims.entries(name).superseded())
        for directory in variants:
            found += map(Path, directory.entries.superseded())
        return [*found, *map(Path, leftovers(self._files, reports, under_way))]


def temporaries(directory: Path, now_s: float) -> list[Path]:
    """List a directory's temporary files, which a crash kept from getting their final names.

    Args:
        directory: A directory of the registry.
        now_s: The time by the clock of the file system, as `Storage.touch` returns it.
    """
    paths = sorted(directory.glob(f"*{TEMPORARY}"))
    times = ((path, file_time_s(path)) for path in paths)
    return [path for path, time_s in times if time_s is not None and time_s < now_s - LEFT_AFTER_S]


def _size(paths: Iterable[Path]) -> int:
    return sum(file_size(path) or 0 for path in paths)


DRAFT = rf"\..*{re.escape(TEMPORARY)}"
QUARANTINE_FILE = re.compile(rf"{DRAFT}|{DIGEST.pattern}({re.escape(MARK)})?")
RESERVE_FILE = re.compile(rf"{DRAFT}|{RESERVE_NAME}")
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
        folders = (*LAYOUT, RESERVE_DIRECTORY, *OF_SERVERS)
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
        if (root / RESERVE_DIRECTORY).is_dir():
            self._check_folder(root / RESERVE_DIRECTORY, lambda entry: _is_file(entry, RESERVE_FILE))
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
            self._root / RESERVE_DIRECTORY,
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


class DirectoryWriter:
    """A publication whose object is `objects/DIGEST`, which all versions of its bytes share."""

    stored_as = None

    def __init__(self, objects: DirectoryObjects, sealed: SealedUpload) -> None:
        self._objects = objects
        self._sealed = sealed

    def store(self, record: VersionRecord, *, is_known: bool) -> None:
        self._objects.put(self._sealed)

    def confirm(self) -> None:
        # A gc that began before there was the record may have removed the object.
        self._objects.ensure(self._sealed)


class DirectoryStore:
    """The store of a registry in a directory, which any number of servers may share."""

    def __init__(self, root: Path, storage: Storage) -> None:
        self.root = root.absolute()
        self.files = DirectoryFiles(self.root, storage)
        self.objects = DirectoryObjects(self.root, storage, self.files.reserve)
        self.uploads = Uploads(self.root / "uploads", storage, self.explained)
        self._storage = storage
        self._collector = Collector(self.files, self.objects, self.uploads, storage)

    def prepare(self) -> None:
        """Create the missing directories of a registry.

        Raises:
            RegistryError: Another version of Peraxis wrote it, or the disk failed.
        """
        with self.explained():
            self._make_format()
            for name in LAYOUT:
                self._storage.make_dirs(self.root / name)
            # Existing directories too: the process that made them may have died before its fsync.
            self._storage.fsync_dir(self.root)
            # Without the right to open the parent, this user did not create the root either.
            with contextlib.suppress(PermissionError):
                self._storage.fsync_dir(self.root.parent)
        self.files.reserve.fill()

    def probe(self) -> None:
        self.files.check_present()
        read_from_volume(self.root / FORMAT_FILE)
        with os.scandir(self.root / variants.DIRECTORY) as tenants:
            next(tenants, None)

    def explained(self) -> AbstractContextManager[None]:
        return explained(self.root)

    @contextlib.contextmanager
    def writing(self, sealed: SealedUpload) -> Iterator[DirectoryWriter]:
        try:
            yield DirectoryWriter(self.objects, sealed)
        except (OSError, RegistryError, RegistryUnavailable):
            with contextlib.suppress(OSError, RegistryError, RegistryUnavailable):
                self._collector.withdraw(sealed.digest, sealed.path)
            raise

    def collect(self, *, dry_run: bool) -> GcReport:
        report = self._collector.collect(dry_run=dry_run)
        if not dry_run:
            self.files.reserve.fill()
        return report

    def check(self) -> CheckReport:
        return check(self.files, self.objects, self.uploads)

    def _make_format(self) -> None:
        path = self.root / FORMAT_FILE
        try:
            check_format(path.read_bytes(), str(path))
        except FileNotFoundError:
            if listed_names(self.root / variants.DIRECTORY):
                raise older(self.files.location) from None
            self._storage.make_dirs(self.root)
            # Before the directories: one with variants and without it counts as an older registry.
            self._storage.add(path, STATED_FORMAT)
