"""Garbage collection of a registry: objects without a live version, and leftovers of crashes.

Servers publish meanwhile. An object is therefore set aside first; then the sealed uploads are listed and all versions
read again, in this order, and only a file whose digest neither has is removed. `REGISTRY.md` has the argument.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from deltastore.errors import RegistryError
from deltastore.registry.checker import leftovers, listed_reports, records_in_use
from deltastore.registry.claims import Claims
from deltastore.registry.directory.files import DirectoryFiles
from deltastore.registry.directory.objects import DirectoryObjects, digest_of
from deltastore.registry.directory.reserve import DIRECTORY
from deltastore.registry.reports import GcReport
from deltastore.registry.storage import TEMPORARY, Storage, file_size, file_time_s
from deltastore.registry.uploads import Uploads
from deltastore.registry.variants import directories

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
            self._root / DIRECTORY,
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
