"""Shapes of a pair of checkpoints, on which memory and time of a fit depend, and a stage's cost as plain numbers.

Reads names and shapes of tensors and the model's configuration; reads no weights.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from compressor.pairs import TensorPair

MemoryKind = Literal["host", "device"]
FLOAT32_BYTES, LATENT_BYTES = 4, 2


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One thing in memory during a stage."""

    what: str
    num_bytes: int
    where: MemoryKind
    least_bytes: int | None = None  # with which the stage works where memory is short; None: all of it


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage at its peak of memory, and its work in all."""

    name: str
    items: Sequence[MemoryItem]
    operations: float  # of float32
    moved_bytes: float  # to and from memory, where that takes the time in place of arithmetic

    def num_bytes(self, where: str, *, least: bool = False) -> int:
        """Return the bytes of one kind of memory; with `least`, those without which the stage fails."""
        sizes = (
            item.least_bytes if least and item.least_bytes is not None else item.num_bytes
            for item in self.items
            if item.where == where
        )
        return sum(sizes)


@dataclass(frozen=True, slots=True)
class MachineRate:
    """Measured speed of a machine."""

    operations_per_s: float  # of float32 matrix products
    bytes_per_s: float

    def seconds(self, stage: StageCost) -> float:
        return stage.operations / self.operations_per_s + stage.moved_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class FitShapes:
    """Shapes of a model, and of its matrices that are coded."""

    blocks: Sequence[Mapping[str, tuple[int, ...]]]  # every tensor of each block (decoder layer)
    embedding: tuple[int, int]  # [vocabulary, hidden]
    is_tied: bool
    coded: Mapping[str, tuple[int, int]]  # the matrices to fit, those outside of blocks included
    kv_features: int  # of the KV cache, per token and block

    @property
    def embedding_numel(self) -> int:
        """Numbers in the embedding, and in the head."""
        return math.prod(self.embedding)

    @property
    def num_coded(self) -> int:
        """Weights that are coded."""
        return sum(map(math.prod, self.coded.values()))

    @property
    def block_numels(self) -> list[int]:
        return [sum(map(math.prod, block.values())) for block in self.blocks] or [0]

    @property
    def largest_block(self) -> int:
        """Index of the block of most weights."""
        numels = self.block_numels
        return numels.index(max(numels))

    @property
    def widest(self) -> int:
        """Input features of the widest coded matrix."""
        return widest_input(self.coded.values())

    def matrices(self, index: int) -> list[tuple[str, tuple[int, int]]]:
        """Coded matrices of one block that every token goes through."""
        names = (name for name in self.blocks[index] if ".experts." not in name and name in self.coded)
        return [(name, self.coded[name]) for name in names]

    def features(self, index: int) -> int:
        """Numbers that enter and leave the matrices of one block, per token."""
        return sum(sum(shape) for _, shape in self.matrices(index))

    def input_widths(self, index: int) -> list[int]:
        """Input features of each group of matrices that read the same; attention's output is guessed."""
        groups = {(name.rsplit(".", 2)[0], shape[1]) for name, shape in self.matrices(index)}
        return [features for _, features in sorted(groups)] + [self.embedding[1]]


def widest_input(shapes: Collection[tuple[int, ...]]) -> int:
    """Return the input features of the widest of some matrices ``[out, in]``, at least 1."""
    return max((shape[1] for shape in shapes), default=1)


def shapes_of(pairs: Sequence[TensorPair], coded: Collection[str], config: Mapping[str, Any]) -> FitShapes:
    """Return the shapes of paired tensors; `coded` names those that are fitted, `config` is the model's."""
    blocks: dict[str, dict[str, tuple[int, ...]]] = {}
    for pair in pairs:
        parts = pair.name.split(".")
        number = next((index for index, part in enumerate(parts) if part.isdigit()), None)
        if number is not None:
            blocks.setdefault(".".join(parts[: number + 1]), {})[pair.name] = pair.tensor.shape
    finetune = pairs[0].finetune
    embedding = finetune.tensors[str(finetune.embedding_name)].shape if finetune.embedding_name else (1, 1)
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 1)
    head_dim = int(config.get("head_dim") or embedding[1] // heads)
    return FitShapes(
        blocks=list(blocks.values()),
        embedding=(embedding[0], embedding[1]),
        is_tied=finetune.is_tied(),
        coded={pair.name: (pair.shape[0], pair.shape[1]) for pair in pairs if pair.name in coded},
        kv_features=2 * int(config.get("num_key_value_heads") or heads) * head_dim,
    )
