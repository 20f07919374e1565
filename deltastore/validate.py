"""Whether an opened artifact may be trusted: its layout, its numbers, its fit to a base. Changes nothing.

Every check runs before an artifact is published, because what a slot holds is read by kernels that check nothing.
"""

from __future__ import annotations

import math

import torch

from deltastore.artifact import TENSOR_ALIGNMENT, Artifact, file_tensor, part_names
from deltastore.base import Base
from deltastore.errors import ArtifactError, ArtifactTooLarge, BaseMismatch
from deltastore.header import ALIGNMENT, TensorEntry
from deltastore.manifest import TensorSpec
from deltastore.signs import num_stray_bits, packed_width

LARGEST_SCALE = 65504.0  # a delta beyond FP16's range is no fine-tune, and overflows activations
FLOATS = ("F16", "BF16", "F32")


def check_artifact(artifact: Artifact, where: str | None = None) -> None:
    """Check layout and numbers, without a base.

    Raises:
        ArtifactError: the first defect, by tensor name.
    """
    where = where or str(artifact.path)
    _check_layout(artifact, where)
    for name, spec in artifact.manifest.tensors.items():
        if spec.codec == "onebit":
            _check_onebit(artifact, name, spec, where)
        elif not torch.isfinite(artifact.whole(name)).all():
            raise ArtifactError(f"{where}: tensor {name!r} holds NaN or infinity")


def check_base(artifact: Artifact, base: Base, where: str | None = None) -> None:
    """Check that the artifact was made from this base and that its shapes are the base's.

    Raises:
        BaseMismatch: made from another base, or for another architecture.
        ArtifactError: from this base by its fingerprint, but with shapes that are not the base's.
    """
    where, manifest = where or str(artifact.path), artifact.manifest
    if manifest.base_fingerprint != base.fingerprint:
        raise BaseMismatch(
            f"{where}: made from base {manifest.base_id!r} ({manifest.base_fingerprint[:12]}), and this base is "
            f"{base.id!r} ({base.fingerprint[:12]}): compress the fine-tune against this base again"
        )
    different = sorted(
        key for key in {*manifest.config, *base.config} if manifest.config.get(key) != base.config.get(key)
    )
    if different:
        raise BaseMismatch(
            f"{where}: its configuration differs from the base's in {', '.join(different)}, which a delta cannot carry"
        )
    for name, spec in manifest.tensors.items():
        source = spec.against or name
        expected = base.shapes.get(source)
        if expected is None:
            raise ArtifactError(f"{where}: tensor {name!r} changes {source!r}, which the base does not have")
        actual = (spec.base_rows, *spec.shape[1:]) if spec.codec == "onebit" else tuple(spec.shape)
        if actual != expected or (spec.added_rows and source not in (base.embedding, base.head)):
            raise ArtifactError(
                f"{where}: tensor {name!r} is for shape {actual} and the base's is {expected}"
            )


def check_size(artifact: Artifact, slot_bytes: int, where: str | None = None) -> None:
    """Refuse what no slot can hold: ArtifactTooLarge."""
    if artifact.manifest.device_bytes > slot_bytes:
        raise ArtifactTooLarge(
            f"{where or artifact.path}: it needs {artifact.manifest.device_bytes} bytes on the device and a slot has "
            f"{slot_bytes}: compress with a smaller --budget, or raise the server's --slot-headroom"
        )


