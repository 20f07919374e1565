"""Make a Llama with random weights and random deltas for it on the device, without files.

A delta has the layout of the artifact format and no manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from bench.gpu.rows import BenchSizes
from deltastore.base.base import Base
from deltastore.base.checkpoint import TORCH_DTYPE
from deltastore.format.header import DTYPE_BYTES, TensorEntry
from deltastore.format.layout import TENSOR_ALIGNMENT
from deltastore.format.manifest import MatrixParts, PlaneParts, padding_tensor
from deltastore.format.plan import is_matrix
from deltastore.format.signs import packed_width
from server.deltas.resident import DeltaLayout, ResidentDelta, Slot

HEAD = "lm_head.weight"
FINGERPRINT = "0" * 64
GAIN = 2.0**-12  # small beside weights of 0.02, so that activations stay what a model's are


@dataclass(frozen=True, slots=True, eq=False)
class Blueprint:
    """Layout of the deltas of one base: two scales per matrix, norms whole."""

    layout: DeltaLayout
    entries: tuple[TensorEntry, ...]  # in the order of their bytes, padding included

    @property
    def device_bytes(self) -> int:
        return self.entries[-1].end


def build_model(sizes: BenchSizes, device: torch.device) -> PreTrainedModel:
    """Make a bf16 Llama with Llama 3.1's rotary embedding and transformers' initial weights."""
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    nn.Module.train(model, False).requires_grad_(False)
    return model


def base_of(model: PreTrainedModel) -> Base:
    """Describe a model as the server describes a loaded base; the fingerprint is a placeholder."""
    return Base(
        id="random-llama",
        fingerprint=FINGERPRINT,
        shapes={name: tuple(value.shape) for name, value in model.named_parameters()},
        config={},
        embedding="model.embed_tokens.weight",
        head=HEAD,
    )


def blueprint(shapes: Mapping[str, tuple[int, ...]]) -> Blueprint:
    """Lay out a delta of every tensor, in the order of `shapes`."""
    entries: list[TensorEntry] = []
    matrices: dict[str, MatrixParts[TensorEntry]] = {}
    whole: dict[str, TensorEntry] = {}
    for name, shape in shapes.items():
        if is_matrix(name, shape):
            out_features, in_features = shape
            plane = PlaneParts(
                _append(entries, f"{name}.signs", "U8", (out_features, packed_width(in_features))),
                _append(entries, f"{name}.scale_out", "F16", (out_features,)),
                _append(entries, f"{name}.scale_in", "F16", (in_features,)),
                _append(entries, f"{name}.gain", "F32", (1,)),
            )
            matrices[name] = MatrixParts((plane,), None, None, None)
        else:
            whole[name] = _append(entries, name, "BF16", shape)
    return Blueprint(DeltaLayout(FINGERPRINT, False, HEAD, matrices, whole), tuple(entries))


def fill(memory: Tensor, drawing: Blueprint, seed: int) -> None:
    """Fill a slot's bytes with random signs, scales of one and the base's norms."""
    generator = torch.Generator(memory.device).manual_seed(seed)
    memory[: drawing.device_bytes].random_(0, 256, generator=generator)
    for parts in drawing.layout.matrices.values():
        for scale in parts.planes[0].scales():
            _view(memory, scale).fill_(1)
        _view(memory, parts.planes[0].gain).fill_(GAIN)
    for entry in drawing.layout.whole.values():
        _view(memory, entry).fill_(1)


def make_resident(slots: list[Slot], drawing: Blueprint) -> list[ResidentDelta]:
    """Fill each slot with a delta of its own."""
    for slot in slots:
        fill(slot.memory, drawing, slot.index)
    return [ResidentDelta.in_slot(drawing.layout, slot) for slot in slots]


def _append(entries: list[TensorEntry], name: str, dtype: str, shape: tuple[int, ...]) -> TensorEntry:
    start = entries[-1].end if entries else 0
    num_bytes = DTYPE_BYTES[dtype] * torch.Size(shape).numel()
    entry = TensorEntry(name, dtype, shape, start, start + num_bytes)
    entries.append(entry)
    if padding := -entry.end % TENSOR_ALIGNMENT:
        filler = padding_tensor(len(entries))
        entries.append(TensorEntry(filler, "U8", (padding,), entry.end, entry.end + padding))
    return entry


def _view(memory: Tensor, entry: TensorEntry) -> Tensor:
    return memory[entry.start : entry.end].view(TORCH_DTYPE[entry.dtype]).view(entry.shape)
