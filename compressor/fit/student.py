"""The student: the fine-tune with trainable deltas of the base in place of its matrices, one block at a time.

Places each matrix in the model and passes its gradients on to its delta; independent of losses and of the number of
steps. A block is made of the base's weights on request, its deltas are added in place, and the caller drops it. The
base's weights of small models and of those that fit a GPU stay, others are read again. They lie in the page cache, so
a second reading costs little beside the computation.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compressor.decoder.decoder import Decoder
from compressor.decoder.sampling import free_bytes
from compressor.decoder.weights import Overlay, Weights, weight_with_delta
from compressor.fit.trainable import Trainable
from compressor.pairs import TensorPair
from deltastore.format.matrix import MatrixDelta

HOST_BYTES = 256 << 20  # of blocks that stay in host memory
DEVICE_PART = 0.25  # of the free memory of a GPU, for blocks that stay there


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedBatch:
    """A batch at the first block, and the rows of the embedding that made it."""

    hidden: Tensor  # [sequences, tokens, hidden]
    ids: Tensor  # [used] int64, ascending
    rows: Tensor  # [used, hidden]; a leaf where the embedding trains


class Student:
    """A model to run forward block by block, and backward through `accumulate_..._grad` into the deltas that train."""

    def __init__(
        self,
        finetune: Weights,
        pairs: Mapping[str, TensorPair],
        deltas: Mapping[str, Trainable],
        device: torch.device,
    ) -> None:
        """Find the matrices that train. A matrix that no forward reads as it is stored (experts) keeps its delta.

        Args:
            pairs: by name, the matrices that are coded.
            deltas: by name, the delta of each of them.

        Raises:
            CheckpointError: a model that cannot be run block by block.
        """
        self.pairs, self.deltas, self.device = pairs, dict(deltas), device
        self._training: set[str] = set()
        self.decoder = Decoder(Overlay(finetune, self._weight), device, torch.float32)
        self._paths = [self._trained_linears(index) for index in range(self.decoder.num_blocks)]
        self._training |= {str(self.decoder.embedding_name), str(self.decoder.head_name)} & deltas.keys()
        self._table = self.decoder.weights.read(str(self.decoder.embedding_name))
        self._num_resident = self._count_resident()
        self._resident: dict[int, nn.Module] = {}

    @property
    def num_blocks(self) -> int:
        return self.decoder.num_blocks

    @property
    def trained(self) -> Mapping[str, Trainable]:
        """Deltas that gradients reach, by name."""
        return {name: delta for name, delta in self.deltas.items() if name in self._training}

    def stored(self) -> dict[str, MatrixDelta]:
        """Return every delta in its present state, in its stored form."""
        return {name: delta.stored() for name, delta in self.deltas.items()}

    def names(self, index: int) -> Collection[str]:
        """Return the names of the matrices of block `index` that train."""
        return self._paths[index].values()

    @contextmanager
    def replaced(self, name: str, delta: MatrixDelta) -> Iterator[None]:
        """Use another delta for one matrix within the `with` block."""
        own, self.deltas[name] = self.deltas[name], Trainable.of(delta, self.device, relative=True)
        try:
            yield
        finally:
            self.deltas[name] = own

    def unfreeze_signs(self) -> None:
        """Let the signs of every trained delta move."""
        for name, delta in self.trained.items():
            pair = self.pairs[name]
            delta.unfreeze_signs(pair.row_block(slice(0, pair.shape[0])).to(self.device))

    def restore_signs(self, values: Mapping[str, Sequence[Tensor]]) -> None:
        """Continue from stored latents, by name: one per plane, which are taken over."""
        for name, own in values.items():
            for plane, latents in zip(self.deltas[name].planes, own, strict=True):
                plane.restore_signs(latents)

    def enter(self, ids: Tensor) -> EmbeddedBatch:
        """Embed ids ``[sequences, tokens]`` for the first block."""
        used, row_index = torch.unique(ids, return_inverse=True)
        rows, name = self._table[used].to(self.device, torch.float32), self.decoder.embedding_name
        if name in self._training:
            in_base = self._ids_in_base(used)
            rows[: len(in_base)] += self.deltas[name].dense(in_base)
            rows.requires_grad_()
        return EmbeddedBatch(self.decoder.enter(rows, row_index.to(self.device)), used, rows)

    def block(self, index: int) -> nn.Module:
        """Return a block with its deltas added, in its own memory; weights that train require gradients."""
        block = self._base_block(index)
        for path, name in self._paths[index].items():
            self._add_delta(name, block.get_submodule(path))
        return block

    def head(self) -> nn.Linear:
        """Return the output head with its delta added, in its own memory."""
        head = self.decoder.load_head()
        if self.decoder.head_name in self._training:
            self._add_delta(str(self.decoder.head_name), head)
        return head

    def accumulate_embedding_grad(self, embedded: EmbeddedBatch) -> Iterator[str]:
        """Pass on the gradient of the embedding's rows, if they have one; then yield its name."""
        name = self.decoder.embedding_name
        if name in self._training and embedded.rows.grad is not None:
            in_base = self._ids_in_base(embedded.ids)
            self.deltas[name].accumulate_grad(embedded.rows.grad[: len(in_base)], in_base)
            yield name

    def accumulate_block_grads(self, index: int, block: nn.Module) -> Iterator[str]:
        """Pass on the gradients of a block's weights one at a time; yield the name of each."""
        for path, name in self._paths[index].items():
            self._accumulate_grad(name, block.get_submodule(path))
            yield name

    def accumulate_head_grad(self, head: nn.Module) -> Iterator[str]:
        """Pass on the gradient of the head's weight; then yield its name, unless a tied embedding has more to come."""
        name = self.decoder.head_name
        if name in self._training:
            self._accumulate_grad(name, head)
            if name != self.decoder.embedding_name:
                yield name

    def _ids_in_base(self, ids: Tensor) -> Tensor:
        """Return those of ascending ids whose rows the base has."""
        return ids[ids < self.pairs[str(self.decoder.embedding_name)].shape[0]]

    def _add_delta(self, name: str, linear: nn.Module) -> None:
        weight = linear.get_parameter("weight")
        self.deltas[name].add_to(weight.data[: self.pairs[name].shape[0]])
        weight.requires_grad_()

    def _accumulate_grad(self, name: str, linear: nn.Module) -> None:
        """Pass on the weight's gradient and drop the weight, which nothing reads any more."""
        gradient = linear.get_parameter("weight").grad
        linear.register_parameter("weight", None)
        if gradient is not None:
            self.deltas[name].accumulate_grad(gradient[: self.pairs[name].shape[0]])

    def _weight(self, name: str) -> Tensor | None:
        """The weight that the decoder is built from: the base's where a delta is added later, else with its delta."""
        pair = self.pairs.get(name)
        if pair is None:
            return None
        return weight_with_delta(pair, None if name in self._training else self.deltas[name])

    def _trained_linears(self, index: int) -> dict[str, str]:
        """By path in block `index`, the names of the linear layers that train."""
        groups = self.decoder.linears(self.decoder.load_block(index), index)
        trained = {
            linear.path: linear.name for group in groups for linear in group if linear.name in self.deltas
        }
        self._training |= set(trained.values())
        return trained

    def _base_block(self, index: int) -> nn.Module:
        resident = self._resident.get(index)
        if resident is None:
            resident = self.decoder.load_block(index)
            if index >= self._num_resident:
                return resident
            self._resident[index] = resident
        return copy.deepcopy(resident)

    def _count_resident(self) -> int:
        """Return how many blocks stay in memory."""
        sizes = [self.decoder.block_bytes(index) for index in range(self.num_blocks)]
        part = HOST_BYTES if self.device.type == "cpu" else int(DEVICE_PART * free_bytes(self.device))
        return self.num_blocks if sum(sizes) <= part else part // max(sizes)
