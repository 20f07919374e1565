"""Pair the tensors of a base and its fine-tune in layer order, and check that a delta can carry the difference.

Then each pair becomes tensors of a delta: coded, whole, or left out where the fine-tune equals its base. Reads
checkpoints in row blocks.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from compressor.codec import Coded, Map, code_matrix, measured, row_blocks, workers
from compressor.config import Method
from compressor.writer import CodedMatrix, DeltaTensor
from deltastore.architecture import differences
from deltastore.checkpoint import EMBEDDING_SUFFIXES, HEAD_SUFFIXES, Checkpoint, StoredTensor
from deltastore.console import rounded
from deltastore.errors import CheckpointError
from deltastore.format.layout import FLOATS
from deltastore.format.manifest import TensorSpec
from deltastore.format.matrix import MatrixDelta, SignPlane, largest_of_plane, largest_of_residual
from deltastore.format.validate import LARGEST_SCALE

# Old checkpoints hold tables that transformers computes and does not load.
COMPUTED_SUFFIXES = (
    "rotary_emb.inv_freq",
    ".attention.bias",
    ".attention.masked_bias",
    ".attn.bias",
    ".attn.masked_bias",
)


@dataclass(frozen=True, slots=True, eq=False)
class TensorPair:
    """A tensor of the fine-tune and the base's; rows that the base lacks are not part of the difference."""

    name: str  # in an artifact
    base: Checkpoint
    finetune: Checkpoint
    base_tensor: StoredTensor
    tensor: StoredTensor  # the fine-tune's

    @property
    def against(self) -> str | None:
        """The base's tensor if it has another name, else None."""
        return None if self.base_tensor.name == self.name else self.base_tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the difference, which is the base's."""
        return self.base_tensor.shape

    @property
    def added_rows(self) -> int:
        return self.tensor.shape[0] - self.shape[0] if self.shape else 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the fine-tune."""
        return (
            self.tensor.num_bytes // max(1, self.tensor.shape[0])
            if self.tensor.shape
            else self.tensor.num_bytes
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the base's and the fine-tune's tensor."""
        return self.base_tensor.num_bytes + self.tensor.num_bytes

    def row_block(self, rows: slice) -> Tensor:
        """Return some rows of the difference, in new float32 memory.

        Raises:
            CheckpointError: NaN or infinity in either side.
        """
        block = self.finetune.read(self.tensor.name, rows).float()
        block.sub_(self.base.read(self.base_tensor.name, rows).float())
        if not is_finite(block):
            base_is_finite = is_finite(self.base.read(self.base_tensor.name, rows))
            raise _not_finite(self.tensor if base_is_finite else self.base_tensor)
        return block

    def is_changed(self) -> bool:
        """True if any value differs or rows were added. Reads until the first difference."""
        return self.added_rows > 0 or any(self.row_block(rows).any() for rows in row_blocks(self.shape))

    def added(self) -> Tensor | None:
        """Return the rows that the base lacks, in the fine-tune's dtype; None without any."""
        if not self.added_rows:
            return None
        added = self.finetune.read(self.tensor.name, slice(self.shape[0], None))
        if not is_finite(added):
            raise _not_finite(self.tensor)
        return added

    def whole(self) -> Tensor:
        """Return the fine-tune's tensor as it is stored."""
        whole = self.finetune.read(self.tensor.name)
        if not all(is_finite(whole[rows]) for rows in row_blocks(self.tensor.shape)):
            raise _not_finite(self.tensor)
        return whole


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Two checkpoints as pairs of the tensors that a delta may carry."""

    base: Checkpoint
    finetune: Checkpoint
    tensors: Sequence[TensorPair]  # in layer order
    tied: bool  # both models' output heads are their input embeddings

    @property
    def num_weights(self) -> int:
        """Weights of the fine-tune; a tied head counts once."""
        return sum(
            math.prod(shape) for shape in {p.tensor.name: p.tensor.shape for p in self.tensors}.values()
        )


def is_finite(tensor: Tensor) -> bool:
    """True if no value is NaN or infinite.

    The sum is cheaper than a look at every value, which is needed only when the sum overflows.
    """
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())


def pair_up(base: Checkpoint, finetune: Checkpoint) -> Pairs:
    """Check that a delta can carry the fine-tune and pair the tensors in layer order; reads headers only.

    Raises:
        CheckpointError: another architecture, other names, shapes that differ, a shrunk vocabulary, integer weights.
    """
    check_architecture(base.config, finetune.config, base.path, finetune.path)
    base_head, head = base.head_name, finetune.head_name
    # By name in the artifact, the names of the base's and the fine-tune's tensor.
    pairs = {name: (name, name) for name in _names(finetune)}
    if head and not base_head and base.embedding_name:
        pairs[head] = (base.embedding_name, head)
    if base_head and not head and finetune.embedding_name:
        pairs[base_head] = (base_head, finetune.embedding_name)
    missing = sorted(_names(base) - pairs.keys())
    unknown = sorted(name for name, (source, _) in pairs.items() if source not in base.tensors)
    if missing or unknown:
        raise CheckpointError(
            f"{finetune.path}: its tensors are not the base's (missing: {_listed(missing)}; "
            f"unknown: {_listed(unknown)}): give the base that it was tuned from"
        )
    paired = [
        TensorPair(name, base, finetune, base.tensors[source], finetune.tensors[target])
        for name, (source, target) in sorted(pairs.items(), key=lambda item: layer_order(item[0]))
    ]
    for pair in paired:
        _check_shapes(pair)
        _check_dtypes(pair)
    return Pairs(base, finetune, paired, tied=base.tied and finetune.tied)


def check_architecture(
    base: Mapping[str, Any], finetune: Mapping[str, Any], base_name: object, finetune_name: object
) -> None:
    """Compare the configurations of two checkpoints; the names are those of messages.

    Warns of fields that differ and that no code of the model reads.

    Raises:
        CheckpointError: they differ in what the model reads, which a delta cannot carry.
    """
    different, ignored = differences(base, finetune)
    if different:
        raise CheckpointError(
            f"{finetune_name}: its configuration differs from that of {base_name} in {_listed(different)}, "
            "which a delta cannot carry: give the base that it was tuned from"
        )
    if ignored:
        _warn(
            f"{finetune_name}: its configuration differs from that of {base_name} in {_listed(ignored)}, which no code "
            "of the model reads: ignored"
        )


@cache
def _warn(text: str) -> None:
    """Warn once, because a command may compare two configurations twice."""
    print(f"warning: {text}", file=sys.stderr)


def is_computed(name: str) -> bool:
    """True if a tensor is a table that transformers computes itself."""
    return name.endswith(COMPUTED_SUFFIXES)


def layer_order(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Return a sorting key: input embedding, layers by number, tensors after them, output head."""
    if name.endswith(EMBEDDING_SUFFIXES):
        section = 0
    elif name.endswith(HEAD_SUFFIXES):
        section = 3
    else:
        section = 1 if any(part.isdigit() for part in name.split(".")) else 2
    return section, [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _names(checkpoint: Checkpoint) -> set[str]:
    """Return the names that a delta carries: no computed tables."""
    return {name for name in checkpoint.tensors if not is_computed(name)}


def _listed(names: list[str]) -> str:
    return ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])]) or "none"


