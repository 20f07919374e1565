"""Somebody else's one-bit delta as an artifact: which base tensor each part changes, what is left out, the writing.

`diff_files.py` opens the file and repacks its masks; here it meets the base, and the fine-tune's files where given.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.codec import measured
from compressor.convert.diff_files import DIVERGED, WRONG_BASE, CodedModule, DiffFile, Kind
from compressor.evaluate.fidelity import rounded
from compressor.io.outputs import check_apart
from compressor.io.pairs import TensorPair, is_computed, is_finite, layer_order, pair_up
from compressor.io.row_blocks import row_blocks, workers
from compressor.io.side_files import own_files
from deltastore.base.base import Base, architecture, different_facts
from deltastore.base.checkpoint import HEAD_SUFFIXES, INDEX_FILE, SINGLE_FILE, Checkpoint
from deltastore.errors import ArtifactError, CheckpointError, StorageFull, UsageError, shown
from deltastore.format.artifact import ArtifactWriter
from deltastore.format.header import parse_json
from deltastore.format.layout import FLOATS
from deltastore.format.manifest import Manifest, TensorSpec
from deltastore.format.matrix import MatrixDelta
from deltastore.format.onebit import OneBit
from deltastore.progress import byte_progress, identify_base

FULL_BYTES = 2  # per weight of the checkpoint that a delta is compared with
SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class ImportConfig:
    """What to import."""

    kind: Kind
    base: Path
    diff: Path
    out: Path
    finetune: Path | None = None  # its files and configuration; its weights, where there, to measure against
    progress: bool = False


@dataclass(frozen=True, slots=True)
class ImportResult:
    """What was made."""

    out: Path
    digest: str  # SHA-256, 64 hex digits
    artifact_bytes: int
    full_bytes: int  # of the variant at 16 bits
    num_unchanged: int  # the base's tensors that the variant shares
    manifest: Manifest

    def as_json(self) -> dict[str, Any]:
        specs = self.manifest.tensors.items()
        return {
            "out": str(self.out),
            "digest": f"sha256:{self.digest}",
            "artifact_bytes": self.artifact_bytes,
            "device_bytes": self.manifest.device_bytes,
            "full_bytes": self.full_bytes,
            "ratio": self.full_bytes / self.artifact_bytes,
            "weight_error": self.manifest.fidelity.get("weight_error"),
            "num_unchanged": self.num_unchanged,
            "tensors": {name: spec.model_dump(exclude_defaults=True) for name, spec in specs},
        }


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """One tensor of the variant, by the base's that it changes."""

    name: str  # as the artifact calls it
    source: str  # the base's
    content: CodedModule | Tensor

    @property
    def num_bytes(self) -> int:
        if isinstance(self.content, Tensor):
            return self.content.nbytes
        return self.content.mask.nbytes + SCALE_BYTES * self.content.coeff.numel()


@dataclass(slots=True)
class _Carried:
    """What has been written so far."""

    specs: dict[str, TensorSpec] = field(default_factory=dict)
    squared_norm: float = 0.0
    squared_error: float = 0.0

    @property
    def fidelity(self) -> dict[str, float]:
        """Of all coded matrices together, where there was a fine-tune to measure against."""
        if not self.squared_norm:
            return {}
        return {"weight_error": rounded(math.sqrt(self.squared_error / self.squared_norm))}


