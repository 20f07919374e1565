"""Embeddings: the base's rows by the library, then each delta's one-bit rows, and the rows that only a variant has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from server.deltas.batch import BatchContext, Group, add_rows
from server.deltas.resident import MatrixView
from server.kernels import onebit_rows


class EmbeddingDelta:
    """Adds deltas to the output of one embedding. Ids beyond the base's rows are looked up among the variant's own."""

    def __init__(self, module: nn.Embedding, name: str, context: BatchContext) -> None:
        self.weight = f"{name}.weight"
        self.num_rows = module.num_embeddings
        self.width = module.embedding_dim
        scale = getattr(module, "embed_scale", None)  # some embeddings scale what they look up
        self.factor = 1.0 if scale is None else float(torch.as_tensor(scale).to(module.weight.dtype))
        self.context = context
        self._ids: Tensor | None = None
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not self.context.batch.groups:
            return None
        self._ids = args[0]
        return (self._ids.clamp(max=self.num_rows - 1), *args[1:])

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if self._ids is None:
            return output
        ids, flat, self._ids = self._ids.flatten(), output.flatten(0, -2), None
        for group in self.context.batch.groups:
            self._apply(flat, ids[group.rows], group)
        return output

    def _apply(self, output: Tensor, ids: Tensor, group: Group) -> None:
        if (whole := group.delta.whole.get(self.weight)) is not None:
            output[group.rows] = (whole[ids].float() * self.factor).to(output.dtype)
        if (matrix := group.delta.matrices.get(self.weight)) is None:
            return
        known = ids.clamp(max=self.num_rows - 1)
        add_rows(output, group.rows, _rows(known, matrix, self.width) * self.factor)
        if matrix.added is not None and bool((own := ids >= self.num_rows).any()):
            changed = output[group.rows]
            changed[own] = (matrix.added[ids[own] - self.num_rows].float() * self.factor).to(output.dtype)


def _rows(ids: Tensor, matrix: MatrixView, width: int) -> Tensor:
    """What a coded matrix adds to the base's rows `ids`, float32 [rows, width]."""
    first, *others = matrix.planes
    total = onebit_rows(ids, first.signs, first.factor_out, first.factor_in, width)
    for plane in others:
        total += onebit_rows(ids, plane.signs, plane.factor_out, plane.factor_in, width)
    if matrix.left is not None and matrix.right is not None:
        total += matrix.left[ids].float() @ matrix.right.float()
    return total
