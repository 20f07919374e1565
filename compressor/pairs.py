"""Pair the tensors of a base and its fine-tune in layer order, and check that a delta can carry the difference.

Then each pair becomes tensors of a delta: coded, whole, or left out where the fine-tune equals its base. Reads
checkpoints in row blocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from compressor.codec import Coded, Map, code_matrix, code_stack, measured, row_blocks, workers
from compressor.config import Method
from compressor.experts import check_not_mxfp4, in_base_form, stacks_of
from compressor.names import (
    TUNED_FROM,
    check_names,
    check_whole,
    empty_tensor,
    listed,
    tuned_from,
    unread_names,
    warn,
    warn_of_stale_index,
    with_base_names,
)
from compressor.writer import CodedMatrix, DeltaTensor
from deltastore.architecture import differences
from deltastore.checkpoint import EMBEDDING_SUFFIXES, HEAD_SUFFIXES, Checkpoint, StoredTensor, is_computed
from deltastore.console import rounded
from deltastore.errors import CheckpointError, shown
from deltastore.format.layout import FLOATS
from deltastore.format.manifest import TensorSpec
from deltastore.format.matrix import (
    MatrixDelta,
    SignPlane,
    StackDelta,
    largest_of_plane,
    largest_of_residual,
)
from deltastore.format.sizes import is_matrix
from deltastore.format.validate import LARGEST_SCALE
from deltastore.wrappers import tower_differences


@dataclass(frozen=True, slots=True, eq=False)
class TensorPair:
    """A tensor of the fine-tune and the base's; rows that the base lacks are not part of the difference."""

    name: str  # in an artifact
    base: Checkpoint
    finetune: Checkpoint
    base_tensor: StoredTensor
    tensor: StoredTensor  # the fine-tune's
    # Of a stack of experts: rows of the stored matrices are inputs. None for other tensors.
    transposed: bool | None = None

    @property
    def against(self) -> str | None:
        """The base's tensor if it has another name, else None."""
        return None if self.base_tensor.name == self.name else self.base_tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the difference, which is the base's."""
        return self.base_tensor.shape

    @property
    def flat_shape(self) -> tuple[int, ...]:
        """The shape by which row blocks are counted: the matrices of a stack are one below the other."""
        return self.shape if self.transposed is None else (self.shape[0] * self.shape[1], self.shape[2])

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
        """Return some rows of the difference, counted by `flat_shape`, in new float32 memory.

        Raises:
            CheckpointError: NaN or infinity in either side.
        """
        block = self.finetune_rows(rows).float()
        block.sub_(self.base_rows(rows).float())
        if not is_finite(block):
            stored = self.tensor if is_finite(self.base_rows(rows)) else self.base_tensor
            if self.transposed is None:
                raise _not_finite(stored)
            bad = int(block.isfinite().all(1).long().argmin())
            raise _not_finite(stored, (rows.start + bad) // self.shape[1])
        return block

    def base_rows(self, rows: slice) -> Tensor:
        """Read some rows of the base's tensor, counted by `flat_shape`."""
        return _rows_of(self.base, self.base_tensor, rows, self.transposed is not None)

    def finetune_rows(self, rows: slice) -> Tensor:
        """Read some rows of the fine-tune's tensor, counted by `flat_shape`."""
        return _rows_of(self.finetune, self.tensor, rows, self.transposed is not None)

    def experts(self) -> list[ExpertPair]:
        """Return the matrices of a stack."""
        return [ExpertPair(self, number) for number in range(self.shape[0])]

    def is_changed(self) -> bool:
        """True if any value differs or rows were added. Reads until the first difference."""
        return self.added_rows > 0 or any(self.row_block(rows).any() for rows in row_blocks(self.flat_shape))

    def is_same_bytes(self) -> bool:
        """True if both sides store the same bytes in one dtype and shape, integers included."""
        ours, theirs = self.tensor, self.base_tensor
        return (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape) and torch.equal(
            self.finetune.read(ours.name).view(-1).view(torch.uint8),
            self.base.read(theirs.name).view(-1).view(torch.uint8),
        )

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
        # Flat, because a tensor may have no dimension.
        flat = whole.reshape(-1)
        if not all(is_finite(flat[block]) for block in row_blocks(tuple(flat.shape))):
            raise _not_finite(self.tensor)
        return whole


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPair:
    """The difference of one matrix of a stack, which can be read any number of times."""

    stack: TensorPair
    number: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack.shape[1:]

    def row_block(self, rows: slice) -> Tensor:
        """Return some rows of the difference; raises as `TensorPair.row_block` does."""
        first = self.number * self.shape[0]
        return self.stack.row_block(slice(first + rows.start, first + rows.stop))


def _rows_of(checkpoint: Checkpoint, stored: StoredTensor, rows: slice, is_stack: bool) -> Tensor:
    return checkpoint.read_flat(stored.name, rows) if is_stack else checkpoint.read(stored.name, rows)


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Two checkpoints as pairs of the tensors that a delta may carry."""

    base: Checkpoint
    finetune: Checkpoint
    tensors: Sequence[TensorPair]  # in layer order
    tied: bool  # both models' output heads are their input embeddings

    @property
    def stacks(self) -> list[str]:
        """The names of the stacks of experts."""
        return [pair.name for pair in self.tensors if pair.transposed is not None]

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

    Names that differ by a common prefix are one. Tensors that the model does not read are left out, with a warning.

    Raises:
        CheckpointError: another architecture, other names, shapes that differ, a shrunk vocabulary, integer weights.
    """
    check_architecture(base.config, finetune.config, base.path, finetune.path)
    for checkpoint in (base, finetune):
        check_not_mxfp4(checkpoint)
        warn_of_stale_index(checkpoint)
    finetune = in_base_form(base, with_base_names(base, finetune))
    base_head, head = base.head_name, finetune.head_name
    # By name in the artifact, the names of the base's and the fine-tune's tensor.
    pairs = {name: (name, name) for name in _names(finetune)}
    if head and not base_head and base.embedding_name:
        pairs[head] = (base.embedding_name, head)
    if base_head and not head and finetune.embedding_name:
        pairs[base_head] = (base_head, finetune.embedding_name)
    missing = _names(base) - pairs.keys()
    unknown = {name for name, (source, _) in pairs.items() if source not in base.tensors}
    if missing or unknown:
        check_names(base, finetune, missing, unknown)
    stacks = stacks_of(base)
    paired = [
        TensorPair(name, base, finetune, base.tensors[source], finetune.tensors[target], stacks.get(source))
        for name, (source, target) in sorted(pairs.items(), key=lambda item: layer_order(item[0]))
        if name not in unknown
    ]
    read = _read_pairs(paired)
    # After the pairs, whose errors say more of what is on one side alone.
    check_whole(base)
    return Pairs(base, finetune, read, tied=base.tied and finetune.tied)


def _read_pairs(paired: Sequence[TensorPair]) -> list[TensorPair]:
    """Return the pairs that a delta can carry; others that the model does not read are left out.

    Raises:
        CheckpointError: the model reads one of them.
    """
    unfit = {}
    for pair in paired:
        try:
            _check_dtypes(pair)
            _check_shapes(pair)
        except CheckpointError as error:
            unfit[pair.name] = error
    if not unfit:
        return list(paired)
    unread = unread_names(paired[0].base.config, unfit)
    if read := [error for name, error in unfit.items() if name not in unread]:
        raise read[0]
    different = [pair.name for pair in paired if pair.name in unfit and not pair.is_same_bytes()]
    if different:
        warn(
            f"{paired[0].finetune.path}: {listed(different)}: left out of the delta, because its model does not read "
            "them"
        )
    return [pair for pair in paired if pair.name not in unfit]


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
            f"{finetune_name}: its configuration differs from that of {base_name} in {listed(different)}, "
            "which a delta cannot carry: give the base that it was tuned from"
        )
    if ignored:
        warn(
            f"{finetune_name}: its configuration differs from that of {base_name} in {listed(ignored)}, which no code "
            "of the model reads: ignored"
        )


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


