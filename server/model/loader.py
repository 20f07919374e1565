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
from server.model.attention import Chunk, Layout, PagedAttention

PROBE_TOKENS = 13  # no model's number of heads, so that tokens and heads are told apart
PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """The base and the context through which its layers find the deltas of a step."""

    model: PreTrainedModel
    base: Base
    context: BatchContext
    attention: PagedAttention
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
    weights = [module.weight for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding))]
    kernels.prepare(device, {(len(weight), weight.shape[1]) for weight in weights}, model.dtype)
    with torch.inference_mode():
        plain = _probe(model)
        context, norms = _attach(model, base)
        attention = _page(model)
        _check_unchanged(model, context, norms, plain)
        _check_paged(model, attention, plain)
    return ServedModel(model, base, context, attention, device, _max_positions(config.get_text_config()))


def _max_positions(config: Any) -> int:
    """The longest context that a mixed batch can have.

    LongRoPE turns every position of a batch by one set of factors, which its longest sequence chooses. So contexts end
    where the factors would change.
    """
    longest = int(getattr(config, "max_position_embeddings", 0) or 2048)
    rope = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if one.get("rope_type") == "longrope":
            first = one.get("original_max_position_embeddings") or longest
            longest = min(longest, int(first))
    return longest


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
    same = ResidentDelta("", False, "", {}, norms, Slot(0, torch.empty(0, device=model.device)), 0)
    batch = DeltaBatch.of([None, same, None], [1, PROBE_TOKENS - 2, 1], [1, PROBE_TOKENS - 2, 1])
    try:
        with context.step(batch):
            mixed = _probe(model)
    except RuntimeError as error:
        raise NotServable(f"{_kind(model)}: its norms take no weight per token: {error}") from error
    _check_close(model, _probe(model), plain)
    _check_close(model, mixed, plain)


def _check_close(model: PreTrainedModel, logits: Tensor, plain: Tensor) -> None:
    tolerance = 1e-4 if plain.dtype == torch.float32 else 5e-2
    if not torch.allclose(logits, plain, rtol=tolerance, atol=tolerance):
        raise NotServable(f"{_kind(model)}: its outputs change when its layers are made delta-aware")


def _page(model: PreTrainedModel) -> PagedAttention:
    """Let the model attend to a paged cache; NotServable where one of its layers has no attention that can be."""
    attention = PagedAttention(model, PAGE_TOKENS)
    _probe(model)
    config = model.config.get_text_config()
    if len(attention.shapes) != config.num_hidden_layers:
        raise NotServable(
            f"{_kind(model)}: {len(attention.shapes)} of its {config.num_hidden_layers} layers look their attention "
            "up by name: such models can be compressed and merged, not served"
        )
    return attention


def _check_paged(model: PreTrainedModel, attention: PagedAttention, plain: Tensor) -> None:
    """In two steps and through pages that do not follow each other the base answers as before."""
    attention.allocate(3)
    size = attention.page_tokens
    for start, count in ((0, PROBE_TOKENS - 1), (PROBE_TOKENS - 1, 1)):
        layout = Layout.of([Chunk(start, count, [2])], size, model.device)
        positions = torch.arange(start, start + count, device=model.device)[None]
        with attention.step(layout):
            logits = model(input_ids=positions + 1, position_ids=positions, use_cache=False).logits
        _check_close(model, logits, plain[:, start : start + count])


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
