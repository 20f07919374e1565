"""A Hugging Face checkpoint directory, sharded or not, as named tensors that are read on demand.

Tensors are read with `pread` into memory that the caller owns, whole or by rows. Files are never mapped: a file that
shrinks while it is read raises an error, not SIGBUS. Opening one decides, as transformers does when it loads it, whether
the output head is the input embedding. Must not know model classes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltastore.architecture import ends_of
from deltastore.errors import ArtifactError, CheckpointError, shown
from deltastore.format.header import open_file, parse_json, read_header, read_into

TORCH_DTYPE: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
DTYPE_NAME: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPE.items()}
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
EMBEDDING_SUFFIXES = ("embed_tokens.weight", "embed_in.weight", "wte.weight", "word_embeddings.weight")
HEAD_SUFFIXES = ("lm_head.weight", "embed_out.weight")
BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of one tensor of a checkpoint."""

    name: str
    dtype: str  # safetensors' name, such as "BF16"
    shape: tuple[int, ...]
    file: Path
    offset: int  # bytes from the beginning of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint: its configuration and the location of every tensor."""

    path: Path
    config: Mapping[str, Any]
    # In the order of the checkpoint's shards. A tensor that embedding and head share is there once, as the embedding.
    tensors: Mapping[str, StoredTensor]
    tied: bool  # the output head is the input embedding

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Read `config.json` and the safetensors headers of a directory that `save_pretrained` wrote.

        Where the model ties its head and both are stored, they are compared up to their first difference.

        Raises:
            CheckpointError: The directory is missing, holds no safetensors, or one of its files cannot be read; or
                the embedding or the head is missing.
        """
        if not path.is_dir():
            defect = "not a directory" if path.exists() else "no such directory"
            raise CheckpointError(f"{path}: {defect}; give the directory of a Hugging Face checkpoint")
        if not (path / "config.json").exists():
            raise CheckpointError(
                f"{path / 'config.json'} does not exist, so {path} is not the directory of a Hugging Face checkpoint: "
                "give another one, or fetch the checkpoint again"
            )
        try:
            config = _read_object(path / "config.json")
            tensors = _collect(path)
        except ArtifactError as error:
            raise CheckpointError(
                f"{error}: the checkpoint is damaged or incomplete, fetch it again"
            ) from error
        if not tensors:
            raise CheckpointError(
                f"{path}: its safetensors files hold no tensors: fetch the checkpoint again"
            )
        return _with_ends(path, config, tensors)

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Read a tensor, or a contiguous run of its rows, in its stored dtype into newly allocated memory.

        Args:
            name: The tensor's name.
            rows: A slice of step 1 over the first dimension.

        Raises:
            CheckpointError: Its shard is missing or has become shorter.
            ValueError: `rows` has another step than 1.
        """
        stored = self.tensors[name]
        if rows == slice(None):
            shape, start = stored.shape, 0
        else:
            first, last, step = rows.indices(stored.shape[0])
            if step != 1:
                raise ValueError(f"rows {rows}: only slices of step 1 are read")
            row_bytes = stored.num_bytes // max(1, stored.shape[0])
            shape, start = (max(0, last - first), *stored.shape[1:]), first * row_bytes
        tensor = torch.empty(shape, dtype=TORCH_DTYPE[stored.dtype])
        if tensor.numel():
            _fill(tensor, stored, start)
        return tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every tensor's shape by name."""
        return {name: stored.shape for name, stored in self.tensors.items()}

    @property
    def embedding_name(self) -> str | None:
        """The name of the input embedding's tensor, recognised by the suffixes that transformers' models use."""
        return _first(self.tensors, EMBEDDING_SUFFIXES)

    @property
    def head_name(self) -> str | None:
        """The name of the output head's tensor; None if it is the embedding's."""
        return _first(self.tensors, HEAD_SUFFIXES)


def _first(names: Iterable[str], suffixes: tuple[str, ...]) -> str | None:
    return next((name for name in names if name.endswith(suffixes)), None)


