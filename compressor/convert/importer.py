"""Make an artifact of a one-bit delta that BitDelta or the per-axis paper's code saved.

A `.pt` file is opened without running code in it, and its modules are unpacked; `writer.py` writes the artifact. Given
a fine-tune, its tokenizer files go along and its weights measure the delta's error.
"""

from __future__ import annotations

import math
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from compressor.codec import Map, measured, row_blocks
from compressor.outputs import (
    check_file_name,
    check_free_disk,
    check_not_an_input,
    check_written,
    checked_at_end,
)
from compressor.pairs import TensorPair, check_architecture, is_finite, layer_order, pair_up
from compressor.sources import own_files
from compressor.writer import CodedMatrix, DeltaContents, DeltaTensor, WrittenDelta, write_delta
from deltastore.architecture import POSITIONS, architecture, ends_of
from deltastore.checkpoint import HEAD_SUFFIXES, INDEX_FILE, SINGLE_FILE, Checkpoint, is_computed
from deltastore.console import identify_base, rounded
from deltastore.errors import ArtifactError, CheckpointError, shown
from deltastore.format.artifact import ArtifactWriter
from deltastore.format.header import parse_json
from deltastore.format.layout import FLOATS as STORED_FLOATS
from deltastore.format.manifest import TensorSpec
from deltastore.format.matrix import MatrixDelta, SignPlane
from deltastore.format.sizes import FP16_BYTES
from deltastore.format.validate import LARGEST_SCALE
from deltastore.wrappers import own_document

