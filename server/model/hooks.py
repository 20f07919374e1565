"""Make every layer of a model delta-aware. Knows modules and names; nothing of requests, files or numbers.

A model with weights that no delta could reach is refused before any hook is attached.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from deltastore.base import Base
from server.deltas.batch import BatchContext
from server.deltas.embedding import EmbeddingDelta
from server.deltas.linear import HeadDelta, LinearDelta
from server.deltas.norm import NormDelta, is_norm
from server.errors import NotServable


def check_structure(model: PreTrainedModel, base: Base) -> None:
    """Raise NotServable, naming the modules or tensors at fault, where a delta could not reach all weights."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding = model.get_input_embeddings()
    if not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Embedding) or base.embedding is None:
        raise NotServable(f"{kind(model)}: it has no linear output head over a token embedding")
    unknown = [
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
        and not (isinstance(module, nn.Linear) or _is_lookup(module) or is_norm(module))
    ]
    if unknown:
        raise NotServable(
            f"{kind(model)}: {len(unknown)} modules with weights are neither linear, embedding nor norm: "
            f"{', '.join(unknown[:3])}; such models can be compressed and merged, not served"
        )
    _check_names(model, base)


def attach(model: PreTrainedModel, base: Base) -> BatchContext:
    """Hook every module that owns parameters, and return what tells them the batch of a step."""
    context = BatchContext()
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
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


def kind(model: PreTrainedModel) -> str:
    """The model as messages call it."""
    return f"model type {model.config.model_type!r}"


def _is_lookup(module: nn.Module) -> bool:
    """True for an embedding that returns its rows, at most scaled; learned positions have code of their own."""
    return isinstance(module, nn.Embedding) and (
        type(module).forward is nn.Embedding.forward or hasattr(module, "embed_scale")
    )


def _check_names(model: PreTrainedModel, base: Base) -> None:
    """Deltas name tensors as the checkpoint does; every one of those must be a parameter of the model."""
    names = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    # Old checkpoints store a table that transformers computes.
    computed = {name for name in base.shapes if name.endswith("rotary_emb.inv_freq")}
    unknown = sorted(base.shapes.keys() - names - computed - {base.head})
    if unknown:
        raise NotServable(
            f"{kind(model)}: the checkpoint's {unknown[0]!r} (and {len(unknown) - 1} more) is no parameter "
            "of the model: save the base again with this version of transformers"
        )
