"""Artifacts at rest: `objects/<digest>`, and `quarantine/` for corrupt ones. Knows no names or versions.

A digest is quarantined exactly while its mark `quarantine/<digest>.json` exists; wherever the bytes are then,
they are not served. Changes happen under the registry's objects lock, which the caller holds.
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
from deltastore.registry.storage import Storage
from deltastore.registry.uploads import SealedUpload

DIGEST = re.compile(r"[0-9a-f]{64}")
MARK = ".json"


class Usage(NamedTuple):
    """How full the registry is."""

    num_objects: int
    num_bytes: int  # of the objects
    free_bytes: int  # of the file system, as far as this user may fill it
    num_quarantined: int


class Objects:
    """The registry's artifacts by digest, 64 lowercase hex digits everywhere."""

    def __init__(self, root: Path, storage: Storage) -> None:
        self.directory = root / "objects"
        self.quarantine_directory = root / "quarantine"
        self._storage = storage

    def path(self, digest: str) -> Path:
        return self.directory / _checked(digest)

    def evidence_path(self, digest: str) -> Path:
        """Where the corrupt bytes lie after a quarantine."""
        return self.quarantine_directory / _checked(digest)

    def mark_path(self, digest: str) -> Path:
        return self.quarantine_directory / f"{_checked(digest)}{MARK}"

    def put(self, sealed: SealedUpload) -> None:
        """Give a sealed upload its place, durably.

        An object that is already there is replaced by the same bytes, freshly written: whether an older
        file's fsync and blocks were good nobody knows, of these we do. Its readers keep the file that they
        have open. A quarantine of the digest ends.
        """
        self._storage.rename(sealed.path, self.path(sealed.digest))
        self._storage.fsync_dir(self.directory)
        if self.is_quarantined(sealed.digest):
            self._remove(self.mark_path(sealed.digest))
        self._storage.fsync_dir(self.quarantine_directory)  # also for a mark that somebody else just removed
        self._remove(self.evidence_path(sealed.digest))

    def quarantine(self, digest: str, reason: str) -> None:
        """Mark a digest as corrupt, durably, and move its bytes out of the way."""
        mark = json.dumps({"digest": digest, "reason": reason}).encode()
        self._storage.replace(self.mark_path(digest), mark)
        with contextlib.suppress(FileNotFoundError):  # the object may be missing altogether, or moved already
            self._storage.rename(self.path(digest), self.evidence_path(digest))
        self._storage.fsync_dir(self.quarantine_directory)
        self._storage.fsync_dir(self.directory)

    def is_quarantined(self, digest: str) -> bool:
        return self.mark_path(digest).exists()

    def reason(self, digest: str) -> str:
        """Why a digest is quarantined. A mark that cannot be read is still a mark."""
        try:
            return str(json.loads(self.mark_path(digest).read_bytes())["reason"])
        except (OSError, ValueError, LookupError, TypeError):
            return "its mark cannot be read"

    def digests(self) -> Iterator[str]:
        """Every file in `objects/` that is named like a digest, quarantined or not."""
        return _names(self.directory, DIGEST)

    def marked(self) -> Iterator[str]:
        """Every quarantined digest."""
        for name in _names(self.quarantine_directory, re.compile(DIGEST.pattern + re.escape(MARK))):
            yield name.removesuffix(MARK)

    def evidence(self) -> Iterator[str]:
        """Every digest whose corrupt bytes are kept."""
        return _names(self.quarantine_directory, DIGEST)

    def remove(self, digests: list[str]) -> None:
        """Remove objects, evidence and marks, durably; a mark goes only after the bytes that it warns of."""
        for digest in digests:
            self._remove(self.path(digest))
            self._remove(self.evidence_path(digest))
        self._storage.fsync_dir(self.directory)
        for digest in digests:
            self._remove(self.mark_path(digest))
        self._storage.fsync_dir(self.quarantine_directory)

    def discard(self, digest: str) -> None:
        """Remove an object that nobody was told of; should it come back, collection takes it. A mark stays."""
        self._remove(self.path(digest))

    def usage(self) -> Usage:
        sizes = [size for digest in self.digests() if (size := file_size(self.path(digest))) is not None]
        disk = os.statvfs(self.directory)
        return Usage(len(sizes), sum(sizes), disk.f_bavail * disk.f_frsize, sum(1 for _ in self.marked()))

    def _remove(self, path: Path) -> None:
        if file_size(path) is not None:
            with contextlib.suppress(FileNotFoundError):
                self._storage.unlink(path)


def file_size(path: Path) -> int | None:
    """Bytes of a file, or None where there is none (any more)."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _names(directory: Path, pattern: re.Pattern[str]) -> Iterator[str]:
    return (name for name in sorted(os.listdir(directory)) if pattern.fullmatch(name))


def _checked(digest: str) -> str:
    if not DIGEST.fullmatch(digest):
        raise UsageError(f"{digest!r} is no digest: 64 lowercase hex digits, without a prefix")
    return digest
