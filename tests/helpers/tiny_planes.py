"""One artifact of fixed numbers whose matrices have several planes and low-rank residuals, of every axis."""

from __future__ import annotations

from pathlib import Path

from deltastore.format.artifact import ArtifactWriter
from deltastore.format.manifest import TensorSpec
from deltastore.format.matrix import MatrixDelta
from tests.helpers.tiny_artifact import (
    BOTH,
    EMBEDDING,
    IN,
    NORM,
    SCALAR,
    added_rows,
    norm,
    ramp,
    tiny_manifest,
    tiny_plane,
)

SPECS = {
    EMBEDDING: TensorSpec(codec="onebit", shape=[8, 10], axis="out", planes=2, rank=1, added_rows=2),
    BOTH: TensorSpec(codec="onebit", shape=[5, 13], axis="both", planes=2, rank=3),
    SCALAR: TensorSpec(codec="onebit", shape=[3, 8], axis="scalar", rank=3),
    IN: TensorSpec(codec="onebit", shape=[3, 16], axis="in", planes=4),
    NORM: TensorSpec(codec="whole", shape=[10]),
}


def tiny_matrix(name: str) -> MatrixDelta:
    """The coded matrix of a name, of numbers that FP16 holds exactly."""
    spec = SPECS[name]
    planes = tuple(tiny_plane(spec, number) for number in range(spec.planes))
    if not spec.rank:
        return MatrixDelta(planes)
    left = ramp(spec.base_rows * spec.rank).view(spec.base_rows, spec.rank) / 256
    return MatrixDelta(planes, left, ramp(spec.rank * spec.shape[1]).view(spec.rank, spec.shape[1]) / 512)


def write_planes(path: Path) -> str:
    """Write the artifact and return its digest."""
    with ArtifactWriter(path) as writer:
        for name, spec in SPECS.items():
            if spec.codec == "onebit":
                writer.add_onebit(name, tiny_matrix(name), added_rows() if spec.added_rows else None)
            else:
                writer.add_whole(name, norm())
        changed = {"tensors": SPECS, "files": []}
        return writer.finish(tiny_manifest(writer.device_bytes).model_copy(update=changed))
