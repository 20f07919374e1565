"""Helpers to compress and check a pair, to compute base plus delta in plain torch, and to rewrite checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compressor.config import CompressConfig
from compressor.pipeline import CompressResult, compress
from deltastore.base import Base
from deltastore.checkpoint import HEAD_SUFFIXES, Checkpoint
from deltastore.format.artifact import Artifact, ArtifactWriter
from deltastore.format.matrix import MatrixDelta, SignPlane, pack_signs
from deltastore.format.validate import check_artifact, check_base
from tests.helpers.tiny_models import TinyModels

SINGLE = "model.safetensors"


def compressed(models: TinyModels, out: Path, **config: Any) -> CompressResult:
    """Compress the first fine-tune, and check the artifact as an upload would be."""
    result = compress(CompressConfig(str(models.base), str(models.finetunes[0]), out, **config))
    with Artifact.open(out) as artifact:
        check_artifact(artifact)
        check_base(artifact, Base.of(Checkpoint.open(models.base)))
        assert artifact.digest() == result.digest
    return result


def carried(models: TinyModels, out: Path) -> dict[str, bytes]:
    """Return the files that the artifact of the first fine-tune carries, by name."""
    files = compressed(models, out).manifest.files
    with Artifact.open(out) as artifact:
        return {name: artifact.file(name) for name in files}


def variant_tensors(base: Path, delta: Path) -> dict[str, Tensor]:
    """Return base plus delta in float32 by tensor name, without a tied head."""
    checkpoint = Checkpoint.open(base)
    tensors = {name: checkpoint.read(name).float() for name in checkpoint.tensors}
    with Artifact.open(delta) as artifact:
        manifest = artifact.manifest
        if not manifest.tied and checkpoint.embedding_name and not checkpoint.head_name:
            tensors["lm_head.weight"] = tensors[checkpoint.embedding_name]
        own = {}
        for name, spec in manifest.tensors.items():
            if spec.codec == "whole":
                own[name] = artifact.whole(name).float()
                continue
            parts = [tensors[spec.against or name] + artifact.onebit(name).dense()]
            added = artifact.added(name)
            own[name] = torch.cat([*parts, *([] if added is None else [added.float()])])
    return {
        name: own.get(name, tensor)
        for name, tensor in tensors.items()
        if not (manifest.tied and name.endswith(HEAD_SUFFIXES))
    }


def enriched(delta: Path, out: Path, forms: Mapping[str, tuple[int, int]]) -> Path:
    """Write an artifact with random further planes and residuals; `forms` gives number of planes and rank by name."""
    generator = torch.Generator().manual_seed(0)
    with Artifact.open(delta) as artifact, ArtifactWriter(out) as writer:
        specs = dict(artifact.manifest.tensors)
        assert forms.keys() <= specs.keys()
        for name, spec in specs.items():
            if spec.codec == "whole":
                writer.add_whole(name, artifact.whole(name))
                continue
            planes, rank = forms.get(name, (1, 0))
            matrix = _enriched(artifact.onebit(name), planes, rank, generator)
            writer.add_onebit(name, matrix, artifact.added(name))
            specs[name] = spec.model_copy(update={"planes": planes, "rank": rank})
        changed = {"tensors": specs, "device_bytes": writer.device_bytes}
        for filename in artifact.manifest.files:
            writer.add_file(filename, artifact.file(filename))
        writer.finish(artifact.manifest.model_copy(update=changed))
    return out


def _enriched(delta: MatrixDelta, num_planes: int, rank: int, generator: torch.Generator) -> MatrixDelta:
    """Each further plane has half the size of the one before; a residual has half the size of the first."""
    planes, size = list(delta.planes), float(delta.dense().std())
    shape = (delta.out_features, delta.in_features)
    for number in range(1, num_planes):
        signs, first = pack_signs(torch.randn(shape, generator=generator)), delta.planes[0]
        planes.append(SignPlane(signs, shape[1], first.gain * 0.5**number, first.scale_out, first.scale_in))
    if not rank:
        return MatrixDelta(tuple(planes))
    left = torch.randn(shape[0], rank, generator=generator) * (size / rank) ** 0.5
    right = torch.randn(rank, shape[1], generator=generator) * (size / rank) ** 0.5
    return MatrixDelta(tuple(planes), left.half(), right.half())


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of an unsharded checkpoint in place."""
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})


def rewrite_config(directory: Path, **values: Any) -> None:
    """Set keys of a checkpoint's config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