def _with_ends(path: Path, config: Mapping[str, Any], tensors: dict[str, StoredTensor]) -> Checkpoint:
    """Decide whether embedding and head are one tensor, and keep one that is stored twice once.

    Raises:
        CheckpointError: one of them is missing, and the model does not take the other for it.
    """
    embedding, head = _first(tensors, EMBEDDING_SUFFIXES), _first(tensors, HEAD_SUFFIXES)
    ends = ends_of(config)
    if embedding is not None and head is not None:
        ties = config.get("tie_word_embeddings", True) if ends is None else ends.tied
        checkpoint = Checkpoint(path, config, tensors, tied=False)
        if not ties or not _are_equal(checkpoint, embedding, head):
            return checkpoint
        rest = {name: stored for name, stored in tensors.items() if name != head}
        return Checkpoint(path, config, rest, tied=True)
    # Some models name them otherwise.
    has_embedding = embedding is not None or (ends is not None and ends.embedding in tensors)
    has_head = head is not None or (ends is not None and ends.head in tensors)
    if ends is None or has_embedding == has_head:
        return Checkpoint(path, config, tensors, tied=head is None)
    if not ends.tied:
        missing = ends.head if has_embedding else ends.embedding
        raise CheckpointError(
            f"{path}: its config.json does not tie the output head to the embedding, and {shown(missing)} is in none "
            "of its shards: fetch the checkpoint again, or the config.json that belongs to it"
        )
    if has_head:
        renamed = {head or ends.head: ends.embedding_among(tensors)}
        found = [replace(stored, name=renamed.get(name, name)) for name, stored in tensors.items()]
        tensors = {stored.name: stored for stored in found}
    return Checkpoint(path, config, tensors, tied=True)


def _are_equal(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Compare the bytes of two tensors block by block up to their first difference."""
    first, second = checkpoint.tensors[one], checkpoint.tensors[other]
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    rows = range(0, first.shape[0], max(1, BLOCK_BYTES * first.shape[0] // max(1, first.num_bytes)))
    return all(
        torch.equal(
            checkpoint.read(one, block).view(torch.uint8), checkpoint.read(other, block).view(torch.uint8)
        )
        for block in (slice(start, start + rows.step) for start in rows)
    )


def _fill(tensor: Tensor, stored: StoredTensor, start: int) -> None:
    """Read into `tensor`'s memory, beginning at byte `start` of the stored tensor."""
    target = tensor.view(-1).view(torch.uint8).numpy().data
    where = f"{stored.file}: tensor {shown(stored.name)}"
    try:
        fd = open_file(stored.file, where)
        try:
            read_into(fd, target, stored.offset + start, where)
        finally:
            os.close(fd)
    except ArtifactError as error:
        raise CheckpointError(f"{error}: fetch the shard again") from error


def _collect(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of every shard. A shard's name is checked before it is opened."""
    single, index = path / SINGLE_FILE, path / INDEX_FILE
    # The single file wins over an index, as in transformers.
    if single.exists():
        return _stored(single)
    if not index.exists():
        raise CheckpointError(
            f"{path}: neither {SINGLE_FILE} nor {INDEX_FILE} is there; "
            "save the model as safetensors with save_pretrained"
        )
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: it has no weight_map from tensors to shards: fetch it again")
    tensors = _shard_tensors(index, weight_map)
    if missing := weight_map.keys() - tensors.keys():
        raise CheckpointError(
            f"{index}: tensor {shown(min(missing))} is in none of its shards: fetch them again"
        )
    if unnamed := tensors.keys() - weight_map.keys():
        name = min(unnamed)
        raise CheckpointError(
            f"{index}: its weight_map leaves out tensor {shown(name)} of {tensors[name].file.name}: "
            "it belongs to other shards; fetch the checkpoint again or save the model again"
        )
    return tensors


def _shard_tensors(index: Path, weight_map: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Read the header of every shard that an index names; no tensor may be in two shards."""
    tensors: dict[str, StoredTensor] = {}
    for file in dict.fromkeys(weight_map.values()):
        if not file.endswith(".safetensors") or Path(file).name != file:
            raise CheckpointError(
                f"{index}: shard {shown(file)} is not a safetensors file of this directory: fetch the index again"
            )
        shard = index.with_name(file)
        found = _stored(shard)
        if twice := tensors.keys() & found.keys():
            raise CheckpointError(
                f"{shard}: tensor {shown(min(twice))} is in another shard too: save the model again"
            )
        tensors |= found
    return tensors


def _read_object(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}") from error
    document = parse_json(raw, str(path))
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: it is not a JSON object: fetch the file again")
    return document


def _stored(file: Path) -> dict[str, StoredTensor]:
    fd = open_file(file, str(file))
    try:
        header = read_header(fd, str(file))
    finally:
        os.close(fd)
    for entry in header.tensors.values():
        if entry.dtype not in TORCH_DTYPE:
            raise CheckpointError(
                f"{file}: tensor {shown(entry.name)} is {entry.dtype}, which is not read: "
                "save the model in bfloat16, float16 or float32"
            )
    return {
        entry.name: StoredTensor(
            entry.name, entry.dtype, entry.shape, file, header.data_start + entry.start, entry.num_bytes
        )
        for entry in header.tensors.values()
    }
