"""Write checkpoints with the configurations of published models and random weights. Knows names, shapes and files.

Its tokenizer is a byte-level BPE of any size, trained on the sources of the Python installation and cached.
"""

from __future__ import annotations

import copy
import json
import math
import sysconfig
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from compressor.convert.merge import OutputTensor, split_into_shards, write_index, write_shard

MAX_TEXT_BYTES = 48 << 20
TRAINED_TOKENS = 60_000
PAD = "<pad>"


def byte_level_bpe(num_tokens: int, cache: Path) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `num_tokens` tokens, the same for every call on one machine.

    Local text gives too few merges for a large vocabulary. Pairs of trained tokens, which real text rarely holds, fill
    it up in a fixed order.
    """
    file = cache / f"tokenizer-{num_tokens}.json"
    if not file.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".part")
        _filled(_trained(min(num_tokens, TRAINED_TOKENS)), num_tokens).save(str(partial))
        partial.rename(file)
    return PreTrainedTokenizerFast(tokenizer_file=str(file), pad_token=PAD)


def _trained(num_tokens: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        special_tokens=[PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer


def _texts() -> Iterator[str]:
    """Yield Python sources of the standard library and of the installed packages, in the order of their paths."""
    total = 0
    for key in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_path(key)).rglob("*.py")):
            text = path.read_text(errors="ignore")
            total += len(text)
            if total > MAX_TEXT_BYTES:
                return
            yield text


def _filled(trained: Tokenizer, num_tokens: int) -> Tokenizer:
    document = json.loads(trained.to_str())
    vocabulary, merges = document["model"]["vocab"], document["model"]["merges"]
    tokens = [token for token in vocabulary if token != PAD]
    for joined, pair in _joined(tokens):
        if len(vocabulary) >= num_tokens:
            break
        if joined not in vocabulary:
            vocabulary[joined] = len(vocabulary)
            merges.append(list(pair))
    return Tokenizer.from_str(json.dumps(document))


def _joined(tokens: list[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    for second in tokens:
        for first in tokens:
            yield first + second, (first, second)


WEIGHT_STD = 0.02
NORM_STD = 0.1
# A fine-tune's difference has this share of the weights' standard deviation.
TUNING_SHARE = 0.2
BLOCK_NUMEL = 1 << 24
SHARD_BYTES = 5_000_000_000
NUM_THREADS = 2
MAX_FINETUNES = 7

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA3 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
_QWEN = {"vocab_size": 151936, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
# 48 factors: half of the rotated 96 of a head's 128 dimensions. The published ones are not at hand; these grow alike.
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0] * 48,
    "long_factor": [round(1.0 + 46.0 * (i / 47) ** 2, 4) for i in range(48)],
}


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama-3.2-1b": {
        **_LLAMA3,
        **_sizes(2048, 8192, 16, 32, 8),
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_parameters": {**_LLAMA3_ROPE, "factor": 32.0},
    },
    "llama-3.1-8b": {
        **_LLAMA3,
        **_sizes(4096, 14336, 32, 32, 8),
        "head_dim": 128,
        "tie_word_embeddings": False,
        "rope_parameters": {**_LLAMA3_ROPE, "factor": 8.0},
    },
    "tinyllama-1.1b": {
        **_sizes(2048, 5632, 22, 32, 4),
        "model_type": "llama",
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
    "qwen2.5-1.5b": {
        **_QWEN,
        **_sizes(1536, 8960, 28, 12, 2),
        "model_type": "qwen2",
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "qwen3-4b": {
        **_QWEN,
        **_sizes(2560, 9728, 36, 32, 8),
        "model_type": "qwen3",
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "gemma-3-1b": {
        **_sizes(1152, 6912, 26, 4, 1),
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "phi-4-mini": {
        **_sizes(3072, 8192, 32, 24, 8),
        "model_type": "phi3",
        "vocab_size": 200064,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "rope_parameters": _LONGROPE,
    },
}


@dataclass(frozen=True, slots=True)
class RealModel:
    """One configuration and the tensors that its checkpoint holds."""

    name: str
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]  # in the order of the model's modules

    @classmethod
    def of(cls, name: str, num_layers: int | None = None) -> RealModel:
        """Make the model `name` of CONFIGS, with fewer layers if `num_layers` is given."""
        config = {
            **CONFIGS[name],
            "dtype": "bfloat16",
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        if num_layers is not None:
            config["num_hidden_layers"] = num_layers
        settings = AutoConfig.for_model(**copy.deepcopy(config))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings)
        # A tied head is one parameter, which is named once.
        shapes = {key: tuple(value.shape) for key, value in model.named_parameters()}
        return cls(name, {**settings.to_dict(), "architectures": [type(model).__name__]}, shapes)

    @property
    def num_weights(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])

    def write_base(self, directory: Path) -> Path:
        """Write the base unless its directory exists; an existing directory is complete, since it is named last."""
        if directory.is_dir():
            return directory
        partial = directory.with_name(f".{directory.name}.part")
        partial.mkdir(parents=True, exist_ok=True)
        byte_level_bpe(self.vocabulary, directory.parent).save_pretrained(partial)
        self._write(partial, finetune=None)
        partial.rename(directory)
        return directory

    def write_finetune(self, base: Path, directory: Path, seed: int) -> Path:
        """Write the base's weights plus a small random difference, drawn from `seed` (1 or more)."""
        directory.mkdir(parents=True)
        for file in base.iterdir():
            if file.suffix == ".json" and not file.name.startswith(("model", "config")):
                (directory / file.name).write_bytes(file.read_bytes())
        self._write(directory, finetune=seed)
        return directory

    def _write(self, directory: Path, finetune: int | None) -> None:
        (directory / "config.json").write_text(json.dumps(self.config, indent=2, default=str) + "\n")
        outputs = {name: OutputTensor(name, "BF16", shape) for name, shape in self.shapes.items()}
        shards = split_into_shards(outputs.values(), SHARD_BYTES)
        numbers = {name: index for index, name in enumerate(outputs)}
        with ThreadPoolExecutor(NUM_THREADS) as pool:

            def blocks(output: OutputTensor) -> Iterator[Tensor]:
                starts = range(0, math.prod(output.shape), BLOCK_NUMEL)
                count = math.prod(output.shape)
                yield from pool.map(
                    lambda start: self._block(
                        output.name, numbers[output.name], start, min(BLOCK_NUMEL, count - start), finetune
                    ),
                    starts,
                )

            for shard in shards:
                write_shard(directory, shard, blocks, lambda _: None)
        write_index(directory, shards)

    def _block(self, name: str, number: int, start: int, count: int, finetune: int | None) -> Tensor:
        """Draw some elements of one tensor; each block has its own seed, so that blocks are drawn in parallel."""
        is_norm = name.endswith("norm.weight")
        std = NORM_STD if is_norm else WEIGHT_STD
        block = start // BLOCK_NUMEL
        base = _normal(count, std, _seed(number, block, 0))
        # Gemma's norms multiply by one plus their weight.
        if is_norm and "gemma" not in str(self.config["model_type"]):
            base += 1
        if finetune is not None:
            base = base.bfloat16().float() + _normal(
                count, TUNING_SHARE * std, _seed(number, block, finetune)
            )
        return base.bfloat16()


def _seed(number: int, block: int, finetune: int) -> int:
    """Return a seed for one block of tensor `number`, of the base (0) or of a fine-tune; torch uses 32 bits of it."""
    if number >= 1 << 9 or block >= 1 << 20 or finetune > MAX_FINETUNES:
        raise ValueError(f"block {block} of tensor {number} of fine-tune {finetune} has no seed of its own")
    return (finetune << 29) + (number << 20) + block


def _normal(count: int, std: float, seed: int) -> Tensor:
    return torch.empty(count).normal_(std=std, generator=torch.Generator().manual_seed(seed))
