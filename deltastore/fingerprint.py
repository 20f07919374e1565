"""The base fingerprint: one digest of a checkpoint's tensors, equal for every copy and sharding of it.

The fingerprint is the SHA-256 of one line per tensor, sorted by name: ``["name", "dtype", [shape], "sha256"]``. The
tensor's digest is that of its stored bytes, before any cast. An output head that repeats the input embedding byte for
byte is left out, because some tools store tied weights twice and others once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deltastore.checkpoint import BLOCK_BYTES, EMBEDDING_SUFFIXES, HEAD_SUFFIXES, Checkpoint, StoredTensor
from deltastore.errors import ArtifactError, CheckpointError, shown
from deltastore.format.header import open_file, read_into
from deltastore.registry.storage import flock
from deltastore.user_cache import user_cache_dir

# More than there are cores, so that some threads hash while others wait for the disk. Each holds one block.
MAX_THREADS = 8
MAX_CACHED_FINGERPRINTS = 256


def shard_state(checkpoint: Checkpoint) -> str:
    """Return a digest of path, inode, size and times of every shard; it changes when a shard changes.

    Raises:
        CheckpointError: A shard is missing.
    """
    try:
        return _cache_key(checkpoint)
    except OSError as error:
        raise CheckpointError(f"{error}: fetch the shard again") from error


def cached_fingerprint(state: str, cache: Path | None = None) -> str | None:
    """Return the cached fingerprint of shards in this state; None if there is none."""
    return _read_cache(cache or default_cache()).get(state)


def fingerprint(
    checkpoint: Checkpoint,
    cache: Path | None = None,
    progress: Callable[[int], object] | None = None,
    digests: Mapping[str, str] | None = None,
) -> str:
    """Compute the fingerprint, 64 hex digits, or take it from the cache by `shard_state`.

    Args:
        checkpoint: The opened base.
        cache: The file of cached fingerprints; by default ``peraxis/fingerprints.json`` in the user's cache.
        progress: Called with the number of bytes hashed since the last call, by one thread at a time; not called if
            the fingerprint is cached.
        digests: SHA-256 of the stored bytes of tensors that were read already, as hex by name. They are not read
            again.

    Raises:
        CheckpointError: A shard is missing or has become shorter.
    """
    cache = cache or default_cache()
    try:
        key = _cache_key(checkpoint)
        known = _read_cache(cache)
        if key in known:
            return known[key]
        value = _compute(checkpoint, progress or (lambda _: None), digests or {})
        is_unchanged = _cache_key(checkpoint) == key
    except (ArtifactError, OSError) as error:
        raise CheckpointError(f"{error}: fetch the shard again") from error
    if is_unchanged:
        _remember(cache, key, value)
    return value


def default_cache() -> Path:
    """Return the path of the cache in the user's cache directory."""
    return user_cache_dir() / "fingerprints.json"


def _compute(checkpoint: Checkpoint, progress: Callable[[int], object], known: Mapping[str, str]) -> str:
    tensors = sorted(checkpoint.tensors.values(), key=lambda stored: stored.name)
    lock = threading.Lock()

    def hashed(num_bytes: int) -> None:
        with lock:
            progress(num_bytes)

    with ThreadPoolExecutor(MAX_THREADS) as pool:
        # Largest first: a large tensor that began last would keep one core busy after all others have ended.
        unread = [stored for stored in tensors if stored.name not in known]
        largest_first = sorted(unread, key=lambda stored: -stored.num_bytes)
        running = {stored.name: pool.submit(_tensor_digest, stored, hashed) for stored in largest_first}
        try:
            computed = {name: digest.result() for name, digest in running.items()}
        finally:
            pool.shutdown(cancel_futures=True)
    digests = {**known, **computed}
    facts = [(t.dtype, list(t.shape), digests[t.name]) for t in tensors]
    embeddings = [fact for t, fact in zip(tensors, facts, strict=True) if t.name.endswith(EMBEDDING_SUFFIXES)]
    total = hashlib.sha256()
    for stored, fact in zip(tensors, facts, strict=True):
        if stored.name.endswith(HEAD_SUFFIXES) and fact in embeddings:
            continue
        total.update(json.dumps([stored.name, *fact]).encode() + b"\n")
    return total.hexdigest()


def _tensor_digest(stored: StoredTensor, hashed: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    where = f"{stored.file}: tensor {shown(stored.name)}"
    buffer = memoryview(bytearray(min(BLOCK_BYTES, stored.num_bytes)))
    fd = open_file(stored.file, where)
    try:
        for start in range(0, stored.num_bytes, BLOCK_BYTES):
            block = buffer[: stored.num_bytes - start]
            read_into(fd, block, stored.offset + start, where)
            digest.update(block)
            hashed(len(block))
    finally:
        os.close(fd)
    return digest.hexdigest()


def _cache_key(checkpoint: Checkpoint) -> str:
    """Digest the shards' file status. Inode and ctime reveal a copy, and a file whose mtime was set back."""
    files = sorted({stored.file.resolve() for stored in checkpoint.tensors.values()})
    facts = [
        [str(file), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        for file, status in ((file, file.stat()) for file in files)
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _read_cache(cache: Path) -> dict[str, str]:
    try:
        known = json.loads(cache.read_text())
    except (OSError, ValueError):
        # A lost cache costs hashing once more.
        return {}
    if not isinstance(known, dict):
        return {}
    return {
        key: value
        for key, value in known.items()
        if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value)
    }


def _remember(cache: Path, key: str, value: str) -> None:
    """Add an entry as the newest and drop the oldest beyond `MAX_CACHED_FINGERPRINTS`."""
    # A read-only home must not stop a server.
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        directory = os.open(cache.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Without the lock, two processes that end at the same time would each drop the other's entry.
            flock(directory, exclusive=True, wait=True)
            known = {**_read_cache(cache), key: value}
            _replace(cache, json.dumps(dict(list(known.items())[-MAX_CACHED_FINGERPRINTS:])))
        finally:
            os.close(directory)


def _replace(cache: Path, text: str) -> None:
    descriptor, partial = tempfile.mkstemp(dir=cache.parent)
    try:
        with os.fdopen(descriptor, "w") as out:
            out.write(text)
        os.replace(partial, cache)
    finally:
        Path(partial).unlink(missing_ok=True)
