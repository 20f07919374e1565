"""An artifact on this machine's disk, to be sent: its size, its digest and its bytes. Knows no HTTP."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deltastore.errors import ArtifactError, UsageError
from deltastore.format.header import check_prefix

BLOCK_BYTES = 1 << 20
# The bytes at the beginning of an artifact that tell it from most other files.
PREFIX_BYTES = 9


@dataclass(frozen=True, slots=True)
class ArtifactFile:
    """A file whose first bytes are an artifact's, as it was when it was hashed."""

    path: Path
    size_bytes: int
    sha256: bytes

    @classmethod
    def read(cls, path: Path, progress: Callable[[int], object]) -> ArtifactFile:
        """Hash a file.

        Args:
            path: The file.
            progress: Called with the number of bytes hashed since the last call.

        Raises:
            UsageError: It does not exist, or is no regular file.
            ArtifactError: It is no artifact.
            OSError: It cannot be read.
        """
        if not path.exists():
            raise UsageError(f"{path}: no such file: give the artifact that `peraxis compress` wrote")
        if not path.is_file():
            raise UsageError(f"{path} is no file: give the artifact that `peraxis compress` wrote")
        digest, num_bytes = hashlib.sha256(), 0
        for block in _blocks(path):
            if not num_bytes:
                check_prefix(block[:PREFIX_BYTES], path.stat().st_size, str(path))
            digest.update(block)
            num_bytes += len(block)
            progress(len(block))
        if not num_bytes:
            raise ArtifactError(f"{path} is empty: give the artifact that `peraxis compress` wrote")
        return cls(path, num_bytes, digest.digest())

    @property
    def digest(self) -> str:
        """The digest as the server names it: ``sha256:`` and 64 hex digits."""
        return f"sha256:{self.sha256.hex()}"

    def blocks(self, progress: Callable[[int], object]) -> Iterator[bytes]:
        """Yield the file's bytes, and call `progress` with the number of each block's once the next is asked for.

        Raises:
            ArtifactError: The file has another length than when it was hashed.
        """
        num_bytes = 0
        for block in _blocks(self.path):
            num_bytes += len(block)
            if num_bytes > self.size_bytes:
                break
            yield block
            progress(len(block))
        if num_bytes != self.size_bytes:
            raise ArtifactError(f"{self.path} changed while it was sent: push it again")


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block
