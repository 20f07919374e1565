"""Make every layer of a model delta-aware. Knows modules and tensor names; no requests and no values of weights.

A checkpoint whose tensors are not the model's is refused before it is loaded.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from deltastore.base.base import Base
from deltastore.base.checkpoint import Checkpoint
from deltastore.base.servable import is_norm, kind, no_head
from deltastore.errors import CheckpointError, NotServable
from deltastore.format.layout import FLOATS
from server.deltas.batch import BatchContext
from server.deltas.embedding import EmbeddingDelta
from server.deltas.linear import HeadDelta, LinearDelta
from server.deltas.norm import NormDelta


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
