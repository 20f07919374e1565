"""Make an artifact of a one-bit delta that BitDelta or the per-axis paper's code saved.

`diff_files.py` opens the file and `io/delta_writer.py` writes the artifact. Given a fine-tune, its tokenizer files go
along and its weights measure the delta's error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.codec import measured
from compressor.convert.diff_files import DIVERGED, WRONG_BASE, CodedModule, DiffFile, Kind
from compressor.io.delta_writer import CodedMatrix, DeltaContents, DeltaTensor, WrittenDelta, write_delta
from compressor.io.outputs import check_file_name, check_free_disk, check_not_an_input
from compressor.io.pairs import TensorPair, is_computed, is_finite, layer_order, pair_up
from compressor.io.row_blocks import Map, row_blocks
from compressor.io.side_files import own_files
from deltastore.base.base import architecture, different_facts
from deltastore.base.checkpoint import HEAD_SUFFIXES, INDEX_FILE, SINGLE_FILE, Checkpoint
from deltastore.errors import ArtifactError, CheckpointError, shown
from deltastore.format.artifact import ArtifactWriter
from deltastore.format.header import parse_json
from deltastore.format.layout import FLOATS
from deltastore.format.manifest import TensorSpec
from deltastore.format.matrix import MatrixDelta
from deltastore.format.plan import FP16_BYTES
from deltastore.progress import identify_base
from deltastore.quantities import rounded


@dataclass(frozen=True, slots=True)
class ImportConfig:
    """Settings of one import."""

    kind: Kind
    base: Path
    diff: Path
    out: Path
    finetune: Path | None = None  # with or without weights
    progress: bool = False


def import_diff(config: ImportConfig) -> WrittenDelta:
    """Make the artifact of a diff file; the same inputs give the same bytes.

    Raises:
        CheckpointError: a base or fine-tune that cannot be read, or a file that is no delta of this base.
        StorageFull: too little free disk at `out`.
        UsageError: an `out` that cannot be written.
    """
    inputs = {"--base": config.base, "--finetune": config.finetune, "--diff": config.diff}
    check_not_an_input(config.out, inputs)
    base = Checkpoint.open(config.base)
    finetune = None if config.finetune is None else _open_finetune(config.finetune, base)
    diff = DiffFile.open(config.diff, config.kind)
    tied = _is_tied(base, finetune)
    tensors = _delta_tensors(base, finetune, diff, tied)
    files = {} if finetune is None else own_files(base, finetune)
    check_file_name(config.out)
    num_bytes = sum(tensor.num_bytes for tensor in tensors) + sum(map(len, files.values()))
    # Twice, because the artifact is written to a spool and then copied into its file.
    check_free_disk(config.out.parent, 2 * num_bytes, "importing needs up to")
    with ArtifactWriter(config.out) as writer:
        identity = identify_base(base, config.progress)
        contents = DeltaContents(
            base=identity,
            method="scalar" if config.kind == "bitdelta" else "per-axis",
            tied=tied and identity.head is None,
            tensors=tensors,
            files=files,
            settings={"imported": config.kind},
        )
        manifest, digest = write_delta(contents, writer, progress=config.progress)
    changed = {name: tuple(spec.shape) for name, spec in manifest.tensors.items()}
    return WrittenDelta(
        out=config.out,
        digest=digest,
        artifact_bytes=config.out.stat().st_size,
        full_bytes=FP16_BYTES * sum(map(math.prod, {**identity.shapes, **changed}.values())),
        num_unchanged=len(identity.shapes.keys() - changed.keys()),
        manifest=manifest,
    )


def _delta_tensors(
    base: Checkpoint, finetune: Checkpoint | None, diff: DiffFile, tied: bool
) -> list[DeltaTensor]:
    """Return the diff's tensors in layer order; nothing is read until their content is asked for."""
    measurable = [] if finetune is None or not finetune.tensors else pair_up(base, finetune).tensors
    pairs = {pair.name: pair for pair in measurable}
    return [
        DeltaTensor(change.name, change.num_bytes, partial(_content, change, base, pairs, diff.path))
        for change in _changes(base, diff, tied)
    ]


