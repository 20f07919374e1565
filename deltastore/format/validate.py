"""Checks of an opened artifact: its numbers, and its fit to a base and to a slot. Changes nothing.

All of them run before an artifact is published, because kernels read a slot's bytes unchecked. `Artifact.open` has run
the check of `layout.py` before.
"""

from __future__ import annotations

import math

from deltastore.architecture import POSITIONS, different_facts
from deltastore.base import Base
from deltastore.checkpoint import HEAD_SUFFIXES
from deltastore.errors import ArtifactError, ArtifactTooLarge, BaseMismatch, shown
from deltastore.format.artifact import Artifact
from deltastore.format.header import TensorEntry
from deltastore.format.manifest import Manifest, TensorSpec
from deltastore.format.matrix import largest_of_plane, largest_of_residual, num_stray_bits, packed_width

# A delta or a whole tensor beyond FP16's range overflows activations.
LARGEST_SCALE = 65504.0
LARGEST_CONTEXT = 1 << 31


def check_artifact(artifact: Artifact, where: str | None = None) -> None:
    """Check every number that a kernel will read; needs no base.

    Raises:
        ArtifactError: The first defect, with the tensor's name.
    """
    where = where or artifact.where
    for name, spec in artifact.manifest.tensors.items():
        if spec.codec == "onebit":
            _check_range(artifact, name, where)
            _check_signs(artifact, name, spec, where)
        elif spec.codec == "stack":
            _check_stack_range(artifact, name, spec, where)
            _check_signs(artifact, name, spec, where)
        else:
            _check_values(artifact, name, where)


def check_base(artifact: Artifact, base: Base, where: str | None = None) -> None:
    """Check that the artifact was made from this base and that its shapes fit the base's.

    Raises:
        BaseMismatch: It was made from another base, or for another architecture.
        ArtifactError: The fingerprint is this base's, but a tensor does not fit it.
    """
    where, manifest = where or artifact.where, artifact.manifest
    if not base.is_named(manifest.base_fingerprint):
        raise BaseMismatch(
            f"{where}: made from base {shown(manifest.base_id)} ({manifest.base_fingerprint[:12]}), and this base is "
            f"{shown(base.id)} ({base.fingerprint[:12]}): compress the fine-tune against this base "
            "again, or, if the base was saved again since, serve the files that the delta was made from"
        )
    if different := different_facts(manifest.config, base.config):
        raise BaseMismatch(
            f"{where}: its configuration differs from the base's in {', '.join(map(shown, different[:3]))}"
            f"{' and more' if len(different) > 3 else ''}, which a delta cannot change: compress a fine-tune "
            "with the base's configuration"
        )
    for name, spec in manifest.tensors.items():
        _check_against(name, spec, base, where)
    _check_head(manifest, base, where)


def check_no_stacks(manifest: Manifest, where: str) -> None:
    """Refuse stacks of experts, which no layer of a server applies.

    Raises:
        ArtifactError: The artifact has some.
    """
    if stacks := manifest.stacks:
        raise ArtifactError(
            f"{where}: artifact format {manifest.format}, with {len(stacks)} stacks of experts ({shown(stacks[0])}), "
            "which can be merged and not served: run `peraxis merge`, and serve the checkpoint elsewhere"
        )


def max_positions(manifest: Manifest, base: Base, where: str) -> int | None:
    """Return the tokens of the variant's longest context; None where it is the base's.

    Raises:
        ArtifactError: It is no number of tokens.
    """
    own = manifest.config.get(POSITIONS)
    if own is None or own == base.config.get(POSITIONS):
        return None
    if isinstance(own, bool) or not isinstance(own, int) or not 0 < own < LARGEST_CONTEXT:
        raise ArtifactError(f"{where}: its {POSITIONS} {shown(str(own))} is no number of tokens")
    return own


def check_size(artifact: Artifact, slot_bytes: int, where: str | None = None) -> None:
    """Check that a slot can hold the artifact.

    Raises:
        ArtifactTooLarge: It needs more than `slot_bytes` on the device.
    """
    if artifact.manifest.device_bytes > slot_bytes:
        raise ArtifactTooLarge(
            f"{where or artifact.where}: it needs {artifact.manifest.device_bytes} bytes on the device and a slot has "
            f"{slot_bytes}: compress with a smaller --budget, or raise the server's --slot-headroom"
        )


def _check_range(artifact: Artifact, name: str, where: str) -> None:
    """Check that every number is finite and that the planes and the residual sum to at most FP16's range.

    The factor of a plane's rows is bounded by itself, too: it would overflow float32 before `scale_in` makes it small.
    """
    parts, largest = artifact.parts(name), 0.0
    scales = [scale for plane in parts.planes for scale in plane.scales()]
    for entry in (*scales, *parts.residual(), *parts.added_rows()):
        _check_values(artifact, entry.name, where)
    for plane in parts.planes:
        gain, (first, *rest) = artifact.gain(plane.gain), map(artifact.read, plane.scales())
        factor = largest_of_plane(gain, [first])
        largest += max(factor, largest_of_plane(factor, rest))
    if factors := [artifact.read(entry) for entry in parts.residual()]:
        largest += largest_of_residual(*factors)
    _check_largest(largest, name, where)


