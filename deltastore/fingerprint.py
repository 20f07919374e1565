"""The base fingerprint: one digest of a checkpoint's tensors, equal for every copy and sharding of it.

The fingerprint is the SHA-256 of one line per tensor, sorted by name: ``["name", "dtype", [shape], "sha256"]``. The
tensor's digest is that of its stored bytes, before any cast. An output head that repeats the input embedding byte for
byte is left out, because some tools store tied weights twice and others once. So are tables that transformers computes:
old checkpoints hold them, and transformers saves the same model without them.

At first the tables counted. A former fingerprint is what a checkpoint of the same weights had then: with the tables
that are stored, and with those that the configuration describes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltastore.checkpoint import (
    BLOCK_BYTES,
    DTYPE_NAME,
    EMBEDDING_SUFFIXES,
    HEAD_SUFFIXES,
    Checkpoint,
    StoredTensor,
    is_computed,
)
from deltastore.errors import ArtifactError, CheckpointError, shown
from deltastore.format.header import open_file, read_into
from deltastore.registry.storage import flock
from deltastore.user_cache import user_cache_dir

# More than there are cores, so that some threads hash while others wait for the disk. Each holds one block.
MAX_THREADS = 8
MAX_CACHED_FINGERPRINTS = 256
# Keys of a configuration that computed tables depend on.
TABLE_KEYS = (
    "model_type", "hidden_size", "n_embd", "num_attention_heads", "n_head", "head_dim", "rope_theta", "rotary_emb_base",
    "rope_parameters", "rotary_pct", "partial_rotary_factor", "max_position_embeddings", "n_positions",
)  # fmt: skip
# By model type, the causal mask and the number in place of masked scores that old checkpoints hold, by their names in a
# layer's attention.
MASKED = {"gpt_neox": -1e9, "gpt2": -1e4}
MAX_MASK_POSITIONS = 8192  # a longer mask was never stored

Fact = tuple[str, str, list[int], str]  # a tensor's name, dtype, shape and SHA-256


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """The fingerprint of a base, and those that it had with computed tables, 64 hex digits each."""

    own: str
    former: tuple[str, ...] = ()


def shard_state(checkpoint: Checkpoint) -> str:
    """Return a digest of path, inode, size and times of every shard; it changes when a shard changes.

    Raises:
        CheckpointError: A shard is missing.
    """
    try:
        return _cache_key(checkpoint)
    except OSError as error:
        raise CheckpointError(f"{error}: fetch the shard again") from error


def cached_fingerprints(state: str, cache: Path | None = None) -> Fingerprints | None:
    """Return the cached fingerprints of shards in this state; None if there are none."""
    return _read_cache(cache or default_cache()).get(state)


def fingerprints(
    checkpoint: Checkpoint,
    cache: Path | None = None,
    progress: Callable[[int], object] | None = None,
    digests: Mapping[str, str] | None = None,
) -> Fingerprints:
    """Compute the fingerprints, or take them from the cache by `shard_state`.

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


def _compute(
    checkpoint: Checkpoint, progress: Callable[[int], object], known: Mapping[str, str]
) -> Fingerprints:
    lock = threading.Lock()

    def hashed(num_bytes: int) -> None:
        with lock:
            progress(num_bytes)

    with ThreadPoolExecutor(MAX_THREADS) as pool:
        # Largest first: a large tensor that began last would keep one core busy after all others have ended.
        unread = [stored for stored in checkpoint.tensors.values() if stored.name not in known]
        largest_first = sorted(unread, key=lambda stored: -stored.num_bytes)
        running = {stored.name: pool.submit(_tensor_digest, stored, hashed) for stored in largest_first}
        try:
            computed = {name: digest.result() for name, digest in running.items()}
        finally:
            pool.shutdown(cancel_futures=True)
    return of_digests(checkpoint, {**known, **computed})


def of_digests(checkpoint: Checkpoint, digests: Mapping[str, str]) -> Fingerprints:
    """Return the fingerprints of a checkpoint, of which nothing is read.

    Args:
        checkpoint: The base; its tensors need no files.
        digests: SHA-256 of the bytes of each tensor, as hex by name.
    """
    tensors = sorted(checkpoint.tensors.values(), key=lambda stored: stored.name)
    facts = [(t.name, t.dtype, list(t.shape), digests[t.name]) for t in tensors]
    weights = [fact for fact in facts if not is_computed(fact[0])]
    own = _total(weights)
    former = [_total(facts), *(_total([*weights, *tables]) for tables in _made_tables(checkpoint))]
    return Fingerprints(own, tuple(value for value in dict.fromkeys(former) if value != own))


