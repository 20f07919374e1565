"""Tiny random checkpoints of every tested architecture, with fine-tunes that answer otherwise than their base."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)  # an odd number, so that no row count is a multiple of a vector
CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"

_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 92,  # 11.5 bytes of signs
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large enough that the context decides the next token
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"tie_word_embeddings": False, "sliding_window": 32},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False, "head_dim": 16},
    "gemma": {"tie_word_embeddings": True, "head_dim": 16},
    "phi3": {"tie_word_embeddings": False},
    # It has keys and values for each head, whatever its configuration says.
    "gpt_neox": {"tie_word_embeddings": False, "rotary_pct": 0.25, "num_key_value_heads": 4},
}
MORE_SERVED: Mapping[str, Mapping[str, Any]] = {  # windows are shorter than the contexts of tests
    "gemma2": {
        "tie_word_embeddings": True,
        "head_dim": 16,
        "sliding_window": 8,
        "attn_logit_softcapping": 2.0,
    },
    "gemma3_text": {"tie_word_embeddings": True, "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 6},
    "olmo2": {"tie_word_embeddings": False},
    "granite": {"tie_word_embeddings": False, "attention_multiplier": 0.25},
    "cohere": {"tie_word_embeddings": True},
    "phi": {"tie_word_embeddings": False},
    "starcoder2": {"tie_word_embeddings": False, "sliding_window": 8},
    "smollm3": {"tie_word_embeddings": True},
    "glm": {"tie_word_embeddings": False, "head_dim": 16},
    "stablelm": {"tie_word_embeddings": False},
}
LAYER_TYPES = ["sliding_attention", "full_attention"] * 2
SERVED_TOO: Mapping[str, Mapping[str, Any]] = {
    "ministral": {"tie_word_embeddings": False, "head_dim": 16, "sliding_window": 8},
    "ministral3": {"tie_word_embeddings": False, "head_dim": 16},
    # Its last two layers read the keys and values of the two before them.
    "gemma4_text": {
        "tie_word_embeddings": True,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 8,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": LAYER_TYPES,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "final_logit_softcapping": 30.0,
    },
    "olmo3": {"tie_word_embeddings": False, "sliding_window": 8, "layer_types": LAYER_TYPES[:2]},
    "glm4": {"tie_word_embeddings": False, "head_dim": 16},
    "exaone4": {
        "tie_word_embeddings": False,
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": LAYER_TYPES[:2],
    },
    "seed_oss": {"tie_word_embeddings": False, "head_dim": 16},
    "apertus": {"tie_word_embeddings": False},
    "gemma4_unified_text": {
        "tie_word_embeddings": True,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 8,
        "layer_types": LAYER_TYPES[:2],
        "final_logit_softcapping": 30.0,
    },
    "cohere_compass_text": {
        "tie_word_embeddings": True,
        "sliding_window": 8,
        "layer_types": LAYER_TYPES[:2],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": None,
        },
    },
}
MERGED_ONLY: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {
        "tie_word_embeddings": False,
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "mixtral": {"tie_word_embeddings": False, "num_local_experts": 4},
    "olmoe": {"tie_word_embeddings": False, "num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"tie_word_embeddings": False, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        "tie_word_embeddings": False,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
    "qwen3_5_text": {
        "tie_word_embeddings": False,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "qwen3_5_moe_text": {
        "tie_word_embeddings": False,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
}
_VISION: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def _text(architecture: str, **more: Any) -> dict[str, Any]:
    # Sizes that a served text model has, too.
    return {
        **_COMMON,
        **{**MORE_SERVED, **SERVED_TOO, **ARCHITECTURES}[architecture],
        "model_type": architecture,
        **more,
    }


# A text model beside towers, whose placeholders are ids of the vocabulary.
WRAPPERS: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {
        "text_config": _text("gemma3_text"),
        "vision_config": _VISION,
        "mm_tokens_per_image": 4,
        "image_token_index": 240,
        "boi_token_index": 241,
        "eoi_token_index": 242,
    },
    "mistral3": {
        "tie_word_embeddings": False,
        "text_config": _text("ministral3"),
        "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 16},
        "image_token_index": 240,
    },
    "gemma4": {
        "text_config": _text("gemma4_text"),
        "vision_config": {
            **{name: value for name, value in _VISION.items() if name != "image_size"},
            "num_key_value_heads": 2,
            "head_dim": 16,
            "position_embedding_size": 16,
        },
        "audio_config": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "subsampling_conv_channels": [8, 4],
            "output_proj_dims": 24,
        },
        "image_token_id": 240,
        "boi_token_id": 241,
        "eoi_token_id": 242,
        "audio_token_id": 243,
        "boa_token_id": 244,
        "eoa_token_index": 245,
        "video_token_id": 246,
    },
}
_OVERRIDES = {**ARCHITECTURES, **MORE_SERVED, **SERVED_TOO, **MERGED_ONLY, **WRAPPERS}


@dataclass(frozen=True, slots=True)
class Change:
    """Differences of a fine-tune from its base beside its weights."""

    added_tokens: int = 0  # rows that the base lacks
    tied: bool | None = None  # None: as the base
    chat_template: str | dict[str, str] | None = None  # one, or several by name
    generation: Mapping[str, Any] = field(default_factory=dict)
    noise: float = 0.5  # of each tensor's own standard deviation
    buffers: bool = False  # also those that are stored beside the weights


@dataclass(frozen=True, slots=True)
class TinyModels:
    """Directories of a base and of the fine-tunes made from it."""

    base: Path
    finetunes: list[Path]


def make_pair(
    architecture: str,
    directory: Path,
    seed: int = 0,
    changes: tuple[Change, ...] = (Change(),),
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **config: Any,
) -> TinyModels:
    """Write ``base`` and, for each change, ``finetune-0``, ``finetune-1``, ... under `directory`.

    Args:
        architecture: a key of ARCHITECTURES, MORE_SERVED, SERVED_TOO, MERGED_ONLY or WRAPPERS.
        config: overrides of the architecture's configuration.
    """
    generator = torch.Generator().manual_seed(seed)
    settings = tiny_config(architecture, **config)
    base = make_base(settings, directory / "base", dtype, generator, max_shard_size)
    finetunes = []
    for number, change in enumerate(changes):
        finetunes.append(directory / f"finetune-{number}")
        model = _finetuned(base, change, generator)
        model.generation_config.update(**change.generation)
        tokenizer = make_tokenizer(change.added_tokens, change.chat_template)
        _save(model, tokenizer, finetunes[-1], max_shard_size)
    return TinyModels(directory / "base", finetunes)


def tiny_config(architecture: str, **config: Any) -> Any:
    """Return the configuration of an architecture's tiny base, with overrides."""
    common = {} if architecture in WRAPPERS else _COMMON
    return AutoConfig.for_model(
        architecture, **copy.deepcopy({**common, **_OVERRIDES[architecture], **config})
    )


