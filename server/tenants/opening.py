"""Opens the small files of a registry in its directory or its bucket, without the registry. Makes no call."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import NamedTuple

from deltastore.registry.directory.files import DirectoryFiles
from deltastore.registry.files import SmallFiles
from deltastore.registry.place import is_bucket
from deltastore.registry.storage import Storage

DIRECTORY = "tenants"


class RecordFiles(NamedTuple):
    """The files of one kind of record."""

    files: SmallFiles
    directory: PurePath


def open_files(registry: str | Path, storage: Storage | None = None) -> SmallFiles:
    """Return the small files of a registry.

    Args:
        registry: its directory, or `s3://BUCKET/PREFIX`.
        storage: changes the files of a directory.

    Raises:
        UsageError: the location is malformed.
    """
    if not is_bucket(str(registry)):
        return DirectoryFiles(Path(registry).absolute(), storage or Storage())
    # Deferred: only a bucket needs obstore.
    from deltastore.registry.bucket.client import Bucket
    from deltastore.registry.bucket.files import BucketFiles

    return BucketFiles(Bucket.open(str(registry)))


def record_files(registry: str | Path, kind: str, storage: Storage | None = None) -> RecordFiles:
    """Return the files of one kind of record, `tenants/KIND/*.json`; arguments and errors are those of `open_files`."""
    files = open_files(registry, storage)
    return RecordFiles(files, files.root / DIRECTORY / kind)
