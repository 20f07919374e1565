"""The student's weight of one matrix: the base's, a delta, and the rows that only the fine-tune has.

Works on one pair of tensors; independent of models and of how deltas are found.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from compressor.io.pairs import TensorPair
from compressor.io.row_blocks import row_blocks

BLOCK_NUMEL = 1 << 22  # weights of a matrix that are added up at a time


class DenseDelta(Protocol):
    """A stored delta, or one in training."""

    def dense(self, rows: slice, /) -> Tensor:  # [rows, in] float32
        ...


def weight_with_delta(pair: TensorPair, delta: DenseDelta | None) -> Tensor:  # in the fine-tune's shape
    """Return the base's weights plus `delta` in float32, followed by the rows that only the fine-tune has.

    Without a delta and such rows, these are the base's weights in their own dtype.
    """
    if delta is None and not pair.added_rows:
        return pair.base.read(pair.base_tensor.name)
    weight = torch.empty(pair.tensor.shape)
    for rows in row_blocks(pair.shape, BLOCK_NUMEL):
        base = pair.base.read(pair.base_tensor.name, rows).float()
        if delta is None:
            weight[rows] = base
        else:
            torch.add(base, delta.dense(rows).to(base.device), out=weight[rows])
    if (added := pair.added()) is not None:
        weight[pair.shape[0] :] = added
    return weight
