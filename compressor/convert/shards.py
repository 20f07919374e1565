"""Write sharded safetensors files block by block, as transformers lays them out. Knows names and sizes only."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deltastore.base.checkpoint import INDEX_FILE, SINGLE_FILE
from deltastore.format.header import DTYPE_BYTES, TensorEntry, encode_header

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
