"""A Hugging Face checkpoint directory, sharded or not, as named tensors read on demand. Knows files, not models.

Tensors are read with pread into memory that the caller owns, whole or in row blocks; nothing is mapped, so a file that
shrinks under a reader is an error and not a fault.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
    """Where one tensor of a checkpoint lies."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    file: Path
    offset: int  # bytes from the beginning of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint: its configuration and the place of every tensor."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]  # in the order of the checkpoint's shards

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Read the headers of a directory that `save_pretrained` wrote.

        Raises:
            CheckpointError: no such directory, no safetensors in it, or a file of it that cannot be read.
        """
        if not path.is_dir():
            raise CheckpointError(
                f"{path}: no such directory; give the directory of a Hugging Face checkpoint"
            )
        try:
            config = _read_object(path / "config.json")
            tensors = _collect(path)
        except ArtifactError as error:
            raise CheckpointError(
                f"{error}: the checkpoint is damaged or not complete, fetch it again"
            ) from error
        if not tensors:
            raise CheckpointError(f"{path}: its safetensors files hold no tensors")
        return cls(path, config, tensors)

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """A tensor of the checkpoint, or a run of its rows, in its stored dtype and in freshly owned memory.

        Raises:
            CheckpointError: its shard has gone or has become shorter.
        """
        stored = self.tensors[name]
        if rows == slice(None):
            shape, start = stored.shape, 0
        else:
            first, last, step = rows.indices(stored.shape[0])
            assert step == 1
            row_bytes = stored.num_bytes // max(1, stored.shape[0])
            shape, start = (max(0, last - first), *stored.shape[1:]), first * row_bytes
        tensor = torch.empty(shape, dtype=TORCH_DTYPE[stored.dtype])
        if tensor.numel():
            _fill(tensor, stored, start)
        return tensor

    def is_tied(self) -> bool:
        """Whether the output head is the input embedding: not stored at all, or stored again byte for byte.

        Some tools store tied weights twice. The two are read only as far as their first difference, and not at all
        where the configuration says that they are two.
        """
        embedding, head = self.embedding_name, self.head_name
        if embedding is None or head is None:
            return head is None
        if not self.config.get("tie_word_embeddings", True):
            return False
        first, second = self.tensors[embedding], self.tensors[head]
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        rows = range(0, first.shape[0], max(1, BLOCK_BYTES * first.shape[0] // max(1, first.num_bytes)))
        return all(
            torch.equal(
                self.read(embedding, block).view(torch.uint8), self.read(head, block).view(torch.uint8)
            )
            for block in (slice(start, start + rows.step) for start in rows)
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape by name, without a head that repeats the embedding, so that all copies give the same."""
        left_out = self.head_name if self.is_tied() else None
        return {name: stored.shape for name, stored in self.tensors.items() if name != left_out}

    @property
    def embedding_name(self) -> str | None:
        """The input embedding's tensor, by the names that the library's models use."""
        return next((name for name in self.tensors if name.endswith(EMBEDDING_SUFFIXES)), None)

    @property
    def head_name(self) -> str | None:
        """The output head's tensor, where the checkpoint holds one of its own."""
        return next((name for name in self.tensors if name.endswith(HEAD_SUFFIXES)), None)


def _fill(tensor: Tensor, stored: StoredTensor, start: int) -> None:
    """Read straight into `tensor`'s memory from byte `start` of the stored tensor."""
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
    """The tensors of every shard; each shard's name is checked before it is opened."""
    single, index = path / SINGLE_FILE, path / INDEX_FILE
    if single.exists():  # before an index, as the library does
        return _stored(single)
    if not index.exists():
        raise CheckpointError(
            f"{path}: neither {SINGLE_FILE} nor {INDEX_FILE} is there; "
            "save the model as safetensors with save_pretrained"
        )
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: it has no weight_map from tensors to shards")
    tensors: dict[str, StoredTensor] = {}
    for file in dict.fromkeys(weight_map.values()):
        if not file.endswith(".safetensors") or Path(file).name != file:
            raise CheckpointError(f"{index}: shard {shown(file)} is no safetensors file of this directory")
        found = _stored(path / file)
        if twice := tensors.keys() & found.keys():
            raise CheckpointError(
                f"{path / file}: tensor {shown(min(twice))} is in another shard too: save the model again"
            )
        tensors |= found
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


def _read_object(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}") from error
    document = parse_json(raw, str(path))
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: it holds no JSON object")
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
                f"{file}: tensor {shown(entry.name)} is {entry.dtype}: only plain float and integer tensors are read; "
                "save the model in bfloat16, float16 or float32"
            )
    return {
        entry.name: StoredTensor(
            entry.name, entry.dtype, entry.shape, file, header.data_start + entry.start, entry.num_bytes
        )
        for entry in header.tensors.values()
    }