def make_base(
    settings: Any,
    directory: Path,
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
    max_shard_size: str = "5GB",
) -> PreTrainedModel:
    """Write a random checkpoint of a configuration and its tokenizer, and return the model."""
    generator = generator or torch.Generator().manual_seed(0)
    base = _model(settings, dtype)
    # Of their own, so that a wrapper's text model and its fine-tunes have the values of the text model alone.
    towers = torch.Generator().manual_seed(0)
    for name, parameter in base.named_parameters():
        drawn = towers if is_tower(name) else generator
        parameter.data = _drawn(name, parameter.data, _COMMON["initializer_range"], drawn)
    base.tie_weights()
    _save(base, make_tokenizer(), directory, max_shard_size)
    return base


# Sizes of configurations under the names that older model types give them.
_OTHER_NAMES: Mapping[str, Any] = {
    "n_embd": 64, "d_model": 64, "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2, "n_head": 4,
    "n_heads": 4, "decoder_attention_heads": 4, "num_decoder_layers": 2, "n_inner": 92, "ffn_dim": 92, "d_ff": 92,
    "decoder_ffn_dim": 92, "n_positions": 256, "head_dim": 16, "rotary_dim": 8, "sliding_window": 8,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
_PART: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE + 1,
    "hidden_size": 64,
    "intermediate_size": 92,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
# Fields without which the defaults of a type make no model, or no small one.
_OWN_FIELDS: Mapping[str, Mapping[str, Any]] = {
    # Tokens are bytes after special tokens, whose number its code knows.
    "blt": {
        "vocab_size": VOCAB_SIZE + 1,
        "encoder_hash_byte_group_vocab": 128,
        "patcher_config": _PART,
        "encoder_config": {**_PART, "hidden_size_global": 64},
        "decoder_config": {**_PART, "hidden_size_global": 64},
        "global_config": _PART,
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma4_assistant": {
        "backbone_hidden_size": 64,
        "text_config": {
            **_COMMON,
            "model_type": "gemma4_text",
            "head_dim": 16,
            "global_head_dim": 32,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        },
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 16]},
    # The row of its table of positions that is zero.
    "xglm": {"pad_token_id": 1, "attention_heads": 4},
}


