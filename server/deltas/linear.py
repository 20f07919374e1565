"""Linear layers: the base product by the library, then each delta's one-bit products on its own rows.

A layer is made delta-aware by a forward hook, so the base's weights are read and never written, and the model keeps
the library's modules and names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from server.deltas.batch import BatchContext, Group, add_rows
from server.deltas.resident import MatrixView, ResidentDelta
from server.kernels import onebit_matmul


class LinearDelta:
    """Adds deltas to the output of one `nn.Linear`."""

    def __init__(self, module: nn.Linear, name: str, context: BatchContext) -> None:
        self.weight, self.bias = f"{name}.weight", f"{name}.bias"
        self.base_weight, self.base_bias = module.weight, module.bias
        self.context = context
        module.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        groups = self.context.batch.groups
        if groups:
            x, flat = args[0].flatten(0, -2), output.flatten(0, -2)
            for group in groups:
                if (delta := self._delta(group, x[group.rows])) is not None:
                    add_rows(flat, group.rows, delta)
        return output

    def _delta(self, group: Group, x: Tensor) -> Tensor | None:
        """What a group's delta adds, float32 [rows, out]; None where it leaves the layer unchanged."""
        delta, total = group.delta, None
        if (matrix := delta.matrices.get(self.weight)) is not None:
            total = _product(x, matrix)
        elif (whole := delta.whole.get(self.weight)) is not None:
            total = x.float() @ (whole.float() - self.base_weight.float()).T
        if (bias := delta.whole.get(self.bias)) is not None:
            shift = bias.float() - self.base_bias.float()
            total = shift if total is None else total + shift
        return total


class HeadDelta:
    """Adds deltas to the output head, on the kept rows alone, and widens the logits where a variant has more tokens.

    A token that a row's variant lacks has a logit of minus infinity. Where a variant ties its head to its embedding,
    the embedding's delta is the head's.
    """

    def __init__(self, module: nn.Linear, name: str, embedding: str, context: BatchContext) -> None:
        self.bias, self.embedding = f"{name}.bias", f"{embedding}.weight"
        self.base_bias = module.bias
        self.context = context
        module.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        groups = self.context.batch.kept
        if not groups:
            return output
        num_base = output.shape[-1]
        width = max(num_base, *(self._num_rows(group.delta) for group in groups))
        logits = output.new_full((*output.shape[:-1], width), -torch.inf)
        logits[..., :num_base] = output
        x, flat = args[0].flatten(0, -2), logits.flatten(0, -2)
        for group in groups:
            self._apply(flat[group.rows], x[group.rows], group.delta)
        return logits

    def _apply(self, logits: Tensor, x: Tensor, delta: ResidentDelta) -> None:
        """Make `logits` [rows, width], which hold the base's, the delta's own."""
        name, everything = self._source(delta), slice(None)
        if (matrix := delta.matrices.get(name)) is not None:
            num_base = matrix.num_base_rows
            add_rows(logits[:, :num_base], everything, _product(x, matrix))
            if matrix.added is not None:
                logits[:, num_base : matrix.num_rows] = x @ matrix.added.to(x.dtype).T
        elif (whole := delta.whole.get(name)) is not None:
            logits[:, : len(whole)] = x @ whole.to(x.dtype).T
            if self.base_bias is not None:
                logits[:, : len(self.base_bias)] += self.base_bias
        if (bias := delta.whole.get(self.bias)) is not None:
            add_rows(logits[:, : len(bias)], everything, bias.float() - self.base_bias.float())

    def _source(self, delta: ResidentDelta) -> str:
        """The tensor that holds the head of this variant: its own, or the embedding that it is tied to."""
        return self.embedding if delta.tied else delta.head

    def _num_rows(self, delta: ResidentDelta) -> int:
        return delta.num_rows(self._source(delta))


def _product(x: Tensor, matrix: MatrixView) -> Tensor:
    """What a coded matrix adds, float32 [rows, out]; the residual goes through its rank, never as a matrix."""
    first, *others = matrix.planes
    total = onebit_matmul(x, first.signs, first.factor_out, first.factor_in)
    for plane in others:
        total += onebit_matmul(x, plane.signs, plane.factor_out, plane.factor_in)
    if matrix.left is not None and matrix.right is not None:
        total += x.float() @ matrix.right.float().T @ matrix.left.float().T
    return total
