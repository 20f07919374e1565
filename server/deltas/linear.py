"""Linear layers: the base product through torch, then the one-bit products of all deltas of the batch in one call.

A forward hook makes a layer delta-aware: the base's weights are never written, and the model keeps the modules and
parameter names of transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from server.deltas.batch import BatchContext, DeltaGroup, StepDeltas
from server.deltas.resident import MatrixView, ResidentDelta
from server.deltas.stacked import HookPoint, plane_pointers
from server.kernels import add_onebit_matmul


class LinearDelta:
    """Adds deltas to the output of one `nn.Linear`."""

    def __init__(self, module: nn.Linear, name: str, context: BatchContext) -> None:
        self.weight, self.bias = f"{name}.weight", f"{name}.bias"
        self.base_bias = None if module.bias is None else module.bias.detach().float()
        self.context = context
        self.hook_point = context.hook_points.add(
            HookPoint(lambda delta: delta.matrices.get(self.weight), lambda delta: self.weight in delta.whole)
        )
        module.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if (step := self.context.current) is None:
            return output
        x, flat = args[0].flatten(0, -2), output.flatten(0, -2)
        beyond_first = step.tables.beyond_first[self.hook_point]
        bias = None if self.base_bias is None else step.by_row(self.bias, self.base_bias)
        if beyond_first or bias is not self.base_bias:
            # All terms of a row are summed in float32 before it is rounded.
            wide = flat.float()
            if bias is not None and bias is not self.base_bias:
                wide += bias - self.base_bias
            self._add(step, wide, x)
            for index in beyond_first:
                self._add_beyond_first(wide, x, bias, step.groups[index])
            flat.copy_(wide)
        else:
            self._add(step, flat, x)
        return output

    def _add(self, step: StepDeltas, output: Tensor, x: Tensor) -> None:
        if self.hook_point in step.tables.with_planes:
            add_onebit_matmul(output, x, step.tables.plane_ptrs[self.hook_point], step.ranges)

    def _add_beyond_first(self, output: Tensor, x: Tensor, bias: Tensor | None, group: DeltaGroup) -> None:
        """Add further planes and residual, or apply a tensor stored whole, in a group's rows.

        Args:
            output: ``[rows, out]`` float32, with the base's and the first planes' products.
            x: ``[rows, in]``.
            bias: ``[out]`` or ``[rows, out]`` float32.
            group: the group.
        """
        rows = group.rows
        if (matrix := group.delta.matrices.get(self.weight)) is not None:
            add_further_planes(output, x, matrix, rows)
            return
        output[rows] = x[rows].float() @ group.delta.whole[self.weight].float().T
        if bias is not None:
            output[rows] += bias if bias.dim() == 1 else bias[rows]


class HeadDelta:
    """Adds deltas to the logits, and widens them if a variant has more tokens than the base.

    The head sees only the rows whose logits are computed. A token that a row's variant lacks has a logit of minus
    infinity. If a variant ties its head to its embedding, the embedding's delta applies to the head.
    """

    def __init__(self, module: nn.Linear, name: str, embedding: str, context: BatchContext) -> None:
        self.bias, self.embedding = f"{name}.bias", f"{embedding}.weight"
        self.base_bias = module.bias
        self.context = context
        self.hook_point = context.hook_points.add(
            HookPoint(lambda delta: delta.matrices.get(self._source(delta)), self._needs_more_than_planes)
        )
        module.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if (step := self.context.current) is None:
            return output
        x, num_base = args[0].flatten(0, -2), output.shape[-1]
        beyond_first = [step.groups[index] for index in step.tables.beyond_first[self.hook_point]]
        beyond_first = [group for group in beyond_first if group.logit_rows.start < group.logit_rows.stop]
        width = max((group.delta.num_rows(self._source(group.delta)) for group in beyond_first), default=0)
        if width > num_base:
            logits = output.new_full((*output.shape[:-1], width), -torch.inf)
            logits[..., :num_base] = output
        else:
            logits = output
        flat = logits.flatten(0, -2)
        base_logits = flat[:, :num_base].float() if beyond_first else flat[:, :num_base]
        if self.hook_point in step.tables.with_planes:
            add_onebit_matmul(base_logits, x, step.tables.plane_ptrs[self.hook_point], step.logit_ranges)
        if beyond_first:
            for group in beyond_first:
                self._add_beyond_first(base_logits, flat, x, group)
            flat[:, :num_base] = base_logits.to(flat.dtype)
        return logits

    def _add_beyond_first(self, base_logits: Tensor, logits: Tensor, x: Tensor, group: DeltaGroup) -> None:
        """Add further planes, residual, added rows and bias, or apply a tensor stored whole, in a group's rows.

        Args:
            base_logits: ``[rows, base tokens]`` float32, with the base's logits and the first planes' products.
            logits: ``[rows, tokens]`` in the model's dtype; columns of tokens that the base lacks are written.
            x: ``[rows, in]``.
            group: the group.
        """
        delta, rows, num_base = group.delta, group.logit_rows, base_logits.shape[1]
        name = self._source(delta)
        own = x[rows]
        if (matrix := delta.matrices.get(name)) is not None:
            add_further_planes(base_logits, x, matrix, rows)
            if matrix.added is not None:
                logits[rows, num_base : matrix.num_rows] = own @ matrix.added.to(x.dtype).T
        elif (whole := delta.whole.get(name)) is not None:
            product = own @ whole.to(x.dtype).T
            base_logits[rows] = product[:, :num_base].float()
            if self.base_bias is not None:
                base_logits[rows] += self.base_bias.float()
            logits[rows, num_base : len(whole)] = product[:, num_base:]
        if (bias := delta.whole.get(self.bias)) is not None:
            base_logits[rows] += bias[:num_base].float() - self.base_bias.float()

    def _source(self, delta: ResidentDelta) -> str:
        """Return the name of the tensor that holds a variant's head: its own, or the embedding that it is tied to."""
        return self.embedding if delta.tied else delta.head

    def _needs_more_than_planes(self, delta: ResidentDelta) -> bool:
        name = self._source(delta)
        matrix = delta.matrices.get(name)
        return (
            name in delta.whole
            or self.bias in delta.whole
            or (matrix is not None and matrix.added is not None)
        )


def add_further_planes(output: Tensor, x: Tensor, matrix: MatrixView, rows: slice) -> None:
    """Add the products of a matrix's further planes and its residual to some rows of float32 `output`, [rows, out].

    The residual is applied as two factors and never expanded to a matrix.
    """
    if others := matrix.planes[1:]:
        ranges = torch.tensor([[rows.start, rows.stop]], dtype=torch.int32, device=x.device)
        for plane in others:
            add_onebit_matmul(output, x, torch.tensor([plane_pointers(plane)], device=x.device), ranges)
    if matrix.left is not None and matrix.right is not None:
        output[rows] += x[rows].float() @ matrix.right.float().T @ matrix.left.float().T