Kind = Literal["bitdelta", "per-axis"]
WORD_BITS = 32
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# Raised by torch's restricted reader for a damaged pickle or zip file.
UNREADABLE = (
    OSError, RuntimeError, ValueError, LookupError, AttributeError, TypeError, EOFError, ArithmeticError,
    zipfile.BadZipFile,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CodedForm:
    """Key endings of a coded module's two tensors, and the axis of its coefficients."""

    axis: Literal["scalar", "in", "out"]
    mask: str  # key ending
    coeff: str  # key ending


# The paper's `row` is one per input, because its Algorithm 6 transposes the weight. If a module has both, the first is
# applied, as in its Algorithm 7.
FORMS: Mapping[Kind, tuple[CodedForm, ...]] = {
    "bitdelta": (CodedForm("scalar", ".mask", ".coeff"),),
    "per-axis": (CodedForm("in", ".mask_row", ".coeff_row"), CodedForm("out", ".mask_col", ".coeff_col")),
}


@dataclass(frozen=True, slots=True, eq=False)
class CodedModule:
    """One linear module's delta as stored in the file."""

    path: Path
    module: str
    form: CodedForm
    mask: Tensor  # [in / 32, out] int32; bit i of word j is input 32j + i, a set bit is +1
    coeff: Tensor  # one, [in] or [out], any float dtype

    @property
    def mask_key(self) -> str:
        """The file and key of the mask, for messages."""
        return f"{self.path}: {shown(self.module + self.form.mask)}"

    @property
    def coeff_key(self) -> str:
        """The file and key of the coefficients, for messages."""
        return f"{self.path}: {shown(self.module + self.form.coeff)}"

    def check(self, shape: tuple[int, ...]) -> None:
        """Check dtypes and shapes against the weight's `shape` ``[out, in]``; reads no values.

        Raises:
            CheckpointError: a dtype or shape that does not fit.
        """
        if len(shape) != 2:
            raise CheckpointError(
                f"{self.mask_key}: the base's weight has shape {shape} and is no matrix: {WRONG_BASE}"
            )
        out_features, in_features = shape
        words = (in_features // WORD_BITS, out_features)
        if self.mask.dtype != torch.int32:
            raise CheckpointError(
                f"{self.mask_key} is {_name(self.mask.dtype)} and must be int32, 32 signs in a word: {PACK}"
            )
        if in_features % WORD_BITS or tuple(self.mask.shape) != words:
            raise CheckpointError(
                f"{self.mask_key} has shape {tuple(self.mask.shape)}, 32 inputs in a word, and the base's "
                f"weight has {out_features} outputs and {in_features} inputs: {WRONG_BASE}"
            )
        length = {"scalar": 1, "in": in_features, "out": out_features}[self.form.axis]
        if not self.coeff.is_floating_point():
            raise CheckpointError(
                f"{self.coeff_key} is {_name(self.coeff.dtype)} and must be a float: save it as it was trained"
            )
        if self.coeff.numel() != length or max(self.coeff.shape, default=1) != length:
            raise CheckpointError(
                f"{self.coeff_key} has shape {tuple(self.coeff.shape)} and must have {length} "
                f"{'value' if length == 1 else 'values'}: {WRONG_BASE}"
            )

    def delta(self) -> SignPlane:
        """Return the delta in the artifact's packing; `check` must have passed.

        The four bytes of a word, lowest first, are the artifact's packing of its 32 inputs, so the words are only
        transposed. Coefficients become FP16 times a power of two, with a relative error of at most 2^-11.

        Raises:
            CheckpointError: a coefficient that is NaN, infinite or beyond any delta's.
        """
        signs = self.mask.T.contiguous().view(torch.uint8)
        coeff = self.coeff.double().reshape(-1)
        if not torch.isfinite(coeff).all():
            raise CheckpointError(f"{self.coeff_key} holds NaN or infinity: {DIVERGED}")
        if (largest := float(coeff.abs().max())) > LARGEST_SCALE:
            raise CheckpointError(
                f"{self.coeff_key} reaches {largest:.3g}, beyond {LARGEST_SCALE}: {DIVERGED}"
            )
        scale_out, scale_in = (None, coeff) if self.form.axis == "in" else (coeff, None)
        return SignPlane.from_scales(signs, WORD_BITS * len(self.mask), scale_out, scale_in)


@dataclass(frozen=True, slots=True, eq=False)
class DiffFile:
    """The content of a file by checkpoint tensor name."""

    path: Path
    coded: Mapping[str, CodedModule]
    whole: Mapping[str, Tensor]  # F16, BF16 or F32

    @classmethod
    def open(cls, path: Path, kind: Kind) -> DiffFile:
        """Load a file that `torch.save` wrote, tensors only, and sort its keys. The file is memory-mapped.

        Raises:
            CheckpointError: no such file, a damaged one, one that needs code to be loaded, one that holds more than
                named tensors, or a module that is not complete.
        """
        tensors = _tensors(path)
        parts: dict[str, _ModuleTensors] = {}
        whole: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            module = _part_of(key, kind, path)
            if module is None:
                whole[key] = _parameter(key, tensor, path)
            else:
                parts.setdefault(module, _ModuleTensors()).tensors[key] = tensor
        coded = {f"{module}.weight": some.coded(path, module, kind) for module, some in parts.items()}
        if twice := coded.keys() & whole.keys():
            raise CheckpointError(
                f"{path}: {shown(min(twice))} is there whole and as a mask: keep one of the two"
            )
        return cls(path, coded, whole)


WRONG_BASE = "give the base that it was made from"
PACK = "pack the signs as BitDelta's save_diff does"
DIVERGED = "the file is damaged, or its training diverged"
SAVE_AGAIN = "save a dict of plain tensors on the CPU with torch.save"


@dataclass(frozen=True, slots=True)
class _ModuleTensors:
    """The tensors of one module, by key."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def coded(self, path: Path, module: str, kind: Kind) -> CodedModule:
        found = []
        for form in FORMS[kind]:
            mask, coeff = (self.tensors.get(module + ending) for ending in (form.mask, form.coeff))
            if mask is not None and coeff is not None:
                found.append(CodedModule(path, module, form, mask, coeff))
            elif mask is not None or coeff is not None:
                here, missing = (form.mask, form.coeff) if coeff is None else (form.coeff, form.mask)
                raise CheckpointError(
                    f"{path}: {shown(module + here)} has no {shown(module + missing)} beside it: save both"
                )
        return found[0]


def _tensors(path: Path) -> dict[str, Tensor]:
    """Load the file and check that it is a dict of named tensors."""
    content = _load(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: it holds a {type(content).__name__} and no dict: {SAVE_AGAIN}")
    for key, value in content.items():
        if not isinstance(key, str):
            raise CheckpointError(f"{path}: key {shown(key)} is no name: {SAVE_AGAIN}")
        if not _is_plain(value):
            raise CheckpointError(f"{path}: {shown(key)} is no plain tensor: {SAVE_AGAIN}")
    return {key: value.detach() for key, value in content.items()}


def _load(path: Path) -> Any:
    """Load the file. Memory-mapped, because torch then bounds the sizes that a hostile file claims."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file: give `diff` the .pt file of a delta")
    try:
        if zipfile.is_zipfile(path):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: it holds more than tensors, and loading that could run code from the file: {SAVE_AGAIN}"
        ) from error
    except UNREADABLE as error:
        raise CheckpointError(
            f"{path}: damaged, torch cannot read it: fetch it again, or {SAVE_AGAIN}"
        ) from error
    raise CheckpointError(
        f"{path}: truncated, or not written by torch.save in its present form: fetch it again, or {SAVE_AGAIN}"
    )


