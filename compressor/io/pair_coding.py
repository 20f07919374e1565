"""From pairs of tensors to the tensors of a delta: coded, whole, or left out where the fine-tune equals its base.

Reads checkpoints in row blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

from compressor.codec import Coded, Method, code_matrix, measured
from compressor.io.delta_writer import CodedMatrix, DeltaTensor
from compressor.io.pairs import Pairs, TensorPair
from compressor.io.row_blocks import Map, row_blocks, workers
from deltastore.errors import CheckpointError
from deltastore.format.manifest import TensorSpec
from deltastore.format.matrix import MatrixDelta, largest_of_plane, largest_of_residual
from deltastore.format.sign_plane import SignPlane
from deltastore.format.validate import LARGEST_SCALE
from deltastore.quantities import rounded

Zeros = Literal["alternate", "fitted"]  # how differences of exactly zero are coded


@dataclass(frozen=True, slots=True)
class PairCoding:
    """The tensors of a pair that are coded at one bit, and the deltas of those that were fitted."""

    names: frozenset[str]
    method: Method  # for the tensors of `names` that were not fitted
    fitted: Mapping[str, MatrixDelta]


def delta_tensors(pairs: Pairs, coding: PairCoding) -> list[DeltaTensor]:
    """Return the tensors of a delta in layer order; nothing is read until their content is asked for.

    Content raises CheckpointError for NaN or infinity, and for a difference that no delta can carry.
    """
    return [DeltaTensor(pair.name, pair.num_bytes, partial(_content, pair, coding)) for pair in pairs.tensors]


def changed_names(pairs: Pairs) -> frozenset[str]:
    """Return the names of the tensors that differ from the base. Reads every byte, so bad input fails before fitting.

    Raises:
        CheckpointError: NaN or infinity in a tensor.
    """
    with workers() as each:
        return frozenset(pair.name for pair in pairs.tensors if _is_changed(pair, each))


def _is_changed(pair: TensorPair, each: Map) -> bool:
    # The list is made whole, because every row block must be checked for NaN.
    differs = list(each(lambda rows: bool(pair.row_block(rows).any()), row_blocks(pair.shape)))
    return pair.added() is not None or any(differs)


def _content(pair: TensorPair, coding: PairCoding, each: Map) -> CodedMatrix | Tensor | None:
    if pair.name not in coding.names:
        return pair.whole() if pair.is_changed() else None
    fitted = coding.fitted.get(pair.name)
    if fitted is not None:
        return _coded(pair, measured(pair, fitted, each), "fitted")
    return _coded(pair, _as_matrix(code_matrix(pair, coding.method, each)), "alternate")


def _as_matrix(coded: Coded[SignPlane]) -> Coded[MatrixDelta]:
    delta = MatrixDelta((coded.delta,))
    return Coded(delta, coded.num_zeros, coded.squared_norm, coded.squared_error)


def _coded(pair: TensorPair, coded: Coded[MatrixDelta], zeros: Zeros) -> CodedMatrix | None:
    if coded.is_zero and not pair.added_rows:
        return None
    largest = _largest(coded.delta)
    # Negated, so that NaN is refused as well.
    if not largest <= LARGEST_SCALE:
        raise CheckpointError(
            f"{pair.tensor.file}: tensor {pair.tensor.name!r} differs from the base's by {largest:.3g}: "
            "give the base that it was tuned from"
        )
    spec = TensorSpec(
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
    return CodedMatrix(coded.delta, spec, pair.added(), coded.squared_norm, coded.squared_error)


def _largest(delta: MatrixDelta) -> float:
    """Return a bound on every number of a delta, as the check of an upload computes it."""
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
