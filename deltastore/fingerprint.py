"""The base fingerprint: one digest of a checkpoint's tensors, the same for every copy and sharding of it.

SHA-256 over one line per tensor, in the order of their names: ``["name", "dtype", [shape], "sha256"]``, where the last
is of the stored bytes, before any cast. An output head that repeats the input embedding byte for byte is left out,
because some tools store tied weights twice and others once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deltastore.checkpoint import BLOCK_BYTES, EMBEDDING_SUFFIXES, HEAD_SUFFIXES, Checkpoint, StoredTensor
from deltastore.errors import ArtifactError, CheckpointError, shown
from deltastore.header import open_file, read_exactly

MAX_THREADS = 8  # each holds a block


def fingerprint(checkpoint: Checkpoint, cache: Path | None = None) -> str:
    """The fingerprint as 64 hex digits; remembered by the path, size and time of every shard.

    Args:
        checkpoint: the opened base.
        cache: the file of remembered fingerprints; by default ``peraxis/fingerprints.json`` in the user's cache.

    Raises:
        CheckpointError: a shard has gone or has become shorter.
    """
    cache = cache or default_cache()
    try:
        key = _cache_key(checkpoint)
        known = _read_cache(cache)
        if key in known:
            return known[key]
        value = _compute(checkpoint)
    except (ArtifactError, OSError) as error:
        raise CheckpointError(f"{error}: fetch the shard again") from error
    _write_cache(cache, {**_read_cache(cache), key: value})
    return value


def default_cache() -> Path:
    """In the user's cache directory; a user without a home has none, and then nothing is remembered."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        folder = Path(os.devnull)
    return folder / "peraxis" / "fingerprints.json"


def _compute(checkpoint: Checkpoint) -> str:
    tensors = sorted(checkpoint.tensors.values(), key=lambda stored: stored.name)
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        digests = list(pool.map(_tensor_digest, tensors))
    facts = [(t.dtype, list(t.shape), digest) for t, digest in zip(tensors, digests, strict=True)]
    embeddings = [fact for t, fact in zip(tensors, facts, strict=True) if t.name.endswith(EMBEDDING_SUFFIXES)]
    total = hashlib.sha256()
    for stored, fact in zip(tensors, facts, strict=True):
        if stored.name.endswith(HEAD_SUFFIXES) and fact in embeddings:
            continue
        total.update(json.dumps([stored.name, *fact]).encode() + b"\n")
    return total.hexdigest()


def _tensor_digest(stored: StoredTensor) -> str:
    digest = hashlib.sha256()
    where = f"{stored.file}: tensor {shown(stored.name)}"
    fd = open_file(stored.file, where)
    try:
        for start in range(0, stored.num_bytes, BLOCK_BYTES):
            num_bytes = min(BLOCK_BYTES, stored.num_bytes - start)
            digest.update(read_exactly(fd, num_bytes, stored.offset + start, where))
    finally:
        os.close(fd)
    return digest.hexdigest()


def _cache_key(checkpoint: Checkpoint) -> str:
    files = sorted({stored.file.resolve() for stored in checkpoint.tensors.values()})
    facts = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _read_cache(cache: Path) -> dict[str, str]:
    try:
        known = json.loads(cache.read_text())
    except (OSError, ValueError):
        return {}  # a lost cache costs one more hashing, nothing else
    if not isinstance(known, dict):
        return {}
    return {
        key: value
        for key, value in known.items()
        if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value)
    }


def _write_cache(cache: Path, known: dict[str, str]) -> None:
    with contextlib.suppress(OSError):  # a read-only home must not stop a server
        cache.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(dir=cache.parent)
        try:
            with os.fdopen(descriptor, "w") as out:
                json.dump(known, out)
            os.replace(partial, cache)
        finally:
            Path(partial).unlink(missing_ok=True)