def _check_shapes(pair: TensorPair) -> None:
    actual, expected = pair.tensor.shape, pair.base_tensor.shape
    is_end = pair.name.endswith((*EMBEDDING_SUFFIXES, *HEAD_SUFFIXES))
    if is_end and len(actual) != 2:
        raise CheckpointError(
            f"{pair.tensor.file}: tensor {pair.tensor.name!r} has shape {actual}, and it must be a matrix with a row "
            "for each token: fetch the checkpoint again"
        )
    if actual == expected:
        return
    for own, other, stored in ((actual, expected, pair.tensor), (expected, actual, pair.base_tensor)):
        if 0 in own and 0 not in other:
            raise empty_tensor(stored)
    is_vocabulary = is_end and len(expected) == 2 and actual[1:] == expected[1:]
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


def _not_finite(stored: StoredTensor, expert: int | None = None) -> CheckpointError:
    where = "" if expert is None else f" in expert {expert}"
    return CheckpointError(
        f"{stored.file}: tensor {stored.name!r} holds NaN or infinity{where}: "
        "the checkpoint is damaged, or its training diverged"
    )


# Of a matrix, weights that are compared, in this number of places. Matrices that are compared at most, evenly spread.
SAMPLED_NUMEL, SAMPLED_PLACES, SAMPLED_MATRICES = 1 << 16, 8, 256
# The least cosine of two matrices of which one was tuned from the other. Independent ones have 0, and a fine-tune whose
# difference is as large as its base has 0.7.
RELATED_COSINE = 0.3
# Matrices, and the share of them, that may be unrelated, such as layers that were initialised again.
FEW, FEW_SHARE = 3, 0.1