def _check_shapes(pair: TensorPair) -> None:
    actual, expected = pair.tensor.shape, pair.base_tensor.shape
    if actual == expected:
        return
    is_vocabulary = pair.name.endswith((*EMBEDDING_SUFFIXES, *HEAD_SUFFIXES)) and actual[1:] == expected[1:]
    if is_vocabulary and actual[0] > expected[0]:
        return
    if is_vocabulary:
        raise CheckpointError(
            f"{pair.tensor.file}: tensor {pair.tensor.name!r} has {actual[0]} rows and the base {expected[0]}: "
            "a vocabulary may grow and not shrink: pad the fine-tune's embeddings to the base's rows"
        )
    raise CheckpointError(
        f"{pair.tensor.file}: tensor {pair.tensor.name!r} has shape {actual} and the base's is {expected}: "
        "give the base that it was tuned from"
    )


def _check_dtypes(pair: TensorPair) -> None:
    for stored in (pair.base_tensor, pair.tensor):
        if stored.dtype not in FLOATS:
            raise CheckpointError(
                f"{stored.file}: tensor {stored.name!r} is {stored.dtype}: "
                "save the model in bfloat16, float16 or float32"
            )


def _not_finite(stored: StoredTensor) -> CheckpointError:
    return CheckpointError(
        f"{stored.file}: tensor {stored.name!r} holds NaN or infinity: "
        "the checkpoint is damaged, or its training diverged"
    )


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
