"""Bytes of an artifact by tensor and by kind of part. Reads headers alone."""

from __future__ import annotations

from collections.abc import Iterable

from deltastore.format.artifact import Artifact
from deltastore.format.header import TensorEntry
from deltastore.format.manifest import file_tensor

KINDS = ("signs", "scales", "low_rank", "added", "whole", "files")


def tensor_bytes(artifact: Artifact, name: str) -> dict[str, int]:
    """Return the bytes of one of the manifest's tensors by kind, without `files`. Gains count as scales."""
    sizes = dict.fromkeys(KINDS[:-1], 0)
    if artifact.manifest.tensors[name].codec == "whole":
        sizes["whole"] = artifact.header.tensors[name].num_bytes
        return sizes
    parts = artifact.parts(name)
    sizes["signs"] = _num_bytes(plane.signs for plane in parts.planes)
    sizes["scales"] = sum(_num_bytes(plane.all()) for plane in parts.planes) - sizes["signs"]
    sizes["low_rank"] = _num_bytes(parts.residual())
    sizes["added"] = _num_bytes(parts.added_rows())
    return sizes


def extra_bytes(artifact: Artifact, name: str) -> int:
    """Return the bytes of a tensor's further sign planes and its low-rank residual."""
    if artifact.manifest.tensors[name].codec == "whole":
        return 0
    parts = artifact.parts(name)
    return sum(_num_bytes(plane.all()) for plane in parts.planes[1:]) + _num_bytes(parts.residual())


def files_bytes(artifact: Artifact) -> int:
    """Return the bytes of the variant's files."""
    return _num_bytes(artifact.header.tensors[file_tensor(name)] for name in artifact.manifest.files)


def _num_bytes(entries: Iterable[TensorEntry]) -> int:
    return sum(entry.num_bytes for entry in entries)