def _check_layout(artifact: Artifact, where: str) -> None:
    header, manifest = artifact.header, artifact.manifest
    if header.data_start % ALIGNMENT:
        raise ArtifactError(
            f"{where}: its data begins at {header.data_start}, which is no multiple of {ALIGNMENT}"
        )
    expected = {part for name, spec in manifest.tensors.items() for part in _tensors_of(name, spec)}
    files = {file_tensor(name) for name in manifest.files}
    if len(files) != len(manifest.files):
        raise ArtifactError(f"{where}: its manifest names a file twice")
    device_bytes = header.data_bytes
    for entry in header.tensors.values():
        if _is_padding(entry):
            continue
        if entry.name not in expected and entry.name not in files:
            raise ArtifactError(f"{where}: tensor {entry.name!r} is not in its manifest")
        if entry.start % TENSOR_ALIGNMENT:
            raise ArtifactError(f"{where}: tensor {entry.name!r} is not aligned to {TENSOR_ALIGNMENT} bytes")
        if entry.name in files:
            device_bytes = min(device_bytes, entry.start)
        elif entry.start >= device_bytes:
            raise ArtifactError(f"{where}: tensor {entry.name!r} lies behind the variant's files")
    if missing := (expected | files) - header.tensors.keys():
        raise ArtifactError(f"{where}: tensor {min(missing)!r} is in its manifest and not in the file")
    if manifest.device_bytes != device_bytes:
        raise ArtifactError(
            f"{where}: device_bytes is {manifest.device_bytes} and its layout gives {device_bytes}"
        )
    for name, spec in manifest.tensors.items():
        _check_entries(artifact, name, spec, where)


def _tensors_of(name: str, spec: TensorSpec) -> list[str]:
    if spec.axis is None:
        return [name]
    return list(part_names(name, spec.axis, spec.added_rows).values())


def _is_padding(entry: TensorEntry) -> bool:
    return entry.name.startswith("padding.") and entry.dtype == "U8" and entry.num_bytes < TENSOR_ALIGNMENT


def _check_entries(artifact: Artifact, name: str, spec: TensorSpec, where: str) -> None:
    """Every part has the dtype and shape that its spec implies."""
    if spec.codec == "whole":
        entry = artifact.header.tensors[name]
        if entry.dtype not in FLOATS or entry.shape != tuple(spec.shape):
            raise ArtifactError(
                f"{where}: tensor {name!r} must be a float tensor of shape {tuple(spec.shape)}"
            )
        return
    out_features, in_features = spec.base_rows, spec.shape[1]
    if not out_features or not in_features:
        raise ArtifactError(f"{where}: tensor {name!r} has the empty shape {tuple(spec.shape)}")
    wanted = {
        "signs": (("U8",), (out_features, packed_width(in_features))),
        "scale_out": (("F16",), (1,) if spec.axis == "scalar" else (out_features,)),
        "scale_in": (("F16",), (in_features,)),
        "gain": (("F32",), (1,)),
        "added": (FLOATS, (spec.added_rows, in_features)),
    }
    for part, entry in artifact.parts(name).items():
        dtypes, shape = wanted[part]
        if entry.dtype not in dtypes or entry.shape != shape:
            raise ArtifactError(
                f"{where}: tensor {entry.name!r} is {entry.dtype} {entry.shape} and must be {'/'.join(dtypes)} {shape}"
            )


def _check_onebit(artifact: Artifact, name: str, spec: TensorSpec, where: str) -> None:
    parts = artifact.parts(name)
    gain = float(artifact.read(parts["gain"]))
    if not math.isfinite(gain) or gain <= 0 or math.frexp(gain)[0] != 0.5 or gain < 2.0**-126:
        raise ArtifactError(f"{where}: gain {gain} of tensor {name!r} is no power of two")
    largest = gain
    for part in ("scale_out", "scale_in", "added"):
        if part not in parts:
            continue
        values = artifact.read(parts[part])
        if not torch.isfinite(values).all():
            raise ArtifactError(f"{where}: {part} of tensor {name!r} holds NaN or infinity")
        if part != "added":
            largest *= float(values.float().abs().max())
    if largest > LARGEST_SCALE:
        raise ArtifactError(
            f"{where}: the scales of tensor {name!r} reach {largest:.3g}, beyond {LARGEST_SCALE}"
        )
    if rows := num_stray_bits(artifact.read(parts["signs"]), spec.shape[1]):
        raise ArtifactError(f"{where}: {rows} rows of the signs of tensor {name!r} have pad bits set")
