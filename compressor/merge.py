"""A base and a delta as one stock Hugging Face checkpoint: reads both in row blocks, a kernel adds, `shards` writes."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from compressor.blocks import row_blocks
from compressor.checkpoints import is_computed, is_finite, layer_order
from compressor.progress import byte_progress
from compressor.shards import Output, cut, write_index, write_shard
from compressor.sources import checkpoint_directory
from compressor.variant_files import TOKEN_IDS, tokenizer_files
from deltastore.artifact import Artifact
from deltastore.base import Base
from deltastore.checkpoint import DTYPE_NAME, HEAD_SUFFIXES, TORCH_DTYPE, Checkpoint
from deltastore.errors import ArtifactError, StorageFull, UsageError, shown
from deltastore.header import parse_json
from deltastore.layout import FLOATS
from deltastore.manifest import GENERATION_FILE, TOKENIZER_FILES
from deltastore.validate import check_artifact, check_base

BLOCK_NUMEL = 1 << 22  # large enough that the kernel's threads are worth starting
DtypeName = Literal["bfloat16", "float16", "float32"]
DTYPES: Mapping[str, DtypeName] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """What to merge and where to."""

    base: str  # a directory or a hub id
    delta: Path
    out: Path
    dtype: DtypeName | None = None  # None is the base's own
    progress: bool = False


@dataclass(frozen=True, slots=True)
class MergeResult:
    """What was written."""

    out: Path
    dtype: DtypeName
    num_files: int
    size_bytes: int

    def as_json(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "dtype": self.dtype,
            "num_files": self.num_files,
            "size_bytes": self.size_bytes,
        }


def merge(config: MergeConfig) -> MergeResult:
    """Write the variant as `save_pretrained` would: base in float32 plus delta, rounded once to the output's dtype.

    Raises:
        ArtifactError, BaseMismatch: an artifact that is malformed, or made from another base.
        StorageFull: no room at `out`.
        UsageError: an `out` that is there already, or cannot be written.
    """
    base = Checkpoint.open(checkpoint_directory(config.base))
    with Artifact.open(config.delta) as artifact:
        check_artifact(artifact)
        check_base(artifact, Base.of(base))
        dtype = config.dtype or _own_dtype(base)
        variant = _Variant(base, artifact, getattr(torch, dtype))
        shards = cut(variant.outputs())
        size_bytes = sum(shard.num_bytes for shard in shards)
        _check_out(config.out, size_bytes)
        with (
            _appearing(config.out) as directory,
            byte_progress(size_bytes, config.out.name, config.progress) as bar,
        ):
            for shard in shards:
                write_shard(directory, shard, variant.blocks, bar.update)
            write_index(directory, shards)
            for name, content in variant.files().items():
                (directory / name).write_bytes(content)
    return MergeResult(config.out, dtype, len(shards), size_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class _Variant:
    """The merged model's tensors and files."""

    base: Checkpoint
    artifact: Artifact
    dtype: torch.dtype

    def outputs(self) -> list[Output]:
        """Every tensor, in layer order; the head only where it is not the embedding."""
        names = {name for name in self.base.tensors if not is_computed(name)} - {self.base.head_name}
        if not self.artifact.manifest.tied and (self.base.head_name or self.base.embedding_name):
            names.add(self._head())
        return [self._output(name) for name in sorted(names, key=layer_order)]

    def blocks(self, output: Output) -> Iterator[Tensor]:
        """The values of one tensor, in row blocks from first to last."""
        for block in self._merged(output):
            if self.dtype == torch.float16 and not is_finite(block):
                raise UsageError(
                    f"tensor {shown(output.name)} goes beyond float16: choose --dtype bfloat16 or float32"
                )
            yield block

    def _merged(self, output: Output) -> Iterator[Tensor]:
        from compressor.merge_kernel import merge_rows  # imported when needed: it brings a compiler

        spec = self.artifact.manifest.tensors.get(output.name)
        if spec is not None and spec.codec == "whole":
            yield self.artifact.whole(output.name).to(self.dtype)
            return
        source = self.base.tensors[self._source(output.name)]
        if spec is None:
            for rows in row_blocks(source.shape, BLOCK_NUMEL):
                yield self.base.read(source.name, rows).to(TORCH_DTYPE[output.dtype])
            return
        delta = self.artifact.onebit(output.name)
        for rows in row_blocks(source.shape, BLOCK_NUMEL):
            block = self.base.read(source.name, rows)
            merged = torch.empty(block.shape, dtype=self.dtype)
            merge_rows(block, delta, rows, merged)
            yield merged
        if (added := self.artifact.added(output.name)) is not None:
            yield added.to(self.dtype)

    def files(self) -> dict[str, bytes]:
        """The variant's own files, else the base's; and the configuration."""
        own = {name: self.artifact.file(name) for name in self.artifact.manifest.files}
        files = own if own.keys() & set(TOKENIZER_FILES) else {**tokenizer_files(self.base), **own}
        generation = self.base.path / GENERATION_FILE
        if GENERATION_FILE not in files and generation.is_file():
            files[GENERATION_FILE] = generation.read_bytes()
        config = json.dumps(self._config(own.get(GENERATION_FILE, b"{}")), indent=2)
        return {"config.json": config.encode() + b"\n", **files}

    def _config(self, generation: bytes) -> dict[str, Any]:
        ids = parse_json(generation, f"{self.artifact.where}: {GENERATION_FILE}")
        if not isinstance(ids, dict):
            raise ArtifactError(f"{self.artifact.where}: {GENERATION_FILE} holds no JSON object")
        config = {**self.base.config, **{key: ids[key] for key in TOKEN_IDS if key in ids}}
        config["tie_word_embeddings"] = self.artifact.manifest.tied
        config["dtype"] = str(self.dtype).removeprefix("torch.")
        if "torch_dtype" in config:  # the key of older versions of the library
            config["torch_dtype"] = config["dtype"]
        if self.base.embedding_name:
            config["vocab_size"] = self._output(self.base.embedding_name).shape[0]
        return config

    def _output(self, name: str) -> Output:
        spec, source = self.artifact.manifest.tensors.get(name), self.base.tensors[self._source(name)]
        dtype = DTYPE_NAME[self.dtype] if source.dtype in FLOATS else source.dtype
        return Output(name, dtype, source.shape if spec is None else tuple(spec.shape))

    def _source(self, name: str) -> str:
        """The base's tensor that one of the variant's is taken from: a tied base has its embedding for a head."""
        spec = self.artifact.manifest.tensors.get(name)
        if spec is not None and spec.against is not None:
            return spec.against
        assert name in self.base.tensors or self.base.embedding_name is not None
        return name if name in self.base.tensors else str(self.base.embedding_name)

    def _head(self) -> str:
        """What the head is called, also where the base has none and the variant's is the base's embedding unchanged."""
        candidates = [self.base.head_name, *self.artifact.manifest.tensors]
        stored = (name for name in candidates if name is not None and name.endswith(HEAD_SUFFIXES))
        beside = (
            "embed_out.weight"
            if str(self.base.embedding_name).endswith("embed_in.weight")
            else "lm_head.weight"
        )
        return next(stored, beside)


def _own_dtype(base: Checkpoint) -> DtypeName:
    """The dtype of most of the base's weights."""
    sizes = dict.fromkeys(DTYPES, 0)
    for stored in base.tensors.values():
        if stored.dtype in sizes:
            sizes[stored.dtype] += math.prod(stored.shape)
    return DTYPES[max(sizes, key=lambda dtype: sizes[dtype])]


def _check_out(out: Path, needed: int) -> None:
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent}: no such directory: give --out a new name in a directory that exists")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out}: it is there already: choose another --out or remove it")
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise StorageFull(
            f"{out.parent}: {free} bytes are free and the checkpoint takes {needed}: "
            "free some space there or choose another --out"
        )


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A directory beside `out` that takes its name when the block ends, and is removed when it fails."""
    try:
        partial = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    except OSError as error:
        raise UsageError(f"{out.parent}: {error.strerror}: choose an --out that can be written") from error
    try:
        yield partial
        partial.chmod(0o755)
        os.replace(partial, out)  # last, so that a reader finds the whole checkpoint or none
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise StorageFull(
            f"{out.parent}: {error.strerror}: free some space there or choose another --out"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