def import_diff(config: ImportConfig) -> ImportResult:
    """Make the artifact of somebody else's delta; the same inputs give the same bytes.

    Raises:
        CheckpointError: a base or fine-tune that cannot be read, or a file that is no delta of this base.
        StorageFull: no room at `out`.
        UsageError: an `out` that cannot be written.
    """
    check_apart(config.out, {"--base": config.base, "--finetune": config.finetune, "--diff": config.diff})
    base = Checkpoint.open(config.base)
    finetune = None if config.finetune is None else _open_finetune(config.finetune, base)
    diff = DiffFile.open(config.diff, config.kind)
    tied = _is_tied(base, finetune)
    changes = _changes(base, diff, tied)
    files = {} if finetune is None else own_files(base, finetune)
    measurable = [] if finetune is None or not finetune.tensors else pair_up(base, finetune).tensors
    pairs = {pair.name: pair for pair in measurable}
    _check_room(config.out, sum(change.num_bytes for change in changes) + sum(map(len, files.values())))
    with ArtifactWriter(config.out) as writer:
        identity = identify_base(base, config.progress)
        carried = _carry(changes, base, pairs, writer, config)
        device_bytes = writer.device_bytes
        for name, content in files.items():
            writer.add_file(name, content)
        manifest = Manifest(
            base_id=identity.id,
            base_fingerprint=identity.fingerprint,
            method="scalar" if config.kind == "bitdelta" else "per-axis",
            tied=tied and identity.head is None,
            device_bytes=device_bytes,
            config=dict(identity.config),
            tensors=carried.specs,
            files=list(files),
            compressor={"version": version("peraxis"), "settings": {"imported": config.kind}},
            fidelity=carried.fidelity,
        )
        digest = writer.finish(manifest)
    return _result(config.out, digest, identity, manifest)


def _open_finetune(directory: Path, base: Checkpoint) -> Checkpoint:
    """The fine-tune's directory, with or without weights in it; its architecture must be the base's."""
    if any((directory / file).is_file() for file in (SINGLE_FILE, INDEX_FILE)):
        finetune = Checkpoint.open(directory)
    else:
        finetune = Checkpoint(directory, _config(directory / "config.json"), {})
    if different := different_facts(architecture(base.config), architecture(finetune.config)):
        raise CheckpointError(
            f"{directory}: its configuration differs from that of {base.path} in {', '.join(different[:3])}, "
            "which a delta cannot carry: give --base the base that it was tuned from"
        )
    return finetune


def _config(path: Path) -> dict[str, Any]:
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
    """Whether the variant's output head is its embedding: as the fine-tune's is, or without one as the base's."""
    if finetune is None:
        return base.is_tied()
    if finetune.tensors:
        return finetune.is_tied()
    return bool(finetune.config.get("tie_word_embeddings", base.is_tied()))


def _changes(base: Checkpoint, diff: DiffFile, tied: bool) -> list[_Change]:
    """What the file says of each of the base's tensors, checked but for the values, in layer order."""
    contents: dict[str, CodedModule | Tensor] = {**diff.coded, **diff.whole}
    own_head = None if base.is_tied() else base.head_name
    embedding = base.embedding_name
    if own_head and tied and own_head not in contents:
        contents[own_head] = _embedding_for_head(contents.get(str(embedding)), diff)
    sources = {name: name for name in contents if not is_computed(name)}
    if not own_head and embedding:
        for head in [name for name in sources if name.endswith(HEAD_SUFFIXES)]:
            sources[head] = embedding
            if tied:
                _check_repeated(head, contents, embedding, diff)
                del sources[head]
    if unknown := sorted(name for name, source in sources.items() if source not in base.tensors):
        raise CheckpointError(
            f"{diff.path}: the base has no {shown(unknown[0])}, nor {len(unknown) - 1} others: {WRONG_BASE}"
        )
    changes = [_Change(name, sources[name], contents[name]) for name in sorted(sources, key=layer_order)]
    for change in changes:
        _check_form(change, base, diff)
    if embedding and not (tied and own_head is None):
        _check_vocabulary(changes, base, embedding, diff)
    return changes


def _embedding_for_head(embedding: CodedModule | Tensor | None, diff: DiffFile) -> Tensor:
    """The head of a tied variant whose base has its own: the format carries the embedding a second time."""
    if not isinstance(embedding, Tensor):
        raise CheckpointError(
            f"{diff.path}: the fine-tune ties its output head to the embedding, the base does not, and the embedding "
            "is not in the file whole: give --finetune the configuration that the file was trained with"
        )
    return embedding


