"""Deltas in slots, through real artifacts: written to disk, read into a slot, and put into a model's tables."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from deltastore.format.artifact import Artifact, ArtifactWriter
from deltastore.format.header import read_into
from deltastore.format.manifest import TensorSpec
from deltastore.format.matrix import MatrixDelta
from server.deltas.resident import DeltaTables, ResidentDelta, Slot
from tests.helpers.tiny_artifact import tiny_manifest

SLOT_BYTES = 1 << 16


def write(
    path: Path,
    matrices: Mapping[str, MatrixDelta],
    whole: Mapping[str, Tensor] | None = None,
    added: Mapping[str, Tensor] | None = None,
    *,
    tied: bool = False,
) -> None:
    """Write an artifact of some tensors."""
    whole, added, specs = whole or {}, added or {}, {}
    with ArtifactWriter(path) as writer:
        for name, delta in matrices.items():
            own = added.get(name)
            num_added = 0 if own is None else len(own)
            writer.add_onebit(name, delta, own)
            specs[name] = TensorSpec(
                codec="onebit",
                shape=[delta.out_features + num_added, delta.in_features],
                axis=delta.axis,
                planes=delta.num_planes,
                rank=delta.rank,
                added_rows=num_added,
            )
        for name, tensor in whole.items():
            writer.add_whole(name, tensor)
            specs[name] = TensorSpec(codec="whole", shape=list(tensor.shape))
        changes = {"tensors": specs, "files": [], "tied": tied}
        writer.finish(tiny_manifest(writer.device_bytes).model_copy(update=changes))


def new_slot(index: int) -> Slot:
    return Slot(index, torch.full((SLOT_BYTES,), 255, dtype=torch.uint8))


def placed(
    tables: DeltaTables,
    slot: Slot,
    matrices: Mapping[str, MatrixDelta],
    whole: Mapping[str, Tensor] | None = None,
    added: Mapping[str, Tensor] | None = None,
    *,
    tied: bool = False,
) -> ResidentDelta:
    """Put a delta of some tensors into a slot. The tables must have been allocated."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "delta.safetensors"
        write(path, matrices, whole, added, tied=tied)
        with Artifact.open(path) as artifact:
            layout = tables.layout(artifact.header, artifact.manifest, "0" * 64)
            memory = slot.memory[: artifact.manifest.device_bytes]
            read_into(artifact.fd, memory.numpy().data, artifact.header.data_start, str(path))
    return tables.adopt(layout, slot)
