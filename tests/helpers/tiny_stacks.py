"""An artifact with two stacks of experts of fixed numbers, one of them transposed; and the base that it fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from deltastore.format.artifact import ArtifactWriter
from deltastore.format.manifest import TensorSpec
from deltastore.format.matrix import SignPlane, StackDelta, pack_signs
from tests.helpers.tiny_artifact import BASE, ramp, tiny_manifest

STACK, TURNED = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"
SPECS = {
    STACK: TensorSpec(codec="stack", shape=[3, 5, 13], axis="both", error=0.5),
    TURNED: TensorSpec(codec="stack", shape=[3, 6, 10], axis="out", transposed=True),
}
STACKS_BASE = replace(BASE, shapes={**BASE.shapes, STACK: (3, 5, 13), TURNED: (3, 6, 10)})


def tiny_stack(name: str) -> StackDelta:
    """Three experts of numbers that FP16 holds exactly, each with another gain."""
    spec = SPECS[name]
    _, rows, columns = spec.shape
    planes = []
    for number in range(3):
        order = torch.arange(rows * columns).view(rows, columns)
        signs = pack_signs((order * 7 + number) % 5 < 2)
        of_rows, of_columns = ramp(rows) / (1 + number), ramp(columns)
        planes.append(
            SignPlane(
                signs,
                columns,
                2.0 ** (-3 - number),
                None if spec.transposed else of_rows,
                of_columns,
            )
        )
    return StackDelta(tuple(planes), spec.transposed)


def write_stacks(path: Path) -> None:
    with ArtifactWriter(path) as writer:
        for name in SPECS:
            writer.add_stack(name, tiny_stack(name))
        manifest = tiny_manifest(writer.device_bytes)
        writer.finish(manifest.model_copy(update={"tensors": SPECS, "files": []}))
