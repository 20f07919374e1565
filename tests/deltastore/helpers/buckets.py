"""Registries in buckets: in obstore's memory, whose conditional puts are atomic, or on an S3 server."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from obstore.store import MemoryStore, S3Store

from deltastore.registry import Registry
from deltastore.registry.bucket.client import Bucket
from deltastore.registry.bucket.store import BucketStore
from deltastore.registry.object_cache import ObjectCache

LOCATION = "s3://models/registry"
CACHE_BYTES = 1 << 26


def registry_in(store: object, directory: Path) -> Registry:
    """Open the registry of a store, with the machine's cache in a directory."""
    s3_store = cast(S3Store, store)
    return Registry(
        BucketStore(Bucket(LOCATION, s3_store, s3_store), ObjectCache(directory / "cache", CACHE_BYTES))
    )


def memory_registry(directory: Path) -> Registry:
    """Make an empty registry in memory."""
    return registry_in(MemoryStore(), directory)