def check_related(pairs: Pairs) -> None:
    """Refuse a base of which many matrices are as far from the fine-tune's as those of an independent model.

    Compares at most 128 KiB of each side (in 16 bits) of 256 matrices, so that it costs the same for every model.

    Raises:
        CheckpointError: the fine-tune was not tuned from this base.
    """
    matrices = [
        pair
        for pair in pairs.tensors
        if pair.transposed is not None or is_matrix(pair.name, pair.shape, embeddings=False)
    ]
    step = max(1, -(-len(matrices) // SAMPLED_MATRICES))
    # For its one thread: samples are too small for more.
    with workers():
        cosines = {pair.name: cosine for pair in matrices[::step] if (cosine := _cosine(pair)) is not None}
    unrelated = [name for name, cosine in cosines.items() if not cosine >= RELATED_COSINE]
    if len(unrelated) > max(FEW, FEW_SHARE * len(cosines)):
        worst = min(unrelated, key=lambda name: cosines[name])
        raise CheckpointError(
            f"{pairs.finetune.path}: {len(unrelated)} of {len(cosines)} matrices differ from those of "
            f"{pairs.base.path} as two independent models do ({worst}: cosine "
            f"{cosines[worst]:.2f}): {TUNED_FROM}, or `any_base=True`"
        )


def _cosine(pair: TensorPair) -> float | None:
    """Return the cosine of some rows of a matrix, or of a stack's experts, and of the base's.

    None if either has no weights but zero.

    A matrix that is not finite has none, and is refused where it is coded.
    """
    num_rows, numel = pair.flat_shape[0], math.prod(pair.flat_shape[1:])
    if not num_rows or not numel or numel > SAMPLED_NUMEL:
        return None
    rows = min(num_rows, max(1, SAMPLED_NUMEL // numel // SAMPLED_PLACES))
    places = sorted(
        {round(part * (num_rows - rows) / (SAMPLED_PLACES - 1)) for part in range(SAMPLED_PLACES)}
    )
    product, ours, theirs = 0.0, 0.0, 0.0
    for first in places:
        block = slice(first, first + rows)
        a = pair.base_rows(block).double().flatten()
        b = pair.finetune_rows(block).double().flatten()
        product, ours, theirs = product + float(a @ b), ours + float(a @ a), theirs + float(b @ b)
    norms = math.sqrt(ours) * math.sqrt(theirs)
    return product / norms if 0 < norms < math.inf else None


def check_order(base: str, finetune: str, directories: tuple[Path, Path]) -> None:
    """Refuse swapped arguments where the files of one say that it was tuned from the other.

    Args:
        base, finetune: as they were given: directories or hub ids.
        directories: where their files are.

    Raises:
        CheckpointError: the base's model card or configuration names the fine-tune as its base.
    """
    named = [name for name in tuned_from(directories[0]) if _is_model(name, finetune, directories[1])]
    if named and not any(_is_model(name, base, directories[0]) for name in tuned_from(directories[1])):
        raise CheckpointError(
            f"{directories[0]}: its files say that it was tuned from {shown(named[0])}, which is given as the "
            "fine-tune: swap `base` and `finetune`, or give `any_base=True`"
        )


def _is_model(name: str, given: str, directory: Path) -> bool:
    """True if a model's name in a card is a model that was given by its directory or id."""
    if Path(name).is_absolute() or name.startswith("."):
        return Path(name).exists() and directory.exists() and Path(name).samefile(directory)
    if not Path(given).is_dir():
        return name.lower() == given.lower()
    # A directory is most often named after the last part of the model's id.
    last = name.lower().rpartition("/")[2]
    return last in (directory.name.lower(), directory.resolve().name.lower())


def check_towers(base: Checkpoint, finetune: Checkpoint) -> None:
    """Refuse a fine-tune whose towers for images or sound are not its base's: a delta carries the text model alone.

    Reads them up to the first differences. Warns of towers that the base lacks, and of their other settings.

    Raises:
        CheckpointError: a tower's tensor differs.
    """
    if finetune.wrapper is None:
        return
    towers = finetune.wrapper.towers
    if base.wrapper is None:
        if towers:
            warn(
                f"{finetune.path}: towers for images or sound ({listed(sorted(towers))}): left out of the delta, "
                f"because {base.path} is a text model alone"
            )
        return
    known = base.wrapper.towers
    different = [
        name
        for name in sorted(towers)
        if name not in known or not _is_same_tower(base, known[name], finetune, towers[name])
    ]
    if different:
        raise CheckpointError(
            f"{finetune.path}: its towers for images or sound differ from those of {base.path} "
            f"({listed(different)}), and a delta carries the text model alone: train it with frozen towers, or save it "
            "with the base's towers if its answers to text are wanted"
        )
    if fields := tower_differences(base.wrapper.config, finetune.wrapper.config):
        warn(
            f"{finetune.path}: its configuration differs from that of {base.path} in {listed(fields)}, which its text "
            "model does not read: the base's stay"
        )


def _is_same_tower(base: Checkpoint, one: StoredTensor, finetune: Checkpoint, other: StoredTensor) -> bool:
    if one.shape != other.shape:
        return False
    for rows in row_blocks(one.shape):
        a, b = base.read_stored(one, rows), finetune.read_stored(other, rows)
        # Either may have been rounded to its dtype when it was saved.
        if not (torch.equal(a.to(b.dtype), b) or torch.equal(b.to(a.dtype), a)):
            return False
    return True


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
    differs = list(each(lambda rows: bool(pair.row_block(rows).any()), row_blocks(pair.flat_shape)))
    return pair.added() is not None or any(differs)


def _content(pair: TensorPair, coding: PairCoding, each: Map) -> CodedMatrix | Tensor | None:
    if pair.name not in coding.names:
        return pair.whole() if pair.is_changed() else None
    if pair.transposed is not None:
        stack = code_stack(pair.experts(), coding.method, transposed=pair.transposed, each=each)
        return _coded(pair, stack, "alternate")
    fitted = coding.fitted.get(pair.name)
    if fitted is not None:
        return _coded(pair, measured(pair, fitted, each), "fitted")
    return _coded(pair, _as_matrix(code_matrix(pair, coding.method, each)), "alternate")


def _as_matrix(coded: Coded[SignPlane]) -> Coded[MatrixDelta]:
    delta = MatrixDelta((coded.delta,))
    return Coded(delta, coded.num_zeros, coded.squared_norm, coded.squared_error)


def _coded(
    pair: TensorPair, coded: Coded[MatrixDelta] | Coded[StackDelta], zeros: Zeros
) -> CodedMatrix | None:
    if coded.is_zero and not pair.added_rows:
        return None
    delta = coded.delta
    # A stack has no further planes and no residual.
    parts = [MatrixDelta((plane,)) for plane in delta.experts] if isinstance(delta, StackDelta) else [delta]
    largest = max(map(_largest, parts))
    # Negated, so that NaN is refused as well.
    if not largest <= LARGEST_SCALE:
        raise CheckpointError(
            f"{pair.tensor.file}: tensor {pair.tensor.name!r} differs from the base's by {largest:.3g}: "
            "give the base that it was tuned from"
        )
    spec = TensorSpec(
        codec="onebit" if pair.transposed is None else "stack",
        shape=list(pair.tensor.shape),
        axis=delta.axis,
        planes=parts[0].num_planes,
        rank=parts[0].rank,
        transposed=bool(pair.transposed),
        added_rows=pair.added_rows,
        against=pair.against,
        num_zeros=coded.num_zeros,
        zeros=zeros if coded.num_zeros else None,
        error=rounded(coded.error),
    )
    return CodedMatrix(delta, spec, pair.added(), coded.squared_norm, coded.squared_error)


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
