"""Fit linear layers in forward order, each to inputs computed with the coded layers before it.

The loop of the paper's Algorithm 1. Teacher and student run one block at a time, and a recipe's `LayerStage` finds each
matrix. The student is the fine-tune with its coded matrices in place of its own (paper, section 2: X from the
compressed stack so far, Y from the fine-tune), so tensors that are not coded, such as norms, are the fine-tune's
throughout. Embeddings, and matrices that no forward reaches with every token (experts), are coded from weights alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compressor.codec import code_matrix
from compressor.config import Method
from compressor.decoder.decoder import BlockLinear, Decoder
from compressor.decoder.weights import Overlay, Weights, weight_with_delta
from compressor.pairs import TensorPair
from compressor.resume import FittedMatrix
from deltastore.format.matrix import MatrixDelta


@dataclass(frozen=True, slots=True, eq=False)
class StudentBlock:
    """The student's block that is being fitted, and its inputs."""

    decoder: Decoder
    index: int
    block: nn.Module
    hiddens: Sequence[Tensor]  # [sequences, tokens, hidden] each, one per batch

    def inputs(self, path: str) -> Iterator[Tensor]:
        """Yield the inputs ``[tokens, in]`` of the block's linear layer at `path`, batch by batch."""
        return (self.decoder.input_of(self.block, self.index, path, hidden) for hidden in self.hiddens)


@dataclass(frozen=True, slots=True, eq=False)
class LayerStage:
    """How a recipe fits linear layers, and the text that it fits them to."""

    batches: Sequence[Tensor]  # [sequences, tokens] int64 ids each
    # Summarizes the inputs ``[tokens, in]`` of teacher and student, batch by batch, for all matrices that read them.
    gather: Callable[[Iterable[Tensor], Iterable[Tensor]], Any]
    # Finds the delta of one matrix, and its upgrades, from that summary; the output head is in no block.
    solve: Callable[[TensorPair, Any, StudentBlock | None], FittedMatrix]


@dataclass(slots=True)
class Layerwise:
    """The coded matrices so far, by name, and the student that they make of the fine-tune."""

    pairs: Mapping[str, TensorPair]  # the matrices to code
    finetune: Weights
    rest: Weights  # what the student has beside the matrices to code: the fine-tune, with experts as they are coded
    method: Method  # of those that are coded from weights alone
    device: torch.device
    fitted: dict[str, FittedMatrix] = field(default_factory=dict)
    _unfitted: dict[str, MatrixDelta] = field(default_factory=dict)

    def run(
        self,
        stage: LayerStage,
        first: int = 0,
        on_block: Callable[[int, Mapping[str, FittedMatrix]], object] = lambda index, fitted: None,
    ) -> None:
        """Fit every matrix that calibration reaches: Algorithm 1, stages 1 and 2, for one group of matrices at a time.

        Args:
            first: the block to begin with; `fitted` holds the matrices of those before.
            on_block: given the matrices of each block when they are fitted.
        """
        teacher = Decoder(self.finetune, self.device, torch.float32)
        student = Decoder(Overlay(self.rest, self.replacement), self.device, torch.float32)
        teacher_hiddens, hiddens = teacher.embed(stage.batches), student.embed(stage.batches)
        for index in range(teacher.num_blocks):
            block = StudentBlock(student, index, student.load_block(index), hiddens)
            groups = self._groups(block) if index >= first else []
            paths = [group[0].path for group in groups]
            teacher_inputs = teacher.advance_and_record(
                teacher.load_block(index), index, paths, teacher_hiddens
            )
            for group in groups:
                self._fit_group(group, stage, teacher_inputs.pop(group[0].path), block)
            student.advance(block.block, index, hiddens)
            if index >= first:
                names = [linear.name for group in groups for linear in group]
                on_block(index, {name: self.fitted[name] for name in names})
        head = self.pairs.get(teacher.head_name or "")
        if head is not None and head.name != teacher.embedding_name:
            teacher.finish_all(teacher_hiddens)
            student.finish_all(hiddens)
            gathered = stage.gather(_rows(teacher_hiddens, self.device), _rows(hiddens, self.device))
            self.fitted[head.name] = stage.solve(head, gathered, None)

    def replacement(self, name: str) -> Tensor | None:
        """Return the student's tensor of this name in the fine-tune's shape; None where it is the fine-tune's own."""
        pair = self.pairs.get(name)
        return None if pair is None else weight_with_delta(pair, self.delta(name))

    def delta(self, name: str) -> MatrixDelta:
        """Return the delta of one matrix; from weights alone where nothing was fitted."""
        if name in self.fitted:
            return self.fitted[name].delta
        if name not in self._unfitted:
            self._unfitted[name] = MatrixDelta((code_matrix(self.pairs[name], self.method).delta,))
        return self._unfitted[name]

    def _groups(self, block: StudentBlock) -> list[list[BlockLinear]]:
        """Linear layers to fit, in the order in which inputs reach them, grouped by common inputs."""
        groups = (
            [linear for linear in group if linear.name in self.pairs]
            for group in block.decoder.linears(block.block, block.index)
        )
        return [group for group in groups if group]

    def _fit_group(
        self,
        group: Sequence[BlockLinear],
        stage: LayerStage,
        teacher_inputs: Sequence[Tensor],
        block: StudentBlock,
    ) -> None:
        """Code linear layers with common inputs and give the student their new weights."""
        # Stage 1, Algorithm 3.
        gathered = stage.gather(teacher_inputs, block.inputs(group[0].path))
        for linear in group:
            pair = self.pairs[linear.name]
            # Stage 2, Algorithm 6.
            fitted = self.fitted[linear.name] = stage.solve(pair, gathered, block)
            # ReplaceLayer.
            weight = block.block.get_submodule(linear.path).get_parameter("weight")
            weight.data.copy_(weight_with_delta(pair, fitted.delta))


def _rows(hiddens: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:  # [tokens, hidden] each
    for hidden in hiddens:
        yield hidden.to(device).flatten(0, -2)