def _total(facts: Iterable[Fact]) -> str:
    in_order = sorted(facts)
    embeddings = [fact[1:] for fact in in_order if fact[0].endswith(EMBEDDING_SUFFIXES)]
    total = hashlib.sha256()
    for fact in in_order:
        if not (fact[0].endswith(HEAD_SUFFIXES) and fact[1:] in embeddings):
            total.update(json.dumps(fact).encode() + b"\n")
    return total.hexdigest()


def _made_tables(checkpoint: Checkpoint) -> Iterator[list[Fact]]:
    """Yield the facts of the tables that an old checkpoint of this configuration held, in each dtype that was used."""
    owners = sorted(
        {
            found[1]
            for name in checkpoint.tensors
            if (found := re.match(r"((?:.*\.)?(?:layers|h)\.\d+\.(?:self_attn|attention|attn))\.", name))
        }
    )
    try:
        frequencies, masks = _frequencies(checkpoint.config), _masks(checkpoint.config)
    except (TypeError, ValueError, ZeroDivisionError, RuntimeError, AttributeError, LookupError):
        # The configuration lies, which its readers report, or names its sizes otherwise.
        return
    for dtype, mask_dtype in product(
        (torch.float32, torch.float16, torch.bfloat16), (torch.bool, torch.uint8)
    ):
        rotary, masked = {}, {}
        if frequencies is not None:
            rotary = {"rotary_emb.inv_freq": _fact(frequencies.to(dtype))}
        if masks is not None:
            masked = {"bias": _fact(masks[0].to(mask_dtype)), "masked_bias": _fact(masks[1].to(dtype))}
        # Without masks, their dtype says nothing.
        if masked or mask_dtype == torch.bool:
            for tables in filter(None, (rotary, masked, {**rotary, **masked} if rotary and masked else {})):
                yield [(f"{owner}.{name}", *fact) for owner in owners for name, fact in tables.items()]


def _fact(table: Tensor) -> tuple[str, list[int], str]:
    stored = table.contiguous().view(-1).view(torch.uint8).numpy()
    return DTYPE_NAME[table.dtype], list(table.shape), hashlib.sha256(stored.data).hexdigest()


def _frequencies(config: Mapping[str, Any]) -> Tensor | None:  # [rotary features / 2] float32
    """Return the inverse frequencies of rotary embeddings without scaling; None for a model without them."""
    rope = config.get("rope_parameters") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base")
    if theta is None and config.get("model_type") in ("llama", "gpt_neox"):
        theta = 10000
    if theta is None:
        return None
    part = (
        rope.get("partial_rotary_factor")
        or config.get("rotary_pct")
        or config.get("partial_rotary_factor")
        or 1
    )
    size = int((config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]) * part)
    if not 0 < size <= MAX_MASK_POSITIONS:
        return None
    steps = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    return torch.reciprocal(float(theta) ** steps)


def _masks(
    config: Mapping[str, Any],
) -> tuple[Tensor, Tensor] | None:  # [1, 1, positions, positions] bool, []
    value = MASKED.get(str(config.get("model_type")))
    positions = config.get("max_position_embeddings") or config.get("n_positions")
    if value is None or not isinstance(positions, int) or not 0 < positions <= MAX_MASK_POSITIONS:
        return None
    return torch.ones(positions, positions, dtype=torch.bool).tril()[None, None], torch.tensor(value)


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
    """Digest the shards' file status, the names of tensors, and what computed tables depend on.

    Inode and ctime reveal a copy, and a file whose mtime was set back.
    """
    files = sorted({stored.file.resolve() for stored in checkpoint.tensors.values()})
    facts: list[Any] = [
        [str(file), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        for file, status in ((file, file.stat()) for file in files)
    ]
    tables = {key: checkpoint.config[key] for key in TABLE_KEYS if key in checkpoint.config}
    facts.append([sorted(checkpoint.tensors), tables])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _read_cache(cache: Path) -> dict[str, Fingerprints]:
    try:
        known = json.loads(cache.read_text())
    except (OSError, ValueError):
        # A lost cache costs hashing once more.
        return {}
    if not isinstance(known, dict):
        return {}
    return {
        key: Fingerprints(values[0], tuple(values[1:]))
        for key, values in known.items()
        if isinstance(values, list) and values and all(map(_is_digest, values))
    }


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _remember(cache: Path, key: str, value: Fingerprints) -> None:
    """Add an entry as the newest and drop the oldest beyond `MAX_CACHED_FINGERPRINTS`."""
    # A read-only home must not stop a server.
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        directory = os.open(cache.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Without the lock, two processes that end at the same time would each drop the other's entry.
            flock(directory, exclusive=True, wait=True)
            known = {**_read_cache(cache), key: value}
            newest = list(known.items())[-MAX_CACHED_FINGERPRINTS:]
            _replace(cache, json.dumps({key: [found.own, *found.former] for key, found in newest}))
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