def _is_plain(value: Any) -> bool:
    """True for a dense CPU tensor with data: not sparse, quantised, nested or on the meta device."""
    if type(value) not in (Tensor, torch.nn.Parameter):
        return False
    is_dense = value.layout == torch.strided and value.device.type == "cpu"
    return is_dense and not (value.is_quantized or value.is_nested or value.is_neg())


def _part_of(key: str, kind: Kind, path: Path) -> str | None:
    """Return the module of a mask's or coefficient's key; None for a whole parameter."""
    for own, forms in FORMS.items():
        for ending in (ending for form in forms for ending in (form.mask, form.coeff)):
            if not key.endswith(ending):
                continue
            if own != kind:
                raise CheckpointError(
                    f"{path}: {shown(key)} is of the kind {own}: import it with `peraxis import {own}`"
                )
            return key.removesuffix(ending)
    return None


def _parameter(key: str, tensor: Tensor, path: Path) -> Tensor:
    if tensor.dtype not in FLOATS:
        raise CheckpointError(
            f"{path}: {shown(key)} is {_name(tensor.dtype)}: save it in bfloat16, float16 or float32"
        )
    return tensor


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
        ArtifactError: numbers that no server takes.
        CheckpointError: a base or fine-tune that cannot be read, or a file that is no delta of this base.
        StorageFull: too little free disk at `out`.
        UsageError: an `out` that cannot be written.
    """
    inputs = {"base": config.base, "finetune": config.finetune, "diff": config.diff}
    check_not_an_input(config.out, inputs)
    base = Checkpoint.open(config.base)
    finetune = None if config.finetune is None else _open_finetune(config.finetune, base)
    diff = DiffFile.open(config.diff, config.kind)
    tied = (finetune or base).tied
    tensors = _delta_tensors(base, finetune, diff, tied)
    files = {} if finetune is None else own_files(base, finetune)
    check_file_name(config.out)
    num_bytes = sum(tensor.num_bytes for tensor in tensors) + sum(map(len, files.values()))
    # Twice, because the artifact is written to a spool and then copied into its file.
    check_free_disk(config.out.parent, 2 * num_bytes, "importing needs up to")
    with checked_at_end(config.out) as path, ArtifactWriter(path) as writer:
        identity = identify_base(base, config.progress)
        contents = DeltaContents(
            base=identity,
            method="scalar" if config.kind == "bitdelta" else "per-axis",
            tied=tied and identity.head is None,
            tensors=tensors,
            files=files,
            settings={"imported": config.kind},
            max_positions=None if finetune is None else architecture(finetune.config).get(POSITIONS),
        )
        manifest, digest = write_delta(contents, writer, progress=config.progress)
        check_written(path, str(config.out), base, identity)
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
        config = own_document(_read_config(directory / "config.json"))
        finetune = Checkpoint(directory, config, {}, tied=_is_tied(config, base))
    check_architecture(base.config, finetune.config, base.path, directory)
    return finetune


def _read_config(path: Path) -> dict[str, Any]:
    try:
        document = parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}: give `finetune` the directory of the fine-tune's configuration and tokenizer"
        ) from error
    except ArtifactError as error:
        raise CheckpointError(f"{error}: fetch the file again") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: it holds no JSON object: fetch the file again")
    return document


def _is_tied(config: Mapping[str, Any], base: Checkpoint) -> bool:
    """True if a configuration without weights ties head and embedding; as in the base where it says nothing."""
    ends = ends_of(config)
    return bool(config.get("tie_word_embeddings", base.tied)) if ends is None else ends.tied


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
    has_own_head = base.head_name is not None
    if base.embedding_name and (has_own_head or not tied):
        _check_vocabulary(changes, base, base.embedding_name, diff)
    return changes


def _sources(
    contents: dict[str, CodedModule | Tensor], base: Checkpoint, diff: DiffFile, tied: bool
) -> dict[str, str]:
    """Return the base's tensor for each name; adds to `contents` a head that the format needs a second time."""
    own_head = base.head_name
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
            "is not in the file whole: give `finetune` the configuration that the file was trained with"
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
        "give `finetune` a directory whose config.json has tie_word_embeddings false"
    )


def _check_shape(change: TensorChange, base: Checkpoint, diff: DiffFile) -> None:
    stored = base.tensors[change.source]
    if stored.dtype not in STORED_FLOATS:
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
