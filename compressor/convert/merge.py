"""Merge a base and a delta into one Hugging Face checkpoint.

Reads both in row blocks; `merge_kernel.py` adds them. Sharded safetensors files are written block by block, as
transformers lays them out.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from compressor.codec import row_blocks
from compressor.convert.merge_kernel import merge_delta, merge_rows
from compressor.decoder.weights import DeltaModel
from compressor.outputs import check_free_disk, check_not_an_input
from compressor.pairs import is_finite
from compressor.sources import TOKEN_IDS, is_template, tokenizer_files, usable_ids
from deltastore.checkpoint import DTYPE_NAME, INDEX_FILE, SINGLE_FILE, TORCH_DTYPE, Checkpoint, StoredTensor
from deltastore.console import byte_progress, identify_base
from deltastore.errors import StorageFull, UsageError, shown
from deltastore.format.artifact import Artifact
from deltastore.format.files import GENERATION_FILE, is_tokenizer_file
from deltastore.format.header import DTYPE_BYTES, TensorEntry, encode_header, parse_json
from deltastore.format.layout import FLOATS
from deltastore.format.validate import check_artifact, check_base
from deltastore.hub import checkpoint_directory

MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """The name, dtype and shape of a tensor to write."""

    name: str
    dtype: str  # safetensors' name, such as BF16
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class CheckpointShard:
    """One safetensors file and its tensors in order."""

    file: str
    outputs: Sequence[OutputTensor]

    @property
    def num_bytes(self) -> int:
        return sum(output.num_bytes for output in self.outputs)


def split_into_shards(
    outputs: Iterable[OutputTensor], max_bytes: int = MAX_SHARD_BYTES
) -> list[CheckpointShard]:
    """Split tensors into files of at most `max_bytes`, or of one larger tensor, named as transformers does."""
    groups: list[list[OutputTensor]] = [[]]
    num_bytes = 0  # of the last group
    for output in outputs:
        if groups[-1] and num_bytes + output.num_bytes > max_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(output)
        num_bytes += output.num_bytes
    if len(groups) == 1:
        return [CheckpointShard(SINGLE_FILE, groups[0])]
    return [
        CheckpointShard(f"model-{number:05}-of-{len(groups):05}.safetensors", group)
        for number, group in enumerate(groups, 1)
    ]


def write_shard(
    directory: Path,
    shard: CheckpointShard,
    blocks: Callable[[OutputTensor], Iterable[Tensor]],  # of one tensor, in order
    on_bytes: Callable[[int], object],  # called with the bytes of each block
) -> None:
    """Write one file, a block at a time; `blocks` yields those of one tensor."""
    entries, position = [], 0
    for output in shard.outputs:
        entries.append(
            TensorEntry(output.name, output.dtype, output.shape, position, position + output.num_bytes)
        )
        position += output.num_bytes
    with (directory / shard.file).open("wb") as file:
        file.write(encode_header(entries, {"format": "pt"}))
        for output in shard.outputs:
            for block in blocks(output):
                file.write(block.contiguous().view(-1).view(torch.uint8).numpy().data)
                on_bytes(block.nbytes)


def write_index(directory: Path, shards: Sequence[CheckpointShard]) -> None:
    """Write the index of tensors by file, if there is more than one file."""
    if len(shards) > 1:
        weight_map = {output.name: shard.file for shard in shards for output in shard.outputs}
        total = sum(shard.num_bytes for shard in shards)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


# Keys of a configuration for packed weights, which merged ones are not, and for the machine that a model was loaded on.
LOADING = ("quantization_config", "attn_implementation", "_attn_implementation")
BLOCK_NUMEL = 1 << 22  # large enough that the kernel's threads are worth starting
DtypeName = Literal["bfloat16", "float16", "float32"]
DTYPES: Mapping[str, DtypeName] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """Settings of one merge."""

    base: str  # a directory or a hub id
    delta: Path
    out: Path
    dtype: DtypeName | None = None  # None is the base's own
    progress: bool = False


@dataclass(frozen=True, slots=True)
class MergeResult:
    """A written checkpoint."""

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
    """Write base plus delta as `save_pretrained` would; sums are float32, rounded once to the output's dtype.

    Raises:
        ArtifactError, BaseMismatch: an artifact that is malformed, or made from another base.
        StorageFull: too little free disk at `out`.
        UsageError: an `out` that exists already, or cannot be written.
    """
    check_not_an_input(config.out, {"base": config.base, "delta": config.delta})
    base = Checkpoint.open(checkpoint_directory(config.base))
    with Artifact.open(config.delta) as artifact:
        check_artifact(artifact)
        check_base(artifact, identify_base(base, config.progress))
        dtype = config.dtype or _own_dtype(base)
        merged = _MergedModel(DeltaModel(base, artifact), getattr(torch, dtype))
        shards = split_into_shards(merged.outputs())
        size_bytes = sum(shard.num_bytes for shard in shards)
        files = merged.files()
        needed = size_bytes + sum(map(len, files.values()))
        _check_out(config.out, needed)
        with (
            _renamed_at_end(config.out, needed) as directory,
            byte_progress(size_bytes, config.out.name, config.progress) as bar,
        ):
            for shard in shards:
                write_shard(directory, shard, merged.blocks, bar.update)
            write_index(directory, shards)
            for name, content in files.items():
                (directory / name).parent.mkdir(exist_ok=True)
                (directory / name).write_bytes(content)
    return MergeResult(config.out, dtype, len(shards), size_bytes)


@dataclass(frozen=True, eq=False)
class _MergedModel:
    """The merged model's tensors and files."""

    model: DeltaModel
    dtype: torch.dtype

    @property
    def base(self) -> Checkpoint:
        return self.model.base

    @property
    def artifact(self) -> Artifact:
        return self.model.artifact

    def outputs(self) -> list[OutputTensor]:
        """Return every tensor in layer order, a head only if it is not tied, and then those of the base's towers."""
        return [
            *map(self._output, self.model.tensors),
            *(OutputTensor(each.name, each.dtype, each.shape) for each in self._towers.values()),
        ]

    @cached_property
    def _towers(self) -> dict[str, StoredTensor]:
        """The base's tensors that no delta changes, by their names in its files."""
        wrapper = self.base.wrapper
        return {} if wrapper is None else {each.name: each for each in wrapper.towers.values()}

    @cached_property
    def _names(self) -> dict[str, str]:
        """The name in the model of each tensor of it, by the name that it gets in the base's form."""
        return {self._stored_name(name): name for name in self.model.tensors}

    def _stored_name(self, name: str) -> str:
        return name if self.base.wrapper is None else self.base.wrapper.stored_name(name)

    def blocks(self, output: OutputTensor) -> Iterator[Tensor]:
        """Yield the values of one tensor in row blocks."""
        for block in self._merged(output):
            if self.dtype == torch.float16 and not is_finite(block):
                raise UsageError(
                    f"tensor {shown(output.name)} goes beyond float16: choose `dtype='bfloat16'` or `dtype='float32'`"
                )
            yield block

    def _merged(self, output: OutputTensor) -> Iterator[Tensor]:
        if (tower := self._towers.get(output.name)) is not None:
            for rows in row_blocks(tower.shape, BLOCK_NUMEL):
                yield self.base.read_stored(tower, rows)
            return
        name = self._names[output.name]
        spec = self.artifact.manifest.tensors.get(name)
        if spec is not None and spec.codec == "whole":
            for part in self.artifact.blocks(self.artifact.header.tensors[name]):
                yield part.to(self.dtype)
            return
        source = self.model.source(name)
        if spec is None:
            for rows in row_blocks(source.shape, BLOCK_NUMEL):
                yield self.base.read(source.name, rows).to(TORCH_DTYPE[output.dtype])
            return
        if spec.codec == "stack":
            yield from self._merged_stack(name, source.name)
            return
        delta = self.artifact.onebit(name)
        for rows in row_blocks(source.shape, BLOCK_NUMEL):
            block = self.base.read(source.name, rows)
            merged = torch.empty(block.shape, dtype=self.dtype)
            merge_delta(block, delta, rows, merged)
            yield merged
        if (added := self.artifact.added(name)) is not None:
            yield added.to(self.dtype)

    def _merged_stack(self, name: str, source: str) -> Iterator[Tensor]:
        """Yield the row blocks of a stack's experts, one expert after the other."""
        for number, plane in enumerate(self.artifact.stack(name).experts):
            first = number * plane.out_features
            for rows in row_blocks(plane.shape, BLOCK_NUMEL):
                block = self.base.read_flat(source, slice(first + rows.start, first + rows.stop))
                merged = torch.empty(block.shape, dtype=self.dtype)
                merge_rows(block, plane, rows, merged)
                yield merged

    def files(self) -> dict[str, bytes]:
        """The variant's own files, else the base's; and the configuration."""
        own = {name: self.artifact.file(name) for name in self.artifact.manifest.files}
        has_tokenizer = any(is_tokenizer_file(name) and not is_template(name) for name in own)
        # Chat templates alone go with the base's tokenizer.
        files = own if has_tokenizer else {**tokenizer_files(self.base), **own}
        generation = self.base.path / GENERATION_FILE
        if GENERATION_FILE in files:
            where = f"{self.artifact.where}: {GENERATION_FILE}"
            files[GENERATION_FILE] = self._usable(files[GENERATION_FILE], where)
        elif generation.is_file():
            files[GENERATION_FILE] = self._usable(generation.read_bytes(), str(generation))
        config = json.dumps(self._config(), indent=2)
        return {"config.json": config.encode() + b"\n", **files}

    def _usable(self, generation: bytes, where: str) -> bytes:
        """Return a generation config without token ids that the model lacks."""
        facts = parse_json(generation, where)
        if not isinstance(facts, dict) or self.base.embedding_name is None:
            return generation
        ids = usable_ids(facts, self.model.shape(self.base.embedding_name)[0])
        usable = {
            key: ids.get(key, value) for key, value in facts.items() if key not in TOKEN_IDS or key in ids
        }
        return generation if usable == facts else json.dumps(usable, indent=2).encode() + b"\n"

    def _config(self) -> dict[str, Any]:
        config = _without_loading(self.model.stored_config)
        config["dtype"] = str(self.dtype).removeprefix("torch.")
        # The key of older versions of transformers.
        if "torch_dtype" in config:
            config["torch_dtype"] = config["dtype"]
        return config

    def _output(self, name: str) -> OutputTensor:
        source = self.model.source(name)
        dtype = DTYPE_NAME[self.dtype] if source.dtype in FLOATS else source.dtype
        return OutputTensor(self._stored_name(name), dtype, self.model.shape(name))