def _open_finetune(directory: Path, base: Checkpoint) -> Checkpoint:
    """Open a fine-tune's directory, with or without weights in it; its architecture must be the base's."""
    if any((directory / file).is_file() for file in (SINGLE_FILE, INDEX_FILE)):
        finetune = Checkpoint.open(directory)
    else:
        finetune = Checkpoint(directory, _read_config(directory / "config.json"), {})
    if different := different_facts(architecture(base.config), architecture(finetune.config)):
        raise CheckpointError(
            f"{directory}: its configuration differs from that of {base.path} in {', '.join(different[:3])}, "
            "which a delta cannot carry: give --base the base that it was tuned from"
        )
    return finetune


def _read_config(path: Path) -> dict[str, Any]:
    try:
        document = parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}: give --finetune the directory of the fine-tune's configuration and tokenizer"
        ) from error
    except ArtifactError as error:
        raise CheckpointError(f"{error}: fetch the file again") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: it holds no JSON object: fetch the file again")
    return document


def _is_tied(base: Checkpoint, finetune: Checkpoint | None) -> bool:
    """True if the fine-tune's output head is its embedding; without a fine-tune, if the base's is."""
    if finetune is None:
        return base.is_tied()
    if finetune.tensors:
        return finetune.is_tied()
    return bool(finetune.config.get("tie_word_embeddings", base.is_tied()))


@dataclass(frozen=True, slots=True, eq=False)
class TensorChange:
    """One tensor of the fine-tune, and the base's tensor that it changes."""

    name: str  # in the artifact
    source: str  # in the base
    content: CodedModule | Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes in an artifact."""
        if isinstance(self.content, Tensor):
            return self.content.nbytes
        return self.content.mask.nbytes + FP16_BYTES * self.content.coeff.numel()


def _changes(base: Checkpoint, diff: DiffFile, tied: bool) -> list[TensorChange]:
    """Return the changes of a diff file in layer order, checked except for their values.

    Args:
        tied: the fine-tune's output head is its embedding.

    Raises:
        CheckpointError: the file does not fit the base.
    """
    contents: dict[str, CodedModule | Tensor] = {**diff.coded, **diff.whole}
    sources = _sources(contents, base, diff, tied)
    if unknown := sorted(name for name, source in sources.items() if source not in base.tensors):
        raise CheckpointError(
            f"{diff.path}: the base has no {shown(unknown[0])}, nor {len(unknown) - 1} others: {WRONG_BASE}"
        )
    changes = [TensorChange(name, sources[name], contents[name]) for name in sorted(sources, key=layer_order)]
    for change in changes:
        _check_shape(change, base, diff)
    has_own_head = not base.is_tied() and base.head_name is not None
    if base.embedding_name and (has_own_head or not tied):
        _check_vocabulary(changes, base, base.embedding_name, diff)
    return changes


def _sources(
    contents: dict[str, CodedModule | Tensor], base: Checkpoint, diff: DiffFile, tied: bool
) -> dict[str, str]:
    """Return the base's tensor for each name; adds to `contents` a head that the format needs a second time."""
    own_head = None if base.is_tied() else base.head_name
    embedding = base.embedding_name
    if own_head and tied and own_head not in contents:
        contents[own_head] = _embedding_for_head(contents.get(str(embedding)), diff)
    sources = {name: name for name in contents if not is_computed(name)}
    if own_head or not embedding:
        return sources
    for head in [name for name in sources if name.endswith(HEAD_SUFFIXES)]:
        sources[head] = embedding
        if tied:
            _check_repeated(head, contents, embedding, diff)
            del sources[head]
    return sources


def _embedding_for_head(embedding: CodedModule | Tensor | None, diff: DiffFile) -> Tensor:
    """Return the head of a tied fine-tune whose base has its own: the format carries the embedding a second time."""
    if not isinstance(embedding, Tensor):
        raise CheckpointError(
            f"{diff.path}: the fine-tune ties its output head to the embedding, the base does not, and the embedding "
            "is not in the file whole: give --finetune the configuration that the file was trained with"
        )
    return embedding


