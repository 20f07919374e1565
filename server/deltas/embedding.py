"""Embeddings: the base's rows by the library, then all deltas' one-bit rows, and the rows that only a variant has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from server.deltas.batch import BatchContext, Group
from server.deltas.composition import HookPoint, address
from server.deltas.resident import MatrixView
from server.kernels import add_onebit_rows


class EmbeddingDelta:
    """Adds deltas to the output of one embedding. Ids beyond the base's rows are looked up among the variant's own."""

    def __init__(self, module: nn.Embedding, name: str, context: BatchContext) -> None:
        self.weight = f"{name}.weight"
        self.num_rows = module.num_embeddings
        scale = getattr(module, "embed_scale", None)  # some embeddings scale what they look up
        self.factor = 1.0 if scale is None else float(torch.as_tensor(scale).to(module.weight.dtype))
        self.context = context
        self.site = context.sites.add(
            HookPoint(
                lambda delta: delta.matrices.get(self.weight),
                lambda delta: (
                    self.weight in delta.whole
                    or ((matrix := delta.matrices.get(self.weight)) is not None and matrix.added is not None)
                ),
            )
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
        ids, known, self._ids = self._ids.flatten(), args[0].flatten(), None
        flat, special = output.flatten(0, -2), step.composition.special[self.site]
        wide = flat.float() if special else flat  # all that a row is given is summed before it is rounded
        if self.site in step.composition.changed:
            places = step.composition.places[self.site]
            add_onebit_rows(wide, known, places, step.ranges, self.num_rows, self.factor)
        if special:
            for number in special:
                self._apply(wide, ids, known, step.groups[number])
            flat.copy_(wide)
        return output

    def _apply(self, output: Tensor, ids: Tensor, known: Tensor, group: Group) -> None:
        """Give a group's rows of float32 `output` what its delta has beyond a first plane."""
        rows = group.rows
        if (matrix := group.delta.matrices.get(self.weight)) is None:
            output[rows] = group.delta.whole[self.weight][ids[rows]].float() * self.factor
            return
        self._add_beyond_first(output, known, matrix, rows)
        if matrix.added is not None:
            own = ids[rows] >= self.num_rows
            added = matrix.added[(ids[rows] - self.num_rows).clamp(min=0)].float() * self.factor
            output[rows] = torch.where(own[:, None], added, output[rows])

    def _add_beyond_first(self, output: Tensor, known: Tensor, matrix: MatrixView, rows: slice) -> None:
        if others := matrix.planes[1:]:
            ranges = torch.tensor([[rows.start, rows.stop]], dtype=torch.int32, device=known.device)
            for plane in others:
                places = torch.tensor([address(plane)], device=known.device)
                add_onebit_rows(output, known, places, ranges, self.num_rows, self.factor)
        if matrix.left is not None and matrix.right is not None:
            residual = matrix.left[known[rows]].float() @ matrix.right.float()
            output[rows] += residual * self.factor