def _check_repeated(
    head: str, contents: Mapping[str, CodedModule | Tensor], embedding: str, diff: DiffFile
) -> None:
    """A tied head may be in the file too, if it is the embedding once more."""
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


def _check_form(change: _Change, base: Checkpoint, diff: DiffFile) -> None:
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


def _check_vocabulary(changes: list[_Change], base: Checkpoint, embedding: str, diff: DiffFile) -> None:
    """Embedding and output head of their own have as many rows."""
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


def _check_room(out: Path, num_bytes: int) -> None:
    """The artifact is written to a spool and then in one piece, so it takes its room twice for a moment."""
    if out.is_dir() or not out.parent.is_dir():
        place = f"{out} is a directory" if out.is_dir() else f"{out.parent}: no such directory"
        raise UsageError(f"{place}: give --out the name of a file in a directory that exists")
    free = shutil.disk_usage(out.parent).free
    if free < 2 * num_bytes:
        raise StorageFull(
            f"{out.parent}: {free} bytes are free and importing needs up to {2 * num_bytes}: "
            "free some space there or choose another --out"
        )


def _carry(
    changes: list[_Change],
    base: Checkpoint,
    pairs: Mapping[str, TensorPair],  # empty where there is nothing to measure against
    writer: ArtifactWriter,
    config: ImportConfig,
) -> _Carried:
    carried, total = _Carried(), sum(change.num_bytes for change in changes)
    with byte_progress(total, config.out.name, config.progress) as bar:
        for change in changes:
            if isinstance(change.content, CodedModule):
                _carry_coded(change, change.content, pairs.get(change.name), writer, carried)
            elif _is_changed(change.content, change, base, config.diff):
                writer.add_whole(change.name, change.content)
                carried.specs[change.name] = TensorSpec(codec="whole", shape=list(change.content.shape))
            bar.update(change.num_bytes)
    return carried


def _is_changed(tensor: Tensor, change: _Change, base: Checkpoint, path: Path) -> bool:
    """Whether a whole parameter differs from the base's in any value or in its rows; all of it must be finite."""
    if not all(is_finite(_rows(tensor, rows)) for rows in row_blocks(tuple(tensor.shape))):
        raise CheckpointError(f"{path}: {shown(change.name)} holds NaN or infinity: {DIVERGED}")
    stored = base.tensors[change.source]
    return tuple(tensor.shape) != stored.shape or any(
        not torch.equal(base.read(stored.name, rows).float(), _rows(tensor, rows).float())
        for rows in row_blocks(stored.shape)
    )


def _rows(tensor: Tensor, rows: slice) -> Tensor:
    return tensor[rows] if tensor.dim() else tensor


def _carry_coded(
    change: _Change, module: CodedModule, pair: TensorPair | None, writer: ArtifactWriter, carried: _Carried
) -> None:
    delta = module.delta()
    if not module.coeff.any():
        return  # the base's weight as it is
    writer.add_onebit(change.name, MatrixDelta((delta,)))
    carried.specs[change.name] = TensorSpec(
        codec="onebit",
        shape=[delta.out_features, delta.in_features],
        axis=delta.axis,
        against=None if change.source == change.name else change.source,
        error=None if pair is None else _measure(pair, delta, carried),
    )


def _measure(pair: TensorPair, delta: OneBit, carried: _Carried) -> float:
    with workers() as each:
        coded = measured(pair, delta, each)
    carried.squared_norm += coded.squared_norm
    carried.squared_error += coded.squared_error
    return rounded(coded.error)


def _result(out: Path, digest: str, base: Base, manifest: Manifest) -> ImportResult:
    own = {name: tuple(spec.shape) for name, spec in manifest.tensors.items()}
    return ImportResult(
        out=out,
        digest=digest,
        artifact_bytes=out.stat().st_size,
        full_bytes=FULL_BYTES * sum(math.prod(shape) for shape in {**base.shapes, **own}.values()),
        num_unchanged=len(base.shapes.keys() - own.keys()),
        manifest=manifest,
    )
