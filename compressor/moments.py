"""What a solver is told of a linear layer's inputs: products over all calibration tokens, or the inputs themselves.

Knows two decoders that stand before the same block, the student with its delta so far and the teacher with the
fine-tune's own weights; nothing of how a delta is found from their inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compressor.decoder import BlockLinear, Decoder


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """One block of one model, and the hidden states that enter it."""

    decoder: Decoder
    index: int
    block: nn.Module
    hiddens: Sequence[Tensor]  # [sequences, tokens, hidden] each, one per batch

    def inputs(self, path: str) -> Iterator[Tensor]:  # [tokens, in] each, on the decoder's device
        """What the linear layer at `path` reads, batch by batch; runs the block as far as that layer."""
        for hidden in self.hiddens:
            yield self.decoder.input_of(self.block, self.index, path, hidden)


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Sums over tokens of products of inputs: X of the student, X_t of the teacher at the same place.

    In place of C = X_t'X stands C - H, which is small where the models agree and so loses nothing to rounding.
    """

    gram: Tensor  # [in, in]: H = X'X
    drift: Tensor  # [in, in]: C - H = (X_t - X)'X
    count: int  # tokens

    def cross(self, delta: Tensor, finetune: Tensor) -> Tensor:  # [out, in] float32
        """G = R'X of the residual targets R = X_t W_f' - X W_b', from W_f - W_b and W_f, both ``[out, in]``."""
        return delta.float() @ self.gram.float() + finetune.float() @ self.drift.float()


@dataclass(frozen=True, slots=True, eq=False)
class Cache:
    """Inputs and targets of linear layers that read the same: the paper's (X, Y), one row per token."""

    inputs: Tensor  # [tokens, in], the student's X
    outputs: Mapping[str, Tensor]  # by weight, [tokens, out]: the teacher's Y = X_t W', without bias


def block_moments(
    linear: BlockLinear, teacher: Stage, student: Stage, dtype: torch.dtype = torch.float64
) -> Moments:
    """The moments of a linear layer, and so of every layer in its group. Both stages hold the same tokens."""
    return moments(teacher.inputs(linear.path), student.inputs(linear.path), dtype)


def head_moments(
    teacher: Sequence[Tensor],
    student: Sequence[Tensor],
    device: torch.device,
    dtype: torch.dtype = torch.float64,
) -> Moments:
    """The moments of the output head, from the last hidden states of both models, batch by batch."""
    return moments(_rows(teacher, device), _rows(student, device), dtype)


def moments(teacher: Iterable[Tensor], student: Iterable[Tensor], dtype: torch.dtype) -> Moments:
    """Sum up inputs ``[tokens, in]`` of both models, batch by batch, where they are.

    Each batch's product is one of float32; the sums are kept in `dtype`, float64 unless memory forbids it.
    """
    gram = drift = torch.zeros(())
    count = 0
    for inputs_t, inputs in zip(teacher, student, strict=True):
        assert inputs_t.shape == inputs.shape
        if not count:
            gram, drift = (inputs.new_zeros(inputs.shape[1], inputs.shape[1], dtype=dtype) for _ in range(2))
        own = inputs.float()
        gram += own.T @ own
        drift += (inputs_t.float() - own).T @ own
        count += inputs.shape[0]
    assert count
    return Moments(gram, drift, count)


def block_cache(
    group: Sequence[BlockLinear], teacher: Stage, student: Stage, dtype: torch.dtype = torch.bfloat16
) -> Cache:
    """What the layers of a group read and should give, on the CPU in `dtype`. It grows with the tokens."""
    path = group[0].path
    inputs = torch.cat([batch.to("cpu", dtype) for batch in student.inputs(path)])
    outputs: dict[str, list[Tensor]] = {linear.name: [] for linear in group}
    for batch in teacher.inputs(path):
        for linear in group:
            weight = teacher.block.get_submodule(linear.path).weight
            assert isinstance(weight, Tensor)
            outputs[linear.name].append((batch @ weight.T).to("cpu", dtype))
    return Cache(inputs, {name: torch.cat(parts) for name, parts in outputs.items()})


def token_counts(batches: Iterable[Tensor], num_embeddings: int) -> Tensor:  # [num_embeddings] int64
    """How often each id occurs: the moments of an embedding, whose inputs are one-hot."""
    counts = torch.zeros(num_embeddings, dtype=torch.int64)
    for ids in batches:
        counts += torch.bincount(ids.flatten(), minlength=num_embeddings)
    return counts


def _rows(hiddens: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    for hidden in hiddens:
        yield hidden.to(device).flatten(0, -2)