def _check_stack_range(artifact: Artifact, name: str, spec: TensorSpec, where: str) -> None:
    """Check a stack as `_check_range` does a matrix, all experts at once."""
    (plane,) = artifact.parts(name).planes
    for entry in plane.scales():
        _check_values(artifact, entry.name, where)
    scales = [artifact.read(entry).float().abs().amax(1) for entry in plane.scales()]
    if spec.transposed:
        # Of the rows as they are stored.
        scales.reverse()
    first, *rest = scales
    factor = artifact.gains(plane.gain).double() * first
    largest = factor.maximum(factor * rest[0]) if rest else factor
    _check_largest(float(largest.max()), name, where)


def _check_signs(artifact: Artifact, name: str, spec: TensorSpec, where: str) -> None:
    in_features = spec.shape[-1]
    if in_features % 8 == 0:
        # There are no pad bits, and any other bit is a valid sign.
        return
    for plane in artifact.parts(name).planes:
        if rows := _num_stray_rows(artifact, plane.signs, in_features):
            raise ArtifactError(f"{where}: {rows} rows of tensor {shown(plane.signs.name)} have pad bits set")


def _num_stray_rows(artifact: Artifact, signs: TensorEntry, in_features: int) -> int:
    """Count the rows with a pad bit set, reading 4 MiB of rows at a time and looking at each row's last byte."""
    width, start, rows = packed_width(in_features), 0, 0
    for block in artifact.blocks(signs):
        last = block[(width - 1 - start) % width :: width]
        rows += num_stray_bits(last[:, None], in_features)
        start += len(block)
    return rows


def _check_values(artifact: Artifact, tensor_name: str, where: str) -> None:
    """Check that every number of a stored tensor is finite and within FP16's range."""
    for block in artifact.blocks(artifact.header.tensors[tensor_name]):
        # NaN is the smallest and the largest number of a block that holds it.
        lowest, highest = block.aminmax()
        largest = max(-float(lowest), float(highest))
        if not math.isfinite(largest):
            raise ArtifactError(f"{where}: tensor {shown(tensor_name)} holds NaN or infinity")
        _check_largest(largest, tensor_name, where)


def _check_largest(largest: float, name: str, where: str) -> None:
    if largest > LARGEST_SCALE:
        raise ArtifactError(
            f"{where}: the numbers of tensor {shown(name)} reach {largest:.3g}, beyond {LARGEST_SCALE}"
        )


def _check_against(name: str, spec: TensorSpec, base: Base, where: str) -> None:
    """Check that the base has the tensor in the same shape; only embedding and head may be longer."""
    source, vocabulary = name, name in (base.embedding, base.head)
    if base.head is None and base.embedding is not None and name.endswith(HEAD_SUFFIXES):
        # The fine-tune has untied its head.
        source, vocabulary = base.embedding, True
    if spec.codec != "whole" and (spec.against or name) != source:
        raise ArtifactError(
            f"{where}: tensor {shown(name)} is against {shown(spec.against or name)} and must be against "
            f"{shown(source)}"
        )
    expected = base.shapes.get(source)
    if expected is None:
        raise ArtifactError(f"{where}: tensor {shown(name)} is not in the base")
    actual = tuple(spec.shape)
    if spec.codec == "onebit":
        actual = (spec.base_rows, *actual[1:])
    elif vocabulary and actual[1:] == expected[1:] and actual > expected:
        actual = expected
    if actual != expected:
        raise ArtifactError(
            f"{where}: tensor {shown(name)} is for the shape {list(actual)} and the base's is {list(expected)}"
        )
    if spec.added_rows and not vocabulary:
        raise ArtifactError(
            f"{where}: tensor {shown(name)} adds rows, which only embedding and output head may"
        )


def _check_head(manifest: Manifest, base: Base, where: str) -> None:
    """Check that a tied head is not stored, and that a separate head adds as many rows as the embedding."""
    head = next((name for name in manifest.tensors if name.endswith(HEAD_SUFFIXES)), base.head)
    if manifest.tied and head is not None:
        raise ArtifactError(
            f"{where}: it ties the output head to the embedding, and {shown(head)} is a head of its own"
        )
    if base.embedding is None or manifest.tied:
        return
    embedding_rows = _num_added(manifest, base.embedding, base.shapes[base.embedding])
    head_rows = _num_added(manifest, head or "", base.shapes[base.head or base.embedding])
    if embedding_rows != head_rows:
        raise ArtifactError(
            f"{where}: its embedding adds {embedding_rows} rows and its output head {head_rows}"
        )


def _num_added(manifest: Manifest, name: str, shape: tuple[int, ...]) -> int:
    spec = manifest.tensors.get(name)
    return 0 if spec is None else spec.shape[0] - shape[0]
