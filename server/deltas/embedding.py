"""Embeddings: the base's rows through torch, then the one-bit rows of all deltas, and the rows that the base lacks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from server.deltas.batch import BatchContext, DeltaGroup
from server.deltas.resident import MatrixView, ResidentDelta
from server.deltas.stacked import HookPoint, plane_pointers
from server.kernels import add_onebit_rows


class EmbeddingDelta:
    """Adds deltas to the output of one embedding. Ids that the base lacks select rows that the variant added."""

    def __init__(self, module: nn.Embedding, name: str, context: BatchContext) -> None:
        self.weight = f"{name}.weight"
        self.num_rows = module.num_embeddings
        # Some embeddings (Gemma's) multiply the rows that they look up.
        scale = getattr(module, "embed_scale", None)
        self.scale = 1.0 if scale is None else float(torch.as_tensor(scale).to(module.weight.dtype))
        self.context = context
        self.hook_point = context.hook_points.add(
            HookPoint(lambda delta: delta.matrices.get(self.weight), self._needs_more_than_planes)
        )
        self._ids: Tensor | None = None
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.context.current is None:
            return None
        self._ids = args[0]
        return (self._ids.clamp(max=self.num_rows - 1), *args[1:])

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if (step := self.context.current) is None or self._ids is None:
            return output
        ids, base_ids, self._ids = self._ids.flatten(), args[0].flatten(), None
        flat, beyond_first = output.flatten(0, -2), step.tables.beyond_first[self.hook_point]
        # All terms of a row are summed in float32 before it is rounded.
        wide = flat.float() if beyond_first else flat
        if self.hook_point in step.tables.with_planes:
            plane_ptrs = step.tables.plane_ptrs[self.hook_point]
            add_onebit_rows(wide, base_ids, plane_ptrs, step.ranges, self.num_rows, self.scale)
        if beyond_first:
            for index in beyond_first:
                self._add_beyond_first(wide, ids, base_ids, step.groups[index])
            flat.copy_(wide)
        return output

    def _add_beyond_first(self, output: Tensor, ids: Tensor, base_ids: Tensor, group: DeltaGroup) -> None:
        """Add further planes, residual and added rows, or apply a tensor stored whole, in a group's rows.

        Args:
            output: ``[rows, features]`` float32, with the first planes' rows.
            ids: ``[rows]``.
            base_ids: ``[rows]``; ids that the base lacks are replaced by its last one.
            group: the group.
        """
        rows = group.rows
        if (matrix := group.delta.matrices.get(self.weight)) is None:
            output[rows] = group.delta.whole[self.weight][ids[rows]].float() * self.scale
            return
        self._add_further_planes(output, base_ids, matrix, rows)
        if matrix.added is not None:
            is_added = ids[rows] >= self.num_rows
            added = matrix.added[(ids[rows] - self.num_rows).clamp(min=0)].float() * self.scale
            output[rows] = torch.where(is_added[:, None], added, output[rows])

    def _add_further_planes(self, output: Tensor, base_ids: Tensor, matrix: MatrixView, rows: slice) -> None:
        if others := matrix.planes[1:]:
            ranges = torch.tensor([[rows.start, rows.stop]], dtype=torch.int32, device=base_ids.device)
            for plane in others:
                plane_ptrs = torch.tensor([plane_pointers(plane)], device=base_ids.device)
                add_onebit_rows(output, base_ids, plane_ptrs, ranges, self.num_rows, self.scale)
        if matrix.left is not None and matrix.right is not None:
            residual = matrix.left[base_ids[rows]].float() @ matrix.right.float()
            output[rows] += residual * self.scale

    def _needs_more_than_planes(self, delta: ResidentDelta) -> bool:
        matrix = delta.matrices.get(self.weight)
        return self.weight in delta.whole or (matrix is not None and matrix.added is not None)
