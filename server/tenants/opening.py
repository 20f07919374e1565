"""Opens the files of records of a registry: in its directory or its bucket. Must not know what they mean."""

from __future__ import annotations

from pathlib import Path

from deltastore.registry.place import is_bucket
from deltastore.registry.storage import Storage
from server.tenants.record_files import DirectoryRecordFiles, RecordFiles


def record_files(registry: str | Path, kind: str, storage: Storage | None = None) -> RecordFiles:
    """Return the files of one kind of record of a registry. Makes no call.

    Args:
        registry: its directory, or `s3://BUCKET/PREFIX`.
        kind: the directory's name in `ROOT/tenants`.
        storage: changes the files of a directory.

    Raises:
        UsageError: the location is malformed.
    """
    if isinstance(registry, str) and is_bucket(registry):
        # Deferred: only a bucket needs obstore.
        from server.tenants.bucket_files import BucketRecordFiles

        return BucketRecordFiles(registry, kind)
    return DirectoryRecordFiles(Path(registry).absolute(), kind, storage or Storage())
