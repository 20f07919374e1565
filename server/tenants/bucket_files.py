"""The files of small records, `tenants/NAME/*.json`, and of audit lines, in a bucket. Must not know what they mean.

Rights on the bucket replace the mode of a file. An object's ETag tells its contents, so no change goes unseen.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import PurePosixPath

from deltastore.registry.bucket.client import Bucket
from deltastore.registry.bucket.files import BucketFiles
from deltastore.registry.directory.layout import FORMAT_FILE
from server.tenants.record_files import DIRECTORY, SUFFIX, FileVersion

# A reading is one call that the store's operator pays for.
FRESH_S = 1.0
REREAD_S = 0.25


class BucketRecordFiles:
    """Files in a bucket.

    Args:
        location: `s3://BUCKET/PREFIX` of the registry.
        kind: the directory's name in `tenants/`.

    Raises:
        UsageError: the location is malformed.
    """

    fresh_s = FRESH_S
    reread_s = REREAD_S

    def __init__(self, location: str, kind: str) -> None:
        self._bucket = Bucket.open(location)
        self._files = BucketFiles(self._bucket)
        self._directory = self._bucket.root / DIRECTORY / kind

    @property
    def where(self) -> str:
        return self._bucket.location

    def path(self, name: str) -> str:
        return str(self._file(name))

    def explained(self) -> AbstractContextManager[None]:
        # BucketFiles raises no error of the operating system but FileNotFoundError.
        return nullcontext()

    def check_present(self) -> None:
        try:
            self._files.status(self._bucket.root / FORMAT_FILE)
        except FileNotFoundError as error:
            raise self._bucket.gone() from error

    def scan(self, pattern: re.Pattern[str]) -> dict[str, FileVersion]:
        found = {}
        for meta in self._files.below(self._directory):
            path = self._bucket.root / meta["path"]
            name = path.name.removesuffix(SUFFIX)
            if path.parent == self._directory and name != path.name and pattern.fullmatch(name):
                found[name] = meta
        # One at a time, a thousand records would take longer than a request may wait.
        self._files.read_ahead(found.values())
        return {name: FileVersion((meta["e_tag"], meta["size"]), 0) for name, meta in found.items()}

    def read(self, name: str, max_bytes: int) -> bytes:
        return self._files.read(self._file(name))[:max_bytes]

    def write(self, name: str, data: bytes) -> None:
        self._files.replace(self._file(name), data)

    def remove(self, name: str) -> bool:
        path = self._file(name)
        try:
            self._files.status(path)
        except FileNotFoundError:
            return False
        self._files.delete(path)
        return True

    def _file(self, name: str) -> PurePosixPath:
        return self._directory / f"{name}{SUFFIX}"


class BucketLines:
    """Batches of lines in a bucket, each an object: what is stored there cannot be appended to.

    Args:
        location: `s3://BUCKET/PREFIX` of the registry.
        directory: its first part below the prefix.
    """

    def __init__(self, location: str, directory: str) -> None:
        bucket = Bucket.open(location)
        self._files = BucketFiles(bucket)
        self._directory = bucket.root / directory

    def add(self, name: str, lines: bytes) -> None:
        """Store lines under a new name, durably. Raises StorageFull or RegistryError."""
        self._files.add(self._directory / name, lines)
