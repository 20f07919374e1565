"""The files of a registry in a directory: small files and stored artifacts. Must not know which versions there are.

An artifact is `objects/<digest>`, a corrupt one lies in `quarantine/`. A digest is quarantined while its mark
`quarantine/<digest>.json` exists and its object does not: an upload that puts the object back ends the quarantine in
one step. The corrupt bytes, `quarantine/<digest>`, are called evidence.

An object is only removed or quarantined after it was set aside, which is a rename to `objects/<digest>.<token>`. What
a server decides afterwards concerns the file that it set aside, and never one that an upload has put there since. A
file that was set aside by a server that died is put back by a reader that misses it, or by gc. `REGISTRY.md` has the
argument.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Self, TypeVar

from deltastore.errors import UsageError
from deltastore.registry.claims import check_present
from deltastore.registry.records import Usage, VersionRecord
from deltastore.registry.storage import FULL, TEMPORARY, Reserve, Storage, file_size, listed_names
from deltastore.registry.store import FileVersion
from deltastore.registry.uploads import SealedUpload
from deltastore.registry.variants import attempts

# Mode of files that hold the hashes of keys, or audit lines.
OWNERS_MODE = 0o600

T = TypeVar("T")
Result = TypeVar("Result")


class DirectoryFiles:
    """The small files of a registry in a directory, on which `storage` makes the changes."""

    def __init__(self, root: Path, storage: Storage) -> None:
        self.root = root
        self.location = str(root)
        self.reserve = Reserve(root, storage)
        self._storage = storage

    def check_present(self, *, is_fresh: bool = False) -> None:
        check_present(self.root)

    def read(self, path: PurePath, *, is_fresh: bool = False) -> bytes:
        return Path(path).read_bytes()

    def is_directory(self, path: PurePath) -> bool:
        return Path(path).is_dir()

    def names(self, directory: PurePath, *, is_fresh: bool = False) -> list[str]:
        return listed_names(Path(directory))

    def each_name(self, directory: PurePath) -> Iterator[str]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory) as entries:
            for entry in entries:
                yield entry.name

    def subdirectories(self, directory: PurePath) -> list[str]:
        try:
            with os.scandir(directory) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except FileNotFoundError:
            return []

    def each(self, function: Callable[[T], Result], items: Sequence[T]) -> list[Result]:
        return [function(item) for item in items]

    def listed(self, *directories: PurePath) -> Self:
        return self

    def make_directory(self, directory: PurePath) -> None:
        self._storage.make_dirs(Path(directory))

    def make_durable(self, *directories: PurePath) -> None:
        for directory in directories:
            self._storage.fsync_dir(Path(directory))

    def add(self, path: PurePath, data: bytes) -> bool:
        return self._storage.add(Path(path), data)

    def add_or_make_room(
        self, path: PurePath, data: bytes, dispensable: Callable[[], Iterable[PurePath]]
    ) -> bool:
        try:
            return self.add(path, data)
        except OSError as error:
            if error.errno not in FULL:
                raise
        self.remove(dispensable())
        return self.reserve.create(Path(path), data)

    def replace(self, path: PurePath, data: bytes) -> None:
        self._storage.replace(Path(path), data, OWNERS_MODE)

    def append(self, path: PurePath, lines: bytes) -> None:
        self._storage.append(Path(path), lines, OWNERS_MODE)

    def delete(self, path: PurePath) -> bool:
        try:
            self._storage.unlink(Path(path))
            is_removed = True
        except FileNotFoundError:
            is_removed = False
        # Also without a file: the process that removed it may have died before its sync.
        if Path(path).parent.is_dir():
            self._storage.fsync_dir(Path(path).parent)
        return is_removed

    def versions(self, directory: PurePath) -> dict[str, FileVersion]:
        found: dict[str, FileVersion] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                # Opening a file of another kind may block.
                if stat.S_ISREG(status.st_mode):
                    identity = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                    found[entry.name] = FileVersion(identity, status.st_size, status.st_ctime_ns)
        return found

    def remove(self, paths: Iterable[PurePath]) -> None:
        with contextlib.suppress(OSError):
            for path in paths:
                # Another server may remove it at the same time.
                with contextlib.suppress(FileNotFoundError):
                    self._storage.unlink(Path(path))


DIGEST = re.compile(r"[0-9a-f]{64}")
ASIDE = re.compile(rf"({DIGEST.pattern})\.[0-9a-f]{{16}}")
MARK = ".json"


class DirectoryObjects:
    """The registry's artifacts by digest: SHA-256 as 64 lowercase hex digits."""

    def __init__(self, root: Path, storage: Storage, reserve: Reserve) -> None:
        self.directory = root / "objects"
        self.quarantine_directory = root / "quarantine"
        self._storage = storage
        self._reserve = reserve

    def local_path(self, record: VersionRecord) -> Path:
        return self.path(record.digest)

    def is_local(self, record: VersionRecord) -> bool:
        return True

    def path(self, digest: str) -> Path:
        return self.directory / _checked(digest)

    def evidence_path(self, digest: str) -> Path:
        """The path of the corrupt bytes after a quarantine."""
        return self.quarantine_directory / _checked(digest)

    def mark_path(self, digest: str) -> Path:
        return self.quarantine_directory / f"{_checked(digest)}{MARK}"

    def put(self, sealed: SealedUpload) -> None:
        """Store a sealed upload under its digest, durably, and end a quarantine of its digest.

        An object of the same digest is replaced: these bytes are known to be written and synced, those of the older
        file are not. Its readers keep the file that they have open.
        """
        for _ in attempts(self.directory):
            second = self._aside_path(sealed.digest)
            self._storage.link(sealed.path, second)
            try:
                self._storage.rename(second, self.path(sealed.digest))
                break
            except FileNotFoundError:
                # A gc took the second name for one that a crash left behind.
                continue
            finally:
                # It is left if the upload is stored already: a rename of a file to itself does nothing.
                with contextlib.suppress(FileNotFoundError):
                    self._storage.unlink(second)
        self._storage.fsync_dir(self.directory)
        self.drop_mark(sealed.digest)
        self._remove(self.evidence_path(sealed.digest))

    def ensure(self, sealed: SealedUpload) -> None:
        """Store a sealed upload again if its object is missing. Call it when a version refers to the object.

        It links instead of testing whether the object exists: an NFS client may answer the test from its cache.
        """
        if self._storage.linked(sealed.path, self.path(sealed.digest)):
            self._storage.fsync_dir(self.directory)

    def quarantine(self, record: VersionRecord, reason: str, found_in: os.stat_result | None) -> bool:
        """Mark a digest as corrupt, durably, and move its bytes out of the way.

        With `found_in`, only the file of this status is moved; return False if the object is another one by now.
        """
        digest = record.digest
        mark = json.dumps({"digest": digest, "reason": reason}).encode()
        for _ in attempts(self.directory):
            if found_in is not None and not _is_file(self.path(digest), found_in):
                return False
            self._reserve.replace(self.mark_path(digest), mark)
            aside = self.set_aside(digest)
            if aside is None and found_in is not None:
                continue
            if aside is not None and not self._is_evidence(aside, found_in):
                continue
            if not self.mark_path(digest).exists():
                # An upload, or a gc that saw object and mark side by side, has removed it.
                self._reserve.replace(self.mark_path(digest), mark)
            self._storage.fsync_dir(self.quarantine_directory)
            self._storage.fsync_dir(self.directory)
            return True
        raise AssertionError("attempts() ends with an exception")

    def drop_mark(self, digest: str) -> None:
        """Remove the mark of an object that was healed; leave it if a quarantine has taken the object since."""
        if file_size(self.mark_path(digest)) is None:
            return
        temporary = self.quarantine_directory / f".{secrets.token_hex(8)}{TEMPORARY}"
        with contextlib.suppress(FileNotFoundError):
            self._storage.rename(self.mark_path(digest), temporary)
            # A quarantine that takes the object after this look writes its mark again.
            if not self.path(digest).exists():
                self._storage.linked(temporary, self.mark_path(digest))
            self._storage.unlink(temporary)

    def is_quarantined(self, record: VersionRecord) -> bool:
        return self.mark_path(record.digest).exists() and not self.path(record.digest).exists()

    def reason(self, record: VersionRecord) -> str:
        """Return why an object is quarantined. An unreadable mark still quarantines."""
        try:
            return str(json.loads(self.mark_path(record.digest).read_bytes())["reason"])
        except (OSError, ValueError, LookupError, TypeError):
            return "its mark cannot be read"

    def digests(self) -> Iterator[str]:
        """Yield every digest that has an object."""
        return _names(self.directory, DIGEST)

    def marked(self) -> Iterator[str]:
        """Yield every digest with a mark, quarantined or not."""
        for name in _names(self.quarantine_directory, re.compile(DIGEST.pattern + re.escape(MARK))):
            yield name.removesuffix(MARK)

    def evidence(self) -> Iterator[str]:
        """Yield every digest whose corrupt bytes are kept."""
        return _names(self.quarantine_directory, DIGEST)

    def aside(self, digest: str | None = None) -> list[Path]:
        """Return the files that were set aside, all or those of one digest."""
        found = (ASIDE.fullmatch(name) for name in sorted(listed_names(self.directory)))
        return [self.directory / one[0] for one in found if one is not None and digest in (None, one[1])]

    def set_aside(self, digest: str) -> Path | None:
        """Rename an object, so that what is decided about its file concerns no other one; None if there is none."""
        aside = self._aside_path(digest)
        try:
            self._reserve.give_for(lambda: self._storage.rename(self.path(digest), aside))
        except FileNotFoundError:
            return None
        return aside

    def put_back(self, aside: Path) -> None:
        """Make a file that was set aside the object again, durably, unless an upload has put one there."""
        # Another server may put it back at the same time.
        with contextlib.suppress(FileNotFoundError):
            self._storage.linked(aside, self.path(digest_of(aside)))
            self._storage.fsync_dir(self.directory)
            self._storage.unlink(aside)

    def recover(self, record: VersionRecord) -> bool:
        """Put back an object that a server set aside; False if there is none."""
        for aside in self.aside(record.digest):
            self.put_back(aside)
        return self.path(record.digest).exists()

    def discard(self, asides: list[Path]) -> None:
        """Remove files that were set aside, durably."""
        for aside in asides:
            self._remove(aside)
        self._storage.fsync_dir(self.directory)

    def forget(self, digests: Iterable[str]) -> None:
        """Remove evidence and marks, durably; each mark after the bytes that it quarantines."""
        for digest in digests:
            self._remove(self.evidence_path(digest))
            self._remove(self.mark_path(digest))
        self._storage.fsync_dir(self.quarantine_directory)

    def usage(self) -> Usage:
        digests = set(self.digests())
        sizes = [size for digest in digests if (size := file_size(self.path(digest))) is not None]
        disk = os.statvfs(self.directory)
        return Usage(len(sizes), sum(sizes), disk.f_bavail * disk.f_frsize, len(set(self.marked()) - digests))

    def _is_evidence(self, aside: Path, found_in: os.stat_result | None) -> bool:
        """Move a file that was set aside to the evidence; put it back if it is not the corrupt one."""
        if found_in is not None and not _is_file(aside, found_in):
            self.put_back(aside)
            return False
        try:
            self._storage.rename(aside, self.evidence_path(digest_of(aside)))
        except FileNotFoundError:
            # Another server put it back.
            return False
        return True

    def _aside_path(self, digest: str) -> Path:
        return self.directory / f"{_checked(digest)}.{secrets.token_hex(8)}"

    def _remove(self, path: Path) -> None:
        if file_size(path) is not None:
            with contextlib.suppress(FileNotFoundError):
                self._storage.unlink(path)


def digest_of(aside: Path) -> str:
    """Return the digest of an object that was set aside."""
    return aside.name.partition(".")[0]


def _is_file(path: Path, status: os.stat_result) -> bool:
    """True if a path leads to this very file."""
    try:
        return os.path.samestat(path.stat(), status)
    except FileNotFoundError:
        return False


def _names(directory: Path, pattern: re.Pattern[str]) -> Iterator[str]:
    return (name for name in sorted(os.listdir(directory)) if pattern.fullmatch(name))


def _checked(digest: str) -> str:
    if not DIGEST.fullmatch(digest):
        raise UsageError(f"{digest!r} is not a digest: give 64 lowercase hex digits without a prefix")
    return digest
