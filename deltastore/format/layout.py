"""Check a file's layout: tensor names, positions, dtypes and shapes against its manifest. Reads no data.

`Artifact.open` runs it, so an opened artifact has every part that its manifest names, in the right dtype and shape.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from deltastore.errors import ArtifactError, shown
from deltastore.format.header import ALIGNMENT, Header, TensorEntry
from deltastore.format.manifest import file_tensor, part_names
from deltastore.format.matrix import packed_width

# Importing the manifest imports pydantic.
if TYPE_CHECKING:
    from deltastore.format.manifest import Manifest, TensorSpec

TENSOR_ALIGNMENT = 16
MAX_FILE_BYTES = 64 << 20
FLOATS = ("F16", "BF16", "F32")


def check_layout(header: Header, manifest: Manifest, where: str) -> None:
    """Check that header and manifest name the same tensors, each aligned and of the right dtype and shape.

    Raises:
        ArtifactError: The first defect, with the tensor's name.
    """
    if header.data_start % ALIGNMENT:
        raise ArtifactError(
            f"{where}: its data begins at {header.data_start}, which is not a multiple of {ALIGNMENT}"
        )
    tensors = _forms(manifest, where)
    files = {file_tensor(name) for name in manifest.files}
    if missing := (tensors.keys() | files) - header.tensors.keys():
        raise ArtifactError(f"{where}: tensor {shown(min(missing))} is in its manifest and not in the file")
    device_bytes = header.data_bytes
    for name, entry in header.tensors.items():
        if name not in tensors and name not in files:
            _check_padding(entry, where)
        elif entry.start % TENSOR_ALIGNMENT:
            raise ArtifactError(
                f"{where}: tensor {shown(entry.name)} is not aligned to {TENSOR_ALIGNMENT} bytes"
            )
        elif name in files:
            _check_file(entry, where)
            device_bytes = min(device_bytes, entry.start)
        elif entry.start >= device_bytes:
            raise ArtifactError(f"{where}: tensor {shown(entry.name)} lies after the variant's files")
    if manifest.device_bytes != device_bytes:
        raise ArtifactError(
            f"{where}: device_bytes is {manifest.device_bytes} and its layout gives {device_bytes}"
        )
    for name, spec in manifest.tensors.items():
        if 0 in spec.shape or (spec.codec == "onebit" and not spec.base_rows):
            raise ArtifactError(
                f"{where}: tensor {shown(name)} has the empty shape {spec.shape} ({spec.added_rows} rows added)"
            )
    for name, (dtypes, shape) in tensors.items():
        entry = header.tensors[name]
        if entry.dtype not in dtypes or entry.shape != shape:
            raise ArtifactError(
                f"{where}: tensor {shown(name)} is {entry.dtype} {list(entry.shape)} "
                f"and must be {' or '.join(dtypes)} {list(shape)}"
            )


PADDING = re.compile(r"padding\.[0-9]+")
Form = tuple[tuple[str, ...], tuple[int, ...]]  # allowed dtypes and shape of a tensor


def _forms(manifest: Manifest, where: str) -> dict[str, Form]:
    """Return the form of every tensor that the manifest's specs ask for.

    Raises:
        ArtifactError: a name is used twice, by a spec or a file.
    """
    taken = Counter(file_tensor(name) for name in manifest.files)
    if twice := [name for name, count in taken.items() if count > 1]:
        raise _asked_twice(twice[0], where)
    # Most of the matrices of a model have a few shapes.
    known: dict[Any, list[tuple[str, Form]]] = {}
    forms: dict[str, Form] = {}
    for name, spec in manifest.tensors.items():
        key = (spec.codec, *spec.shape, spec.axis, spec.planes, spec.rank, spec.added_rows, spec.transposed)
        if (parts := known.get(key)) is None:
            parts = known[key] = list(_parts(spec))
        for suffix, form in parts:
            part = name + suffix
            if part in forms or part in taken:
                raise _asked_twice(part, where)
            forms[part] = form
    return forms


def _asked_twice(name: str, where: str) -> ArtifactError:
    return ArtifactError(f"{where}: its manifest asks for tensor {shown(name)} twice")


def _check_padding(entry: TensorEntry, where: str) -> None:
    if not PADDING.fullmatch(entry.name):
        raise ArtifactError(f"{where}: tensor {shown(entry.name)} is not in its manifest")
    if entry.dtype != "U8" or not 0 < entry.num_bytes < TENSOR_ALIGNMENT:
        raise ArtifactError(
            f"{where}: tensor {shown(entry.name)} is not a padding of 1 to {TENSOR_ALIGNMENT - 1} U8 bytes"
        )


def _check_file(entry: TensorEntry, where: str) -> None:
    if entry.dtype != "U8" or len(entry.shape) != 1:
        raise ArtifactError(f"{where}: tensor {shown(entry.name)} must be a row of U8 bytes")
    if entry.num_bytes > MAX_FILE_BYTES:
        raise ArtifactError(
            f"{where}: tensor {shown(entry.name)} has {entry.num_bytes} bytes, more than the {MAX_FILE_BYTES} allowed"
        )


def _parts(spec: TensorSpec) -> Iterator[tuple[str, Form]]:
    """Yield each tensor that a spec is stored as: the end of its name, after that of the spec, and its form."""
    if spec.axis is None:
        yield "", (FLOATS, tuple(spec.shape))
        return
    for suffix, dtypes, shape in _matrix_parts(spec):
        if suffix is not None:
            yield suffix, (dtypes, shape)


def _matrix_parts(spec: TensorSpec) -> Iterator[tuple[str | None, tuple[str, ...], tuple[int, ...]]]:
    """Yield the parts of a coded matrix or stack; the name of an absent part is None."""
    parts = part_names("", spec)
    if spec.codec == "stack":
        (num_experts, rows, columns), (plane,) = spec.shape, parts.planes
        out_features, in_features = spec.features
        yield plane.signs, ("U8",), (num_experts, rows, packed_width(columns))
        yield plane.scale_out, ("F16",), (num_experts, 1 if spec.axis == "scalar" else out_features)
        yield plane.scale_in, ("F16",), (num_experts, in_features)
        yield plane.gain, ("F32",), (num_experts,)
        return
    rows, in_features = spec.features
    for plane in parts.planes:
        yield plane.signs, ("U8",), (rows, packed_width(in_features))
        yield plane.scale_out, ("F16",), (1,) if spec.axis == "scalar" else (rows,)
        yield plane.scale_in, ("F16",), (in_features,)
        yield plane.gain, ("F32",), (1,)
    yield parts.left, ("F16",), (rows, spec.rank)
    yield parts.right, ("F16",), (spec.rank, in_features)
    yield parts.added, FLOATS, (spec.added_rows, in_features)
