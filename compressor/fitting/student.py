"""The student: the fine-tune with trainable deltas of the base in place of its matrices, one block of it at a time.

Knows where each matrix stands in the model and how gradients reach it; nothing of losses or of how many steps are
taken. Blocks that fit memory stay there with the base's weights beside the student's; others are read when needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compressor.checkpoints import TensorPair
from compressor.decoder import Decoder
from compressor.fitting.trainable import Trainable
from compressor.sampling import free_bytes
from compressor.weights import Overlay, Weights
from deltastore.matrix import MatrixDelta

MEMORY_PART = 0.5  # of what is free, for blocks that stay
COPIES = 3  # of a resident block: the base's weights, the student's, their gradients


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """What enters the first block, and the rows of the embedding that made it."""

    hidden: Tensor  # [sequences, tokens, hidden]
    ids: Tensor  # [used] int64, ascending
    rows: Tensor  # [used, hidden]; a leaf where the embedding trains


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A module and the base's weights of those of its linear layers that train, by path."""

    module: nn.Module
    bases: Mapping[str, Tensor]


class Student:
    """A model to run forward block by block, and backward through `collect_...` into the deltas that train."""

    def __init__(
        self,
        finetune: Weights,
        pairs: Mapping[str, TensorPair],
        deltas: Mapping[str, Trainable],
        device: torch.device,
    ) -> None:
        """Find what trains. A matrix that no forward reaches as it is stored (experts) keeps the delta that it has.

        Args:
            pairs, deltas: of the same matrices, by name.

        Raises:
            CheckpointError: a model that cannot be run block by block.
        """
        self.pairs, self.deltas, self.device = pairs, dict(deltas), device
        self._training: set[str] = set()
        self.decoder = Decoder(Overlay(finetune, self._weight), device, torch.float32)
        self._paths = [self._reached(index) for index in range(self.decoder.num_blocks)]
        self._training |= {str(self.decoder.embedding_name), str(self.decoder.head_name)} & deltas.keys()
        self._table = self.decoder.weights.read(str(self.decoder.embedding_name))
        self._head = self.decoder.load_head()
        self._head_base = self._head.weight.data
        self._num_resident = self._fitting()
        self._resident: dict[int, _Held] = {}
        self._last = -1, _Held(nn.Identity(), {})  # the block that was used last; going back begins with it

    @property
    def num_blocks(self) -> int:
        return self.decoder.num_blocks

    @property
    def trained(self) -> Mapping[str, Trainable]:
        """What gradients reach, by name."""
        return {name: delta for name, delta in self.deltas.items() if name in self._training}

    def stored(self) -> dict[str, MatrixDelta]:
        """Every delta as it is now, in its stored form."""
        return {name: delta.stored() for name, delta in self.deltas.items()}

    def names(self, index: int) -> Collection[str]:
        """Of the matrices of a block that train."""
        return self._paths[index].values()

    @contextmanager
    def replaced(self, name: str, delta: MatrixDelta) -> Iterator[None]:
        """Have another delta for one matrix, while the block runs."""
        own, self.deltas[name] = self.deltas[name], Trainable.of(delta, self.device, relative=True)
        try:
            yield
        finally:
            self.deltas[name] = own

    def release_signs(self) -> None:
        """Let the signs of what trains move."""
        for name, delta in self.trained.items():
            pair = self.pairs[name]
            delta.release_signs(pair.block(slice(0, pair.shape[0])).to(self.device))

    def enter(self, ids: Tensor) -> Entry:
        """From ids ``[sequences, tokens]`` to what enters the first block."""
        used, places = torch.unique(ids, return_inverse=True)
        rows, name = self._table[used].to(self.device, torch.float32), self.decoder.embedding_name
        if name in self._training:
            known = self._known(used)
            rows[: len(known)] += self.deltas[name].dense(known)
            rows.requires_grad_()
        return Entry(self.decoder.enter(rows, places.to(self.device)), used, rows)

    def block(self, index: int) -> nn.Module:
        """A block as its deltas are now; the weights that train ask for gradients."""
        if self._last[0] != index:
            self._last = index, self._resident.get(index) or self._load(index)
        held = self._last[1]
        for path, name in self._paths[index].items():
            linear = held.module.get_submodule(path)
            linear.weight = nn.Parameter(held.bases[path] + self.deltas[name].dense())
        return held.module

    def head(self) -> nn.Linear:
        """The output head as its delta is now."""
        name = self.decoder.head_name
        if name in self._training:
            weight = self._head_base.clone()
            weight[: self.pairs[name].shape[0]] += self.deltas[name].dense()
            self._head.weight = nn.Parameter(weight)
        return self._head

    def collect_entry(self, entry: Entry) -> None:
        """Pass on the gradient of the embedding's rows, where they have one."""
        name = self.decoder.embedding_name
        if name in self._training and entry.rows.grad is not None:
            known = self._known(entry.ids)
            self.deltas[name].collect(entry.rows.grad[: len(known)], known)

    def collect_block(self, index: int, block: nn.Module) -> None:
        """Pass on the gradients of a block's weights."""
        for path, name in self._paths[index].items():
            self._collect(name, block.get_submodule(path))

    def collect_head(self, head: nn.Linear) -> None:
        """Pass on the gradient of the head's weight."""
        if self.decoder.head_name in self._training:
            self._collect(str(self.decoder.head_name), head)

    def _known(self, ids: Tensor) -> Tensor:
        """Of ascending ids, those whose rows the base has."""
        return ids[ids < self.pairs[str(self.decoder.embedding_name)].shape[0]]

    def _collect(self, name: str, linear: nn.Module) -> None:
        weight = linear.weight
        assert isinstance(weight, Tensor)
        if weight.grad is not None:
            self.deltas[name].collect(weight.grad[: self.pairs[name].shape[0]])
            weight.grad = None

    def _weight(self, name: str) -> Tensor | None:
        """What the model is built from: the base where a delta is added later, else with the delta that it keeps."""
        pair = self.pairs.get(name)
        if pair is None:
            return None
        weight, added = pair.base.read(pair.base_tensor.name).float(), pair.added()
        if name not in self._training:
            weight += self.deltas[name].dense().to(weight.device)
        return weight if added is None else torch.cat([weight, added.float()])

    def _reached(self, index: int) -> dict[str, str]:
        """By path in block `index`, the names of the linear layers that train."""
        groups = self.decoder.linears(self.decoder.load_block(index), index)
        reached = {
            linear.path: linear.name for group in groups for linear in group if linear.name in self.deltas
        }
        self._training |= set(reached.values())
        return reached

    def _load(self, index: int) -> _Held:
        module = self.decoder.load_block(index)
        bases = {path: module.get_submodule(path).get_parameter("weight").data for path in self._paths[index]}
        held = _Held(module, bases)
        if index < self._num_resident:
            self._resident[index] = held
        return held

    def _fitting(self) -> int:
        """How many blocks stay in memory beside the one that is being read."""
        sizes = [COPIES * self.decoder.block_bytes(index) for index in range(self.num_blocks)]
        part = int(MEMORY_PART * free_bytes(self.device))
        return self.num_blocks if sum(sizes) <= part else max(0, part // max(sizes) - 1)