def shrunk(model_type: str) -> Any:
    """Return a small configuration of any model type: its defaults, with the sizes of this file where it has them.

    Raises whatever transformers does about sizes that do not fit each other.
    """
    kind = CONFIG_MAPPING[model_type]
    # Not what a configuration computes from its fields.
    names = {each.name for each in fields(kind)} | kind.attribute_map.keys()
    given = {name: value for name, value in {**_OTHER_NAMES, **_COMMON}.items() if name in names}
    if "qk_rope_head_dim" in names:
        # The size of a head is that of its parts.
        given.pop("head_dim", None)
    return AutoConfig.for_model(model_type, **copy.deepcopy({**given, **_OWN_FIELDS.get(model_type, {})}))


def make_tokenizer(
    added_tokens: int = 0, chat_template: str | dict[str, str] | None = None
) -> PreTrainedTokenizerFast:
    """One token per byte, then the special tokens, then ``<added-N>``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *SPECIAL_TOKENS]
    backend = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [f"<added-{number}>" for number in range(added_tokens)]}
    )
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def _model(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    # A model keeps and changes the configuration that it is given, so each has its own.
    make: Any = AutoModelForImageTextToText if config.model_type in WRAPPERS else AutoModelForCausalLM
    model: PreTrainedModel = make.from_config(copy.deepcopy(config), dtype=dtype)
    model.eval()
    return model


def _drawn(name: str, tensor: Tensor, spread: float, generator: torch.Generator) -> Tensor:
    """Return the base's values: norms around their initial values in transformers, the rest around zero."""
    noise = torch.randn(tensor.shape, generator=generator)
    if "norm" in name and name.endswith("weight"):
        return (tensor.float() + 0.2 * noise).to(tensor.dtype)
    # A large embedding would make the last token alone decide the next one.
    return ((spread / 8 if "embed" in name else spread) * noise).to(tensor.dtype)


def load_whole(directory: Path) -> Any:
    """Load a checkpoint as transformers does, in float32; a wrapper with its towers."""
    is_wrapper = AutoConfig.from_pretrained(directory).model_type in WRAPPERS
    loader: Any = AutoModelForImageTextToText if is_wrapper else AutoModelForCausalLM
    model, info = loader.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"], info
    return model.eval()


def is_tower(name: str) -> bool:
    """Return True for the name of a parameter of a tower for images or sound."""
    return any(part in name for part in ("vision", "multi_modal_projector", "audio"))


def _finetuned(base: PreTrainedModel, change: Change, generator: torch.Generator) -> PreTrainedModel:
    config = copy.deepcopy(base.config)
    config.get_text_config().vocab_size += change.added_tokens
    if change.tied is not None:
        config.tie_word_embeddings = change.tied
    model = _model(config, base.dtype)
    own = base.state_dict()
    for name, parameter in model.named_parameters():  # a tied head is not named twice
        if is_tower(name):
            parameter.data = own[name].clone()
            continue
        source = own[name].float()
        rows = parameter.shape[0] - source.shape[0]
        if rows:
            extra = source.std() * torch.randn((rows, *source.shape[1:]), generator=generator)
            source = torch.cat([source, extra])
        noise = torch.randn(source.shape, generator=generator)
        # One value has no deviation.
        spread = source.std() if source.numel() > 1 else source.abs().mean()
        parameter.data = (source + change.noise * spread * noise).to(parameter.dtype)
    if change.buffers:
        stored = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in stored and not is_tower(name):
                buffer.add_(1)
    model.tie_weights()
    return model


def _save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path, max_shard_size: str
) -> None:
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(directory)
