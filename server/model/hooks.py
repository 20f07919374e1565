"""Make every layer of a model delta-aware. Knows modules and tensor names; no requests and no values of weights.

A model with weights that no delta could reach is refused before it is loaded.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from deltastore.base.base import Base
from deltastore.base.checkpoint import Checkpoint
from deltastore.errors import CheckpointError
from deltastore.format.layout import FLOATS
from server.deltas.batch import BatchContext
from server.deltas.embedding import EmbeddingDelta
from server.deltas.linear import HeadDelta, LinearDelta
from server.deltas.norm import NormDelta, is_norm
from server.errors import NotServable


def check_structure(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Compare a model, whose parameters may be on the meta device, with a checkpoint before it is read.

    Raises:
        NotServable: the model has modules whose weights no delta could reach.
        CheckpointError: the checkpoint's tensors are not the model's.
    """
    head: Any = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    if (
        not isinstance(head, nn.Linear)
        or not isinstance(embedding, nn.Embedding)
        or checkpoint.embedding_name is None
    ):
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
    _check_tensors(model, checkpoint)


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


def kind(model: PreTrainedModel) -> str:
    """Return the name of a model in messages."""
    return f"model type {model.config.model_type!r}"


def _is_lookup(module: nn.Module) -> bool:
    """True for an embedding that returns its rows, at most scaled. Learned position embeddings compute more."""
    return isinstance(module, nn.Embedding) and (
        type(module).forward is nn.Embedding.forward or hasattr(module, "embed_scale")
    )


def _check_tensors(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Check names, shapes and dtypes. Deltas name tensors as the checkpoint does, so its names must be the model's."""
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
