"""The identity of a base: its fingerprint, tensor shapes and the configuration that a delta cannot change.

Reads headers and `config.json`. Must not depend on how deltas are coded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltastore.format.header import MAX_NAME_CHARS

if TYPE_CHECKING:
    from deltastore.checkpoint import Checkpoint
    from deltastore.fingerprint import Fingerprints

# The end of a directory in huggingface_hub's cache.
SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Base:
    """A base's identity and tensor shapes. Only fingerprints identify it; `id` is a label for messages."""

    id: str
    fingerprint: str  # 64 hex digits
    shapes: Mapping[str, tuple[int, ...]]
    config: Mapping[str, Any]  # as `deltastore.architecture.architecture` returns it
    embedding: str | None  # name of the input embedding
    head: str | None  # name of the output head; None if it is tied to the embedding
    former: tuple[str, ...] = ()  # fingerprints with computed tables, as artifacts had at first

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        cache: Path | None = None,
        *,
        fingerprints: Fingerprints | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Base:
        """Fingerprint a checkpoint and collect its shapes. Hashing takes a second per 1 to 2 GB, the first time only.

        Args:
            checkpoint: The opened base.
            cache: The file of cached fingerprints; see `deltastore.fingerprint.fingerprints`.
            fingerprints: The checkpoint's fingerprints if they are known already; then nothing is hashed.
            progress: Called with the number of bytes hashed since the last call.

        Raises:
            CheckpointError: A shard is missing, or transformers refuses the configuration.
        """
        # Deferred: they import torch, which a process that receives a base's facts does not need.
        from deltastore.architecture import architecture
        from deltastore.fingerprint import fingerprints as fingerprints_of

        known = fingerprints or fingerprints_of(checkpoint, cache, progress)
        shapes = checkpoint.shapes()
        name = str(checkpoint.config.get("_name_or_path") or "")
        if len(name.split("/")) != 2 or name.startswith((".", "~")):
            # Not a hub id but a local path, which may be private.
            name = _name_of(checkpoint.path.resolve())
        return cls(
            id="".join(filter(str.isprintable, name))[:MAX_NAME_CHARS],
            fingerprint=known.own,
            shapes=shapes,
            config=architecture(checkpoint.config),
            embedding=checkpoint.embedding_name,
            head=checkpoint.head_name,
            former=known.former,
        )

    def is_named(self, fingerprint: str) -> bool:
        """True for the base's fingerprint, and for those that older versions gave it, which artifacts may hold."""
        return fingerprint == self.fingerprint or fingerprint in self.former


def _name_of(directory: Path) -> str:
    """Return the name of a directory, or the hub's id of a model in huggingface_hub's cache."""
    cached = SNAPSHOT.fullmatch("/".join(directory.parts[-3:]))
    return directory.name if cached is None else cached[1].replace("--", "/", 1)
