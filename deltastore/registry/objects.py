"""The stored artifacts: `objects/<digest>`, and corrupt ones in `quarantine/`. Must not know variants or versions.

A digest is quarantined while its mark `quarantine/<digest>.json` exists; its bytes are then not served, wherever they
are. The corrupt bytes, `quarantine/<digest>`, are called evidence. The caller holds the registry's objects lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from deltastore.errors import UsageError
from deltastore.registry.reserve import Reserve
from deltastore.registry.storage import Storage, file_size
from deltastore.registry.uploads import SealedUpload

DIGEST = re.compile(r"[0-9a-f]{64}")
MARK = ".json"


class Usage(NamedTuple):
    """The registry's counts and sizes."""

    num_objects: int
    num_bytes: int  # of the objects
    free_bytes: int  # of the file system, for this user
    num_quarantined: int


class Objects:
    """The registry's artifacts by digest: SHA-256 as 64 lowercase hex digits."""

    def __init__(self, root: Path, storage: Storage) -> None:
        self.directory = root / "objects"
        self.quarantine_directory = root / "quarantine"
        self._storage = storage

    def path(self, digest: str) -> Path:
        return self.directory / _checked(digest)

    def evidence_path(self, digest: str) -> Path:
        """The path of the corrupt bytes after a quarantine."""
        return self.quarantine_directory / _checked(digest)

    def mark_path(self, digest: str) -> Path:
        return self.quarantine_directory / f"{_checked(digest)}{MARK}"

    def put(self, sealed: SealedUpload) -> None:
        """Move a sealed upload to its final path, durably, and end a quarantine of its digest.

        An object of the same digest is replaced: these bytes are known to be written and synced, those of the older
        file are not. Its readers keep the file that they have open.
        """
        self._storage.rename(sealed.path, self.path(sealed.digest))
        self._storage.fsync_dir(self.directory)
        if self.is_quarantined(sealed.digest):
            self._remove(self.mark_path(sealed.digest))
        # Unconditionally: another process may have removed the mark without a sync.
        self._storage.fsync_dir(self.quarantine_directory)
        self._remove(self.evidence_path(sealed.digest))

    def quarantine(self, digest: str, reason: str, reserve: Reserve) -> None:
        """Mark a digest as corrupt, durably, and move its bytes out of the way."""
        mark = json.dumps({"digest": digest, "reason": reason}).encode()
        reserve.replace(self.mark_path(digest), mark)
        # The object may be missing, or moved already.
        with contextlib.suppress(FileNotFoundError):
            self._storage.rename(self.path(digest), self.evidence_path(digest))
        self._storage.fsync_dir(self.quarantine_directory)
        self._storage.fsync_dir(self.directory)

    def is_file(self, digest: str, status: os.stat_result) -> bool:
        """True if an object is stored in this very file."""
        try:
            return os.path.samestat(self.path(digest).stat(), status)
        except FileNotFoundError:
            return False

    def is_quarantined(self, digest: str) -> bool:
        return self.mark_path(digest).exists()

    def reason(self, digest: str) -> str:
        """Return why a digest is quarantined. An unreadable mark still quarantines."""
        try:
            return str(json.loads(self.mark_path(digest).read_bytes())["reason"])
        except (OSError, ValueError, LookupError, TypeError):
            return "its mark cannot be read"

    def digests(self) -> Iterator[str]:
        """Yield the name of every file in `objects/` that is a digest, quarantined or not."""
        return _names(self.directory, DIGEST)

    def marked(self) -> Iterator[str]:
        """Yield every quarantined digest."""
        for name in _names(self.quarantine_directory, re.compile(DIGEST.pattern + re.escape(MARK))):
            yield name.removesuffix(MARK)

    def evidence(self) -> Iterator[str]:
        """Yield every digest whose corrupt bytes are kept."""
        return _names(self.quarantine_directory, DIGEST)

    def remove(self, digests: list[str]) -> None:
        """Remove objects, evidence and marks, durably; each mark after the bytes that it quarantines."""
        for digest in digests:
            self._remove(self.path(digest))
            self._remove(self.evidence_path(digest))
        self._storage.fsync_dir(self.directory)
        for digest in digests:
            self._remove(self.mark_path(digest))
        self._storage.fsync_dir(self.quarantine_directory)

    def discard(self, digest: str) -> None:
        """Remove an object whose publication failed, without a sync: gc removes it if it reappears. A mark stays."""
        self._remove(self.path(digest))

    def usage(self) -> Usage:
        sizes = [size for digest in self.digests() if (size := file_size(self.path(digest))) is not None]
        disk = os.statvfs(self.directory)
        return Usage(len(sizes), sum(sizes), disk.f_bavail * disk.f_frsize, sum(1 for _ in self.marked()))

    def _remove(self, path: Path) -> None:
        if file_size(path) is not None:
            with contextlib.suppress(FileNotFoundError):
                self._storage.unlink(path)


def _names(directory: Path, pattern: re.Pattern[str]) -> Iterator[str]:
    return (name for name in sorted(os.listdir(directory)) if pattern.fullmatch(name))


def _checked(digest: str) -> str:
    if not DIGEST.fullmatch(digest):
        raise UsageError(f"{digest!r} is not a digest: give 64 lowercase hex digits without a prefix")
    return digest
