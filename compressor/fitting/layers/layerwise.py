"""Coding layer by layer: each matrix is fitted to what the layers before it, coded already, will really feed it.

The student is the fine-tune with its coded matrices in place of its own (paper, section 2: X from the compressed stack
so far, Y from the fine-tune). One block is in memory at a time, and what its layers read. Embeddings, and matrices that
no forward reaches with every token (experts), are coded from weights alone. How one matrix is found is a solver's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from compressor.blockwise.decoder import BlockLinear, Decoder
from compressor.blockwise.weights import Overlay, Weights
from compressor.codec import Method, code_matrix
from compressor.fitting.weights import weight_with_delta
from compressor.io.pairs import TensorPair
from deltastore.format.matrix import MatrixDelta
from deltastore.format.onebit import OneBit


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a linear layer stands in the student, and what enters its block."""

    decoder: Decoder
    index: int
    block: nn.Module
    path: str  # of the layer in the block
    hiddens: Sequence[Tensor]  # [sequences, tokens, hidden] each, one per batch


class Solver(Protocol):
    """Finds deltas of linear layers that read the same."""

    def gather(self, teacher: Iterable[Tensor], student: Iterable[Tensor]) -> Any:
        """What `solve` needs of inputs ``[tokens, in]``, batch by batch: the fine-tune's, and the student's."""

    def solve(self, pair: TensorPair, gathered: Any, place: Place | None) -> OneBit:
        """The delta of one matrix; it has no place in a block if it is the head's."""

    def upgrades(self, pair: TensorPair, gathered: Any, coded: OneBit) -> list[MatrixDelta]:
        """What more bytes could make of a delta that `solve` gave."""


@dataclass(slots=True)
class Layerwise:
    """The coded matrices so far, by name, and the student that they make of the fine-tune."""

    pairs: Mapping[str, TensorPair]  # the matrices to code
    finetune: Weights
    method: Method  # of those that are coded from weights alone
    device: torch.device
    fitted: dict[str, list[MatrixDelta]] = field(default_factory=dict)  # each with its upgrades behind it
    _unfitted: dict[str, OneBit] = field(default_factory=dict)

    def run(
        self,
        batches: Sequence[Tensor],
        solver: Solver,
        first: int = 0,
        on_block: Callable[[int, Mapping[str, list[MatrixDelta]]], object] = lambda index, fitted: None,
    ) -> None:
        """Fit every matrix that calibration reaches; `batches` are ids ``[sequences, tokens]``.

        Args:
            first: the block to begin with; `fitted` holds the matrices of those before.
            on_block: given the matrices of each block when they are fitted.
        """
        teacher = Decoder(self.finetune, self.device, torch.float32)
        student = Decoder(Overlay(self.finetune, self.replacement), self.device, torch.float32)
        hiddens_t, hiddens = teacher.embed(batches), student.embed(batches)
        for index in range(teacher.num_blocks):
            block = student.load_block(index)
            groups = self._groups(student, block, index) if index >= first else []
            read = teacher.advance_and_record(
                teacher.load_block(index), index, [group[0].path for group in groups], hiddens_t
            )
            for group in groups:
                path = group[0].path
                inputs = (student.input_of(block, index, path, hidden) for hidden in hiddens)
                gathered = solver.gather(read.pop(path), inputs)
                for linear in group:
                    self._fit(
                        linear.name, solver, gathered, Place(student, index, block, linear.path, hiddens)
                    )
            student.advance(block, index, hiddens)
            if index >= first:
                on_block(
                    index, {linear.name: self.fitted[linear.name] for group in groups for linear in group}
                )
        head = self.pairs.get(teacher.head_name or "")
        if head is not None and head.name != teacher.embedding_name:
            teacher.finish_all(hiddens_t)
            student.finish_all(hiddens)
            gathered = solver.gather(_rows(hiddens_t, self.device), _rows(hiddens, self.device))
            self._fit(head.name, solver, gathered, None)

    def replacement(self, name: str) -> Tensor | None:
        """What the student has instead of one of the fine-tune's tensors, in its shape; None where it has the same."""
        pair = self.pairs.get(name)
        return None if pair is None else weight_with_delta(pair, self.delta(name))

    def delta(self, name: str) -> OneBit:
        """Of one matrix; from weights alone where nothing was fitted."""
        if name in self.fitted:
            return self.fitted[name][0].planes[0]
        if name not in self._unfitted:
            self._unfitted[name] = code_matrix(self.pairs[name], self.method).delta
        return self._unfitted[name]

    def _groups(self, student: Decoder, block: nn.Module, index: int) -> list[list[BlockLinear]]:
        """The linear layers to fit, in the order in which inputs reach them, those together that read the same."""
        groups = (
            [linear for linear in group if linear.name in self.pairs]
            for group in student.linears(block, index)
        )
        return [group for group in groups if group]

    def _fit(self, name: str, solver: Solver, gathered: Any, place: Place | None) -> None:
        """Code one matrix, and let the student have it."""
        pair = self.pairs[name]
        delta = solver.solve(pair, gathered, place)
        self.fitted[name] = [MatrixDelta((delta,)), *solver.upgrades(pair, gathered, delta)]
        if place is not None:
            weight = place.block.get_submodule(place.path).weight
            assert isinstance(weight, Tensor)
            weight.data.copy_(weight_with_delta(pair, delta))


def _rows(hiddens: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    for hidden in hiddens:
        yield hidden.to(device).flatten(0, -2)
