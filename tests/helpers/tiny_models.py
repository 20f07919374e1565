"""Tiny random checkpoints of every tested architecture, with fine-tunes that answer otherwise than their base."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

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


@dataclass(frozen=True, slots=True)
class Change:
    """Differences of a fine-tune from its base beside its weights."""

    added_tokens: int = 0  # rows that the base lacks
    tied: bool | None = None  # None: as the base
    chat_template: str | dict[str, str] | None = None  # one, or several by name
    generation: Mapping[str, Any] = field(default_factory=dict)
    noise: float = 0.5  # of each tensor's own standard deviation


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
        architecture: a key of ARCHITECTURES or of MORE_SERVED.
        config: overrides of the architecture's configuration.
    """
    generator = torch.Generator().manual_seed(seed)
    settings = tiny_config(architecture, **config)
    base = _model(settings, dtype)
    for name, parameter in base.named_parameters():
        parameter.data = _drawn(name, parameter.data, settings.initializer_range, generator)
    base.tie_weights()
    _save(base, make_tokenizer(), directory / "base", max_shard_size)
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
    return AutoConfig.for_model(
        architecture, **{**_COMMON, **{**ARCHITECTURES, **MORE_SERVED}[architecture], **config}
    )


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
    model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    model.eval()
    return model


def _drawn(name: str, tensor: Tensor, spread: float, generator: torch.Generator) -> Tensor:
    """Return the base's values: norms around their initial values in transformers, the rest around zero."""
    noise = torch.randn(tensor.shape, generator=generator)
    if "norm" in name and name.endswith("weight"):
        return (tensor.float() + 0.2 * noise).to(tensor.dtype)
    # A large embedding would make the last token alone decide the next one.
    return ((spread / 8 if "embed" in name else spread) * noise).to(tensor.dtype)


def _finetuned(base: PreTrainedModel, change: Change, generator: torch.Generator) -> PreTrainedModel:
    config = copy.deepcopy(base.config)
    config.vocab_size += change.added_tokens
    if change.tied is not None:
        config.tie_word_embeddings = change.tied
    model = _model(config, base.dtype)
    own = base.state_dict()
    for name, parameter in model.named_parameters():  # a tied head is not named twice
        source = own[name].float()
        rows = parameter.shape[0] - source.shape[0]
        if rows:
            extra = source.std() * torch.randn((rows, *source.shape[1:]), generator=generator)
            source = torch.cat([source, extra])
        noise = torch.randn(source.shape, generator=generator)
        parameter.data = (source + change.noise * source.std() * noise).to(parameter.dtype)
    model.tie_weights()
    return model


def _save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path, max_shard_size: str
) -> None:
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(directory)
