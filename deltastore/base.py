"""The identity of a base: its fingerprint, tensor shapes and the configuration that a delta cannot change.

Reads headers and `config.json`. Must not depend on how deltas are coded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltastore.format.header import MAX_NAME_CHARS

if TYPE_CHECKING:
    from deltastore.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Base:
    """A base's identity and tensor shapes. Only `fingerprint` identifies it; `id` is a label for messages."""

    id: str
    fingerprint: str  # 64 hex digits
    shapes: Mapping[str, tuple[int, ...]]
    config: Mapping[str, Any]  # as `deltastore.architecture.architecture` returns it
    embedding: str | None  # name of the input embedding
    head: str | None  # name of the output head; None if it is tied to the embedding

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        cache: Path | None = None,
        *,
        fingerprint: str | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Base:
        """Fingerprint a checkpoint and collect its shapes. Hashing takes a second per 1 to 2 GB, the first time only.

        Args:
            checkpoint: The opened base.
            cache: The file of cached fingerprints; see `deltastore.fingerprint.fingerprint`.
            fingerprint: The checkpoint's fingerprint if it is known already; then nothing is hashed.
            progress: Called with the number of bytes hashed since the last call.

        Raises:
            CheckpointError: A shard is missing, or transformers refuses the configuration.
        """
        # Deferred: they import torch, which a process that receives a base's facts does not need.
        from deltastore.architecture import architecture
        from deltastore.fingerprint import fingerprint as fingerprint_of

        shapes = checkpoint.shapes()
        name = str(checkpoint.config.get("_name_or_path") or checkpoint.path.resolve().name)
        if len(name.split("/")) != 2 or name.startswith((".", "~")):
            # Not a hub id but a local path, which may be private.
            name = checkpoint.path.resolve().name
        return cls(
            id="".join(filter(str.isprintable, name))[:MAX_NAME_CHARS],
            fingerprint=fingerprint or fingerprint_of(checkpoint, cache, progress),
            shapes=shapes,
            config=architecture(checkpoint.config),
            embedding=checkpoint.embedding_name,
            head=checkpoint.head_name,
        )
