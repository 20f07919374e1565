"""Tiny decoders of more architectures than are served, opened block by block and whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from compressor.decoder.decoder import Decoder
from deltastore.checkpoint import Checkpoint
from tests.helpers.tiny_models import ARCHITECTURES, make_pair

CPU = torch.device("cpu")
SMALL: Mapping[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 92,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
}
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gemma3_text": {"num_hidden_layers": 6, "sliding_window": 8},  # five layers with a window, one without
    # Learned positions, and no linear layers.
    "gpt2": {"n_positions": 40, "n_layer": 2, "n_head": 4, "n_embd": 64},
    "opt": {"max_position_embeddings": 40, "ffn_dim": 92, "word_embed_proj_dim": 64},
    "bloom": {"n_layer": 2, "n_head": 4},  # its layers give tuples
    "gemma3n_text": {  # its layers read a second embedding of the ids
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0] * 5,
        "laurel_rank": 4,
        "vocab_size_per_layer_input": 259,
        "hidden_size_per_layer_input": 8,
    },
}
RUN = (*ARCHITECTURES, "mixtral", "qwen3_moe", "gemma3_text")


def make_model(architecture: str, directory: Path) -> Path:
    """Save a checkpoint of one of these architectures with transformers."""
    if architecture in ARCHITECTURES:
        return make_pair(architecture, directory, changes=()).base
    config = AutoConfig.for_model(architecture, **{**SMALL, **OTHERS[architecture]})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory / "base")
    return directory / "base"


def open_decoder(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder(Checkpoint.open(path), CPU, dtype)


def whole_model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path).eval()
