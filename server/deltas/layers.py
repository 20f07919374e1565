"""Make every layer of a model delta-aware: hooks on linear layers, embeddings, norms and activations.

Norms run transformers' own code, with the weight of each row's variant in place of the base's. RMSNorms, ``1 + w``
forms included, broadcast one weight vector per token. `nn.LayerNorm` does not and is replaced by its own formula.

The base's weights are never written, and the model keeps the modules and parameter names of transformers.

A checkpoint whose tensors are not the model's is refused before it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from deltastore.base import Base
from deltastore.checkpoint import Checkpoint, is_computed
from deltastore.errors import CheckpointError, NotServable
from deltastore.format.layout import FLOATS
from deltastore.servable import kind, module_kind, no_head
from server.deltas.resident import BatchContext, Part, StepDeltas
from server.kernels import add_planes, add_rows


class NormDelta:
    """Sets the vectors of one norm or activation to those of each row's variant before it runs."""

    def __init__(self, module: nn.Module, name: str, context: BatchContext) -> None:
        self.context = context
        self.base: dict[str, Tensor] = {}
        self.vectors: dict[str, int] = {}
        # 1 for inputs [1, tokens, heads, features], 2 if heads come first.
        self._token_axis: int | None = None
        for parameter, value in list(module.named_parameters(recurse=False)):
            self.base[parameter] = value.detach()
            self.vectors[parameter] = context.tables.add_vector(f"{name}.{parameter}", value)
            # torch does not let a plain tensor replace a registered parameter.
            delattr(module, parameter)
            setattr(module, parameter, self.base[parameter])
        if isinstance(module, nn.LayerNorm):
            setattr(module, "forward", _LayerNorm(module))  # noqa: B010 - a method may not be assigned
        context.hooks.append(module.register_forward_pre_hook(self))

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        step = self.context.current
        for parameter, base in self.base.items():
            value = base
            if step is not None and (number := self.vectors[parameter]) in step.vectors:
                table = self.context.tables.vectors[number].table
                rows = step.tokens.slot_of_row[: step.tokens.num_rows]
                value = self._by_token(table.index_select(0, rows), args[0])
            if getattr(module, parameter) is not value:
                setattr(module, parameter, value)

    def _by_token(self, value: Tensor, x: Tensor) -> Tensor:
        """Reshape a weight [tokens, features] to broadcast over `x`.

        Args:
            value: ``[tokens, features]``.
            x: ``[1, tokens, features]``, ``[1, tokens, heads, features]`` or ``[1, heads, tokens, features]``.
        """
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
        name = f"{name}.weight"
        self.num_rows = module.num_embeddings
        # Some embeddings (Gemma's) multiply the rows that they look up.
        scale = getattr(module, "embed_scale", None)
        self.scale = 1.0 if scale is None else float(torch.as_tensor(scale).to(module.weight.dtype))
        self.context = context
        self.part = context.tables.add_part(Part(name, self.num_rows))
        context.tables.add_part(Part(name, self.num_rows, is_beyond=True))
        self._ids: Tensor | None = None
        context.hooks.append(module.register_forward_pre_hook(self._before))
        context.hooks.append(module.register_forward_hook(self._after))

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.context.current is None:
            return None
        self._ids = args[0]
        return (self._ids.clamp(max=self.num_rows - 1), *args[1:])

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if (step := self.context.current) is not None and self._ids is not None:
            ids, self._ids = self._ids.flatten(), None
            table, rows = self.context.tables.rows[self.part : self.part + 2], step.rows(len(ids))
            add_rows(output.flatten(0, -2), ids, table, rows.order, rows.ranges, self.num_rows, self.scale)
        return output


class LinearDelta:
    """Adds deltas to the output of one `nn.Linear`."""

    def __init__(self, module: nn.Linear, name: str, context: BatchContext) -> None:
        self.context = context
        bias = _add_bias(module, f"{name}.bias", context)
        self.part = context.tables.add_part(Part(f"{name}.weight", module.out_features, bias=bias))
        context.hooks.append(module.register_forward_hook(self))

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if (step := self.context.current) is not None:
            flat = output.flatten(0, -2)
            table, rows = self.context.tables.rows[self.part : self.part + 1], step.rows(len(flat))
            add_planes(flat, args[0].flatten(0, -2), table, rows.order, rows.ranges, [flat.shape[1]])
        return output


class HeadDelta:
    """Adds deltas to the logits, and widens them if a variant has more tokens than the base.

    The head sees only the rows whose logits are computed. A token that a row's variant lacks has a logit of minus
    infinity. If a variant ties its head to its embedding, the embedding's delta applies to the head.
    """

    def __init__(self, module: nn.Linear, name: str, embedding: str, context: BatchContext) -> None:
        self.context = context
        name, embedding, num_rows = f"{name}.weight", f"{embedding}.weight", module.out_features
        bias = _add_bias(module, f"{name.removesuffix('.weight')}.bias", context)
        self.part = context.tables.add_part(Part(name, num_rows, embedding=embedding, bias=bias))
        context.tables.add_part(Part(name, num_rows, is_beyond=True, embedding=embedding))
        context.hooks.append(module.register_forward_hook(self))

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if (step := self.context.current) is None:
            return output
        num_base = output.shape[-1]
        logits = _widened(output, step)
        flat, rows = logits.flatten(0, -2), step.logit_rows(output.shape[:-1].numel())
        ends = [num_base, flat.shape[1]] if step.num_added else [num_base]
        table = self.context.tables.rows[self.part : self.part + len(ends)]
        add_planes(flat, args[0].flatten(0, -2), table, rows.order, rows.ranges, ends)
        return logits


def _widened(output: Tensor, step: StepDeltas) -> Tensor:
    """Return logits with columns for the tokens of all variants of a step."""
    if not step.num_added:
        return output
    num_base = output.shape[-1]
    logits = output.new_full((*output.shape[:-1], num_base + step.num_added), -torch.inf)
    logits[..., :num_base] = output
    return logits


def _add_bias(module: nn.Linear, name: str, context: BatchContext) -> int | None:
    """Add a layer's bias, which kernels read in float32, and return the number of its vector."""
    return None if module.bias is None else context.tables.add_vector(name, module.bias.float())


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
    computed = set(filter(is_computed, checkpoint.tensors))
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
    hook_modules(context, base, model.named_modules(), model.get_output_embeddings(), NormDelta)
    return context


def hook_modules(
    context: BatchContext,
    base: Base,
    modules: Iterable[tuple[str, nn.Module]],
    head: Any,
    norm: Callable[[nn.Module, str, BatchContext], object],
) -> None:
    """Hook those of some modules that own parameters, and note the hooks in the context.

    Args:
        context: tells the layers the deltas of a step.
        base: the base.
        modules: modules by the names that the base has for them.
        head: the output head among them.
        norm: makes a norm or activation delta-aware. `NormDelta` takes their parameters from the module.
    """
    assert base.embedding is not None
    for name, module in modules:
        if module is head:
            # Some checkpoints name the head otherwise than the model does.
            stored = base.head or f"{name}.weight"
            HeadDelta(
                cast(nn.Linear, module),
                stored.removesuffix(".weight"),
                base.embedding.removesuffix(".weight"),
                context,
            )
            continue
        match module_kind(module):
            case "linear":
                LinearDelta(cast(nn.Linear, module), name, context)
            case "embedding":
                EmbeddingDelta(cast(nn.Embedding, module), name, context)
            case "norm" | "activation":
                norm(module, name, context)
            case None:
                # `check_modules` has refused modules with parameters that are of no kind.
                pass
