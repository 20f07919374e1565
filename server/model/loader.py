"""Loads the base through transformers and makes every layer of it delta-aware. Knows modules and names, no requests.

What cannot be served is said here, at start-up: weights in modules that no delta could reach, and norms whose code does
not accept a weight per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from deltastore.base import Base
from deltastore.checkpoint import Checkpoint
from server import kernels
from server.deltas.batch import BatchContext, DeltaBatch
from server.deltas.embedding import EmbeddingDelta
from server.deltas.linear import HeadDelta, LinearDelta
from server.deltas.norm import NormDelta, is_norm
from server.deltas.resident import ResidentDelta, Slot
from server.errors import NotServable

PROBE_TOKENS = 5


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """The base and the context through which its layers find the deltas of a step."""

    model: PreTrainedModel
    base: Base
    context: BatchContext
    device: torch.device
    max_positions: int


def load_model(base_dir: Path, device: torch.device, dtype: torch.dtype | None) -> ServedModel:
    """Load a Hugging Face decoder and attach deltas to all of it.

    Args:
        base_dir: the checkpoint's directory.
        device: where the base and the slots live.
        dtype: of the weights; None keeps the checkpoint's own.

    Raises:
        CheckpointError: the directory is no readable checkpoint.
        NotServable: an architecture that cannot run delta-aware, with the modules that stand in the way.
    """
    base = Base.of(Checkpoint.open(base_dir))
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # a log is no terminal
    config = AutoConfig.from_pretrained(base_dir)
    model = AutoModelForCausalLM.from_pretrained(
        base_dir, config=config, dtype=dtype or "auto", local_files_only=True
    )
    nn.Module.to(model, device)  # the library's own wrapper has lost its signature
    nn.Module.train(model, False).requires_grad_(False)
    kernels.prepare(device)
    with torch.inference_mode():
        plain = _probe(model)
        context, norms = _attach(model, base)
        _check_unchanged(model, context, norms, plain)
    text = config.get_text_config()
    return ServedModel(model, base, context, device, int(getattr(text, "max_position_embeddings", 0) or 2048))


def _attach(model: PreTrainedModel, base: Base) -> tuple[BatchContext, dict[str, Tensor]]:
    """Hook every module that owns parameters; NotServable names those that nothing here can handle."""
    context = BatchContext()
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding = model.get_input_embeddings()
    if not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Embedding) or base.embedding is None:
        raise NotServable(f"{_kind(model)}: it has no linear output head over a token embedding")
    names = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    strange: list[str] = []
    norms: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if module is head:
            stored = (
                base.head or f"{name}.weight"
            )  # some checkpoints name the head otherwise than the model does
            HeadDelta(module, stored.removesuffix(".weight"), base.embedding.removesuffix(".weight"), context)
        elif isinstance(module, nn.Linear):
            LinearDelta(module, name, context)
        elif _is_lookup(module):
            EmbeddingDelta(module, name, context)
        elif is_norm(module):
            norms |= NormDelta(module, name, context).by_name()
        elif any(True for _ in module.parameters(recurse=False)):
            strange.append(f"{name} ({type(module).__name__})")
    if strange:
        raise NotServable(
            f"{_kind(model)}: {len(strange)} modules with weights are neither linear, embedding nor norm: "
            f"{', '.join(strange[:3])}; such models can be compressed and merged, not served"
        )
    _check_names(model, base, names)
    return context, norms


def _is_lookup(module: nn.Module) -> bool:
    """An embedding that returns its rows, at most scaled; learned positions with code of their own are not."""
    return isinstance(module, nn.Embedding) and (
        type(module).forward is nn.Embedding.forward or hasattr(module, "embed_scale")
    )


def _check_unchanged(
    model: PreTrainedModel, context: BatchContext, norms: dict[str, Tensor], plain: Tensor
) -> None:
    """The base answers as before, also beside tokens of a delta whose every norm weight is given per token."""
    same = ResidentDelta("", False, "", {}, norms, Slot(0, torch.empty(0)), 0)
    batch = DeltaBatch.of([None, same, None], [1, PROBE_TOKENS - 2, 1], [1, PROBE_TOKENS - 2, 1])
    try:
        with context.step(batch):
            mixed = _probe(model)
    except RuntimeError as error:
        raise NotServable(f"{_kind(model)}: its norms take no weight per token: {error}") from error
    tolerance = 1e-4 if plain.dtype == torch.float32 else 5e-2
    if not torch.equal(_probe(model), plain) or not torch.allclose(
        mixed, plain, rtol=tolerance, atol=tolerance
    ):
        raise NotServable(f"{_kind(model)}: its outputs change when its layers are made delta-aware")


def _check_names(model: PreTrainedModel, base: Base, names: set[str]) -> None:
    """Deltas name tensors as the checkpoint does; every one of those must be a parameter of the model."""
    computed = {
        name for name in base.shapes if name.endswith("rotary_emb.inv_freq")
    }  # old checkpoints store it
    unknown = sorted(base.shapes.keys() - names - computed - {base.head})
    if unknown:
        raise NotServable(
            f"{_kind(model)}: the checkpoint's {unknown[0]!r} (and {len(unknown) - 1} more) is no parameter "
            "of the model: save the base again with this version of transformers"
        )


def _probe(model: PreTrainedModel) -> Tensor:
    """Logits of a few tokens, to see that a change of the modules changed no number."""
    ids = torch.arange(1, 1 + PROBE_TOKENS, device=model.device)[None]
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def _kind(model: PreTrainedModel) -> str:
    return f"model type {model.config.model_type!r}"