def _check_repeated(
    head: str, contents: Mapping[str, CodedModule | Tensor], embedding: str, diff: DiffFile
) -> None:
    """Refuse a tied head in the file that is not the embedding once more."""
    one, other = contents[head], contents.get(embedding)
    if (
        isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and one.dtype == other.dtype
        and torch.equal(one, other)
    ):
        return
    raise CheckpointError(
        f"{diff.path}: {shown(head)} is an output head of its own and the configuration ties it to the embedding: "
        "give --finetune a directory whose config.json has tie_word_embeddings false"
    )


def _check_shape(change: TensorChange, base: Checkpoint, diff: DiffFile) -> None:
    stored = base.tensors[change.source]
    if stored.dtype not in FLOATS:
        raise CheckpointError(
            f"{stored.file}: tensor {shown(stored.name)} is {stored.dtype}: "
            "save the base in bfloat16, float16 or float32"
        )
    if isinstance(change.content, CodedModule):
        change.content.check(stored.shape)
        return
    actual, expected = tuple(change.content.shape), stored.shape
    is_vocabulary = change.source == base.embedding_name or change.name.endswith(HEAD_SUFFIXES)
    if actual == expected or (is_vocabulary and actual[1:] == expected[1:] and actual > expected):
        return
    raise CheckpointError(
        f"{diff.path}: {shown(change.name)} has shape {actual} and the base's is {expected}: {WRONG_BASE}"
        f"{'; a vocabulary may grow and not shrink' if is_vocabulary else ''}"
    )


def _check_vocabulary(
    changes: Sequence[TensorChange], base: Checkpoint, embedding: str, diff: DiffFile
) -> None:
    """Refuse an embedding and an output head of its own that differ in rows."""
    rows = {
        change.name: change.content.shape[0]
        for change in changes
        if isinstance(change.content, Tensor)
        and (change.name == embedding or change.name.endswith(HEAD_SUFFIXES))
    }
    unchanged = base.tensors[embedding].shape[0]
    of_embedding = rows.pop(embedding, unchanged)
    of_head = next(iter(rows.values()), unchanged)
    if of_embedding != of_head:
        raise CheckpointError(
            f"{diff.path}: the embedding has {of_embedding} rows and the output head {of_head}: "
            "save both, resized alike"
        )


def _content(
    change: TensorChange,
    base: Checkpoint,
    pairs: Mapping[str, TensorPair],  # by name; empty without a fine-tune's weights
    path: Path,  # of the diff file
    each: Map,
) -> CodedMatrix | Tensor | None:
    if isinstance(change.content, CodedModule):
        return _coded(change, change.content, pairs.get(change.name), each)
    return change.content if _is_changed(change.content, change, base, path) else None


def _is_changed(tensor: Tensor, change: TensorChange, base: Checkpoint, path: Path) -> bool:
    """True if a whole parameter differs from the base's in a value or in its rows; refuses NaN and infinity."""
    if not all(is_finite(_rows(tensor, rows)) for rows in row_blocks(tuple(tensor.shape))):
        raise CheckpointError(f"{path}: {shown(change.name)} holds NaN or infinity: {DIVERGED}")
    stored = base.tensors[change.source]
    return tuple(tensor.shape) != stored.shape or any(
        not torch.equal(base.read(stored.name, rows).float(), _rows(tensor, rows).float())
        for rows in row_blocks(stored.shape)
    )


def _rows(tensor: Tensor, rows: slice) -> Tensor:
    return tensor[rows] if tensor.dim() else tensor


def _coded(
    change: TensorChange, module: CodedModule, pair: TensorPair | None, each: Map
) -> CodedMatrix | None:
    delta = MatrixDelta((module.delta(),))
    if not module.coeff.any():
        return None
    coded = None if pair is None else measured(pair, delta, each)
    spec = TensorSpec(
        codec="onebit",
        shape=[delta.out_features, delta.in_features],
        axis=delta.axis,
        against=None if change.source == change.name else change.source,
        error=None if coded is None else rounded(coded.error),
    )
    if coded is None:
        return CodedMatrix(delta, spec)
    return CodedMatrix(delta, spec, squared_norm=coded.squared_norm, squared_error=coded.squared_error)