def _without_loading(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the keys of `LOADING`, nested ones included."""
    return {
        key: _without_loading(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in LOADING
    }


def _own_dtype(base: Checkpoint) -> DtypeName:
    """Return the dtype of most of the base's weights."""
    sizes = dict.fromkeys(DTYPES, 0)
    for stored in base.tensors.values():
        if stored.dtype in sizes:
            sizes[stored.dtype] += math.prod(stored.shape)
    return DTYPES[max(sizes, key=lambda dtype: sizes[dtype])]


def _check_out(out: Path, needed: int) -> None:
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent}: no such directory: give `out` a new name in a directory that exists")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out}: it is there already: choose another `out` or remove it")
    check_free_disk(out.parent, needed, "the checkpoint takes")


@contextmanager
def _renamed_at_end(out: Path, needed: int) -> Iterator[Path]:
    """Yield a directory beside `out` that is renamed to `out` when the context ends, and removed if it fails.

    Raises:
        StorageFull: the disk became full before all `needed` bytes were written.
        UsageError: nothing can be written beside `out`.
    """
    try:
        partial = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    except OSError as error:
        raise UsageError(f"{out.parent}: {error.strerror}: choose an `out` that can be written") from error
    try:
        yield partial
        partial.chmod(0o755)
        # Last, so that a reader finds the whole checkpoint or none.
        os.replace(partial, out)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _full(out, partial, needed, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _full(out: Path, partial: Path, needed: int, error: OSError) -> StorageFull:
    written = sum(file.stat().st_size for file in partial.iterdir())
    missing = max(1, needed - written - shutil.disk_usage(out.parent).free)
    return StorageFull(
        f"{out.parent}: {error.strerror} after {written} of {needed} bytes: "
        f"free at least {missing} more there or choose another `out`"
    )
