"""Writing a delta: every tensor of a pair into the artifact, coded, whole or not at all, and what is said of it.

Knows pairs and the artifact's writer; nothing of how deltas were fitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from compressor.codec import Coded, Method, code_matrix, measured
from compressor.evaluate.fidelity import rounded
from compressor.io.pairs import Pairs, TensorPair
from compressor.io.row_blocks import Map, row_blocks, workers
from deltastore.errors import CheckpointError
from deltastore.format.artifact import ArtifactWriter
from deltastore.format.manifest import TensorSpec
from deltastore.format.matrix import MatrixDelta, largest_of_plane, largest_of_residual
from deltastore.format.onebit import OneBit
from deltastore.format.validate import LARGEST_SCALE
from deltastore.progress import byte_progress

Zeros = Literal["alternate", "fitted"]  # how differences of exactly zero are coded


@dataclass(slots=True)
class Carried:
    """What has been written so far."""

    specs: dict[str, TensorSpec] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    device_bytes: int = 0
    squared_norm: float = 0.0
    squared_error: float = 0.0

    @property
    def weight_error(self) -> float:
        """Of all coded matrices together: norm of what is lost over norm of the differences."""
        return rounded(math.sqrt(self.squared_error / self.squared_norm)) if self.squared_norm else 0.0

    def add(self, pair: TensorPair, coded: Coded[MatrixDelta], zeros: Zeros) -> None:
        """Say of a coded matrix what the manifest says."""
        self.squared_norm += coded.squared_norm
        self.squared_error += coded.squared_error
        self.specs[pair.name] = TensorSpec(
            codec="onebit",
            shape=list(pair.tensor.shape),
            axis=coded.delta.axis,
            planes=coded.delta.num_planes,
            rank=coded.delta.rank,
            added_rows=pair.added_rows,
            against=pair.against,
            num_zeros=coded.num_zeros,
            zeros=zeros if coded.num_zeros else None,
            error=rounded(coded.error),
        )


@dataclass(frozen=True, slots=True)
class Coding:
    """Which tensors are coded, and as what."""

    names: frozenset[str]
    method: Method  # of those that were not fitted
    fitted: Mapping[str, MatrixDelta]
    what: str  # that progress speaks of; "" for none


def carry(pairs: Pairs, files: Mapping[str, bytes], coding: Coding, writer: ArtifactWriter) -> Carried:
    """Append everything that the fine-tune does not share with its base.

    Raises:
        CheckpointError: NaN or infinity in a tensor, or a difference that no delta can carry.
    """
    carried = Carried()
    total = sum(pair.num_bytes for pair in pairs.tensors)
    with byte_progress(total, coding.what, bool(coding.what)) as bar, workers() as each:
        for pair in pairs.tensors:
            if pair.name not in coding.names:
                _carry_whole(pair, writer, carried)
            elif (own := coding.fitted.get(pair.name)) is not None:
                _carry_coded(pair, measured(pair, own, each), writer, carried, zeros="fitted")
            else:
                found = code_matrix(pair, coding.method, each)
                _carry_coded(pair, _as_matrix(found), writer, carried, zeros="alternate")
            bar.update(pair.num_bytes)
    carried.device_bytes = writer.device_bytes
    for name, content in files.items():
        writer.add_file(name, content)
        carried.files.append(name)
    return carried


def changed(pairs: Pairs) -> frozenset[str]:
    """Names of the tensors that a delta says something of. Reads everything once, so that bad input ends before work.

    Raises:
        CheckpointError: NaN or infinity in a tensor.
    """
    with workers() as each:
        return frozenset(pair.name for pair in pairs.tensors if _is_changed(pair, each))


def _is_changed(pair: TensorPair, each: Map) -> bool:
    differs = list(each(lambda rows: bool(pair.block(rows).any()), row_blocks(pair.shape)))
    return pair.added() is not None or any(differs)


def _as_matrix(coded: Coded[OneBit]) -> Coded[MatrixDelta]:
    delta = MatrixDelta((coded.delta,))
    return Coded(delta, coded.num_zeros, coded.squared_norm, coded.squared_error)


def _carry_whole(pair: TensorPair, writer: ArtifactWriter, carried: Carried) -> None:
    if pair.is_changed():
        writer.add_whole(pair.name, pair.whole())
        carried.specs[pair.name] = TensorSpec(codec="whole", shape=list(pair.tensor.shape))


def _carry_coded(
    pair: TensorPair, coded: Coded[MatrixDelta], writer: ArtifactWriter, carried: Carried, zeros: Zeros
) -> None:
    if coded.is_zero and not pair.added_rows:
        return
    largest = _largest(coded.delta)
    if not largest <= LARGEST_SCALE:
        raise CheckpointError(
            f"{pair.tensor.file}: tensor {pair.tensor.name!r} differs from the base's by {largest:.3g}: "
            "give the base that it was tuned from"
        )
    writer.add_onebit(pair.name, coded.delta, pair.added())
    carried.add(pair, coded, zeros)


def _largest(delta: MatrixDelta) -> float:
    """What no number of a delta exceeds, as an upload's check computes it."""
    planes = (
        largest_of_plane(
            plane.gain, [scale.float() for scale in (plane.scale_out, plane.scale_in) if scale is not None]
        )
        for plane in delta.planes
    )
    residual = 0.0
    if delta.left is not None and delta.right is not None:
        residual = largest_of_residual(delta.left.float(), delta.right.float())
    return sum(planes) + residual
