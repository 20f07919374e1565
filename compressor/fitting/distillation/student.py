"""The student: the fine-tune with trainable deltas of the base in place of its matrices, one block of it at a time.

Knows where each matrix stands in the model and how gradients reach it; nothing of losses or of how many steps are
taken. A block is made of the base's weights when it is asked for, the deltas are added to it in place, and it goes when
the caller drops it; the base's weights of small models and of those that fit a GPU stay, others are read again. What is
read lies in the page cache, so a second reading costs little beside what is computed with it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compressor.blockwise.decoder import Decoder
from compressor.blockwise.sampling import free_bytes
from compressor.blockwise.weights import Overlay, Weights
from compressor.fitting.distillation.trainable import Trainable
from compressor.io.pairs import TensorPair
from deltastore.format.matrix import MatrixDelta

HOST_BYTES = 256 << 20  # of blocks that stay in host memory
DEVICE_PART = 0.25  # of what is free on a GPU, for blocks that stay there


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """What enters the first block, and the rows of the embedding that made it."""

    hidden: Tensor  # [sequences, tokens, hidden]
    ids: Tensor  # [used] int64, ascending
    rows: Tensor  # [used, hidden]; a leaf where the embedding trains


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
        self._num_resident = self._fitting()
        self._resident: dict[int, nn.Module] = {}

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

    def adopt_signs(self, values: Mapping[str, Sequence[Tensor]]) -> None:
        """Go on from latents that were kept, by name: one per plane, which are taken over."""
        for name, own in values.items():
            for plane, latents in zip(self.deltas[name].planes, own, strict=True):
                plane.adopt(latents)

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
        """A block as its deltas are now, in memory of its own; the weights that train ask for gradients."""
        block = self._base_block(index)
        for path, name in self._paths[index].items():
            self._begin(name, block.get_submodule(path))
        return block

    def head(self) -> nn.Linear:
        """The output head as its delta is now, in memory of its own."""
        head = self.decoder.load_head()
        if self.decoder.head_name in self._training:
            self._begin(str(self.decoder.head_name), head)
        return head

    def collect_entry(self, entry: Entry) -> Iterator[str]:
        """Pass on the gradient of the embedding's rows, where they have one; then its name."""
        name = self.decoder.embedding_name
        if name in self._training and entry.rows.grad is not None:
            known = self._known(entry.ids)
            self.deltas[name].collect(entry.rows.grad[: len(known)], known)
            yield name

    def collect_block(self, index: int, block: nn.Module) -> Iterator[str]:
        """Pass on the gradients of a block's weights one at a time, each followed by its name."""
        for path, name in self._paths[index].items():
            self._collect(name, block.get_submodule(path))
            yield name

    def collect_head(self, head: nn.Module) -> Iterator[str]:
        """Pass on the gradient of the head's weight; then its name, unless it is the embedding with more to come."""
        name = self.decoder.head_name
        if name in self._training:
            self._collect(name, head)
            if name != self.decoder.embedding_name:
                yield name

    def _known(self, ids: Tensor) -> Tensor:
        """Of ascending ids, those whose rows the base has."""
        return ids[ids < self.pairs[str(self.decoder.embedding_name)].shape[0]]

    def _begin(self, name: str, linear: nn.Module) -> None:
        weight = linear.get_parameter("weight")
        self.deltas[name].add_to(weight.data[: self.pairs[name].shape[0]])
        weight.requires_grad_()

    def _collect(self, name: str, linear: nn.Module) -> None:
        """The weight itself goes: its gradient was the last that was wanted of it."""
        gradient = linear.get_parameter("weight").grad
        linear.register_parameter("weight", None)
        if gradient is not None:
            self.deltas[name].collect(gradient[: self.pairs[name].shape[0]])

    def _weight(self, name: str) -> Tensor | None:
        """What the model is built from: the base where a delta is added later, else with the delta that it keeps."""
        pair = self.pairs.get(name)
        if pair is None:
            return None
        weight, added = pair.base.read(pair.base_tensor.name), pair.added()
        if name not in self._training:
            weight = weight.float().add_(self.deltas[name].dense().to(weight.device))
        return weight if added is None else torch.cat([weight.float(), added.float()])

    def _reached(self, index: int) -> dict[str, str]:
        """By path in block `index`, the names of the linear layers that train."""
        groups = self.decoder.linears(self.decoder.load_block(index), index)
        reached = {
            linear.path: linear.name for group in groups for linear in group if linear.name in self.deltas
        }
        self._training |= set(reached.values())
        return reached

    def _base_block(self, index: int) -> nn.Module:
        resident = self._resident.get(index)
        if resident is None:
            resident = self.decoder.load_block(index)
            if index >= self._num_resident:
                return resident
            self._resident[index] = resident
        return copy.deepcopy(resident)

    def _fitting(self) -> int:
        """How many blocks stay in memory."""
        sizes = [self.decoder.block_bytes(index) for index in range(self.num_blocks)]
        part = HOST_BYTES if self.device.type == "cpu" else int(DEVICE_PART * free_bytes(self.device))
        return self.num_blocks if sum(sizes) <= part else part // max(sizes)
