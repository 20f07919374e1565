"""Make every layer of a model delta-aware: hooks on linear layers, embeddings and norms.

Norms run transformers' own code, with the weight of each row's variant in place of the base's. RMSNorms, ``1 + w``
forms included, broadcast one weight vector per token. `nn.LayerNorm` does not and is replaced by its own formula.

The base's weights are never written, and the model keeps the modules and parameter names of transformers.

A checkpoint whose tensors are not the model's is refused before it is loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from deltastore.base import Base
from deltastore.checkpoint import Checkpoint
from deltastore.errors import CheckpointError, NotServable
from deltastore.format.layout import FLOATS
from deltastore.servable import is_norm, kind, no_head
from server.deltas.resident import (
    BatchContext,
    DeltaGroup,
    HookPoint,
    MatrixView,
    ResidentDelta,
    StepDeltas,
    plane_pointers,
)
from server.kernels import add_onebit_matmul, add_onebit_rows


class NormDelta:
    """Sets the weight (and bias) of one norm to those of each row's variant before it runs."""

    def __init__(self, module: nn.Module, name: str, context: BatchContext) -> None:
        self.context = context
        self.base: dict[str, Tensor] = {}
        self.names: dict[str, str] = {}
        # 1 for inputs [1, tokens, heads, features], 2 if heads come first.
        self._token_axis: int | None = None
        for parameter, value in list(module.named_parameters(recurse=False)):
            self.base[parameter] = value.detach()
            self.names[parameter] = f"{name}.{parameter}"
            # torch does not let a plain tensor replace a registered parameter.
            delattr(module, parameter)
            setattr(module, parameter, self.base[parameter])
        if isinstance(module, nn.LayerNorm):
            setattr(module, "forward", _LayerNorm(module))  # noqa: B010 - a method may not be assigned
        module.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        step = self.context.current
        for parameter, base in self.base.items():
            value = base
            if step is not None:
                value = self._by_token(step.by_row(self.names[parameter], base), args[0])
            if getattr(module, parameter) is not value:
                setattr(module, parameter, value)

    def _by_token(self, value: Tensor, x: Tensor) -> Tensor:
        """Reshape a weight [tokens, features] to broadcast over `x`.

        Args:
            value: ``[features]``, which is returned as it is, or ``[tokens, features]``.
            x: ``[1, tokens, features]``, ``[1, tokens, heads, features]`` or ``[1, heads, tokens, features]``.
        """
        if value.dim() == 1:
            return value
        if x.dim() == 3:
            return value[None]
        # Set by the start-up probe, whose 13 tokens match no model's number of heads.
        if self._token_axis is None and x.shape[1] != x.shape[2]:
            self._token_axis = 1 if x.shape[1] == len(value) else 2
        return value[None, None] if self._token_axis == 2 else value[None, :, None]


class _LayerNorm:
    """`nn.LayerNorm.forward` for weights that may differ by token. Statistics are float32, as in torch."""

    def __init__(self, module: nn.LayerNorm) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        shape, eps = self.module.normalized_shape, self.module.eps
        weight, bias = self.module.weight, self.module.bias
        if weight is None or weight.dim() == 1:
            return nn.functional.layer_norm(x, shape, weight, bias, eps)
        scaled = nn.functional.layer_norm(x.float(), shape, None, None, eps) * weight.float()
        return (scaled if bias is None else scaled + bias.float()).to(x.dtype)


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


def check_tensors(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Compare a model, whose parameters may be on the meta device, with a checkpoint before it is read.

    Deltas name tensors as the checkpoint does, so its names must be the model's.

    Raises:
        NotServable: the checkpoint has no token embedding, or names tensors otherwise than transformers.
        CheckpointError: the checkpoint's tensors are not the model's.
    """
    if checkpoint.embedding_name is None:
        raise no_head(model)
    names = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    # Old checkpoints store a table that transformers computes.
    computed = {name for name in checkpoint.tensors if name.endswith("rotary_emb.inv_freq")}
    unknown = sorted(checkpoint.shapes().keys() - names - computed - {checkpoint.head_name})
    if unknown:
        raise NotServable(
            f"{kind(model)}: the checkpoint's {unknown[0]!r} (and {len(unknown) - 1} more) is no parameter "
            "of the model: save the base again with this version of transformers"
        )
    head: Any = model.get_output_embeddings()
    for name, parameter in model.named_parameters():
        stored = checkpoint.tensors.get(name)
        if stored is None and parameter is not head.weight:
            raise CheckpointError(
                f"{checkpoint.path}: {name!r}, which its config.json asks for, is in none of its shards: fetch the "
                "checkpoint again, or the config.json that belongs to it"
            )
        if stored is not None and stored.shape != tuple(parameter.shape):
            raise CheckpointError(
                f"{stored.file}: tensor {name!r} has the shape {list(stored.shape)} and its config.json asks for "
                f"{list(parameter.shape)}: fetch the config.json that belongs to it"
            )
        if stored is not None and stored.dtype not in FLOATS:
            raise CheckpointError(
                f"{stored.file}: tensor {name!r} is {stored.dtype}: save the model in bfloat16, float16 or float32"
            )


def attach(model: PreTrainedModel, base: Base) -> BatchContext:
    """Hook every module that owns parameters, and return the context that tells them the deltas of a step."""
    context = BatchContext()
    head: Any = model.get_output_embeddings()
    assert base.embedding is not None
    for name, module in model.named_modules():
        if module is head:
            # Some checkpoints name the head otherwise than the model does.
            stored = base.head or f"{name}.weight"
            HeadDelta(module, stored.removesuffix(".weight"), base.embedding.removesuffix(".weight"), context)
        elif isinstance(module, nn.Linear):
            LinearDelta(module, name, context)
        elif isinstance(module, nn.Embedding):
            EmbeddingDelta(module, name, context)
        elif is_norm(module):
            NormDelta(module, name, context)
    return context
