"""Embeddings: the base's rows by the library, then each delta's one-bit rows, and the rows that only a variant has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from server.deltas.batch import BatchContext, Group, add_rows
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
        rows = onebit_rows(known, matrix.signs, matrix.factor_out, matrix.factor_in, self.width)
        add_rows(output, group.rows, rows * self.factor)
        if matrix.added is not None and bool((own := ids >= self.num_rows).any()):
            changed = output[group.rows]
            changed[own] = (matrix.added[ids[own] - self.num_rows].float() * self.factor).to(output.dtype)
