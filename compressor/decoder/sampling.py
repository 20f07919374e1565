"""Sample text from a model: groups of sequences at temperature 1, with the model's KV cache.

All noise is drawn beforehand, one number per token, so the text does not depend on how sequences are grouped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from compressor.decoder.decoder import Decoder
from deltastore.errors import CheckpointError
from deltastore.memory import available_bytes

MAX_GROUP = 256  # sequences that are sampled together
DRAWN_ROWS = 32  # distributions that are cumulated at a time, in float64
MEMORY_PART = 0.4  # of free memory for blocks, and the same for the KV cache


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """The blocks and sequences that fit into memory while a model generates."""

    num_resident_blocks: int
    group_size: int  # sequences generated together

    @classmethod
    def of(cls, decoder: Decoder, length: int, free_bytes: int) -> GenerationPlan:
        """Keep all blocks if they fit, else as many as fit beside the one that is being read.

        Groups are powers of two, so that small differences in free memory do not change float rounding.
        """
        part = int(MEMORY_PART * free_bytes)
        blocks = [decoder.block_bytes(index) for index in range(decoder.num_blocks)]
        resident = decoder.num_blocks
        if sum(blocks) > part:
            resident = max(0, part // max(blocks) - 1)
        fitting = max(1, part // (length * kv_bytes(decoder)))
        return cls(resident, min(MAX_GROUP, 1 << (fitting.bit_length() - 1)))


def sample(
    decoder: Decoder,
    prompts: Tensor,  # [sequences, tokens] int64, at least one token each
    length: int,
    generator: torch.Generator,
    on_tokens: Callable[[int], Any] | None = None,
) -> Tensor:  # [sequences, length] int64, on the CPU
    """Continue prompts to `length` tokens each, end-of-text tokens and what follows them included.

    Args:
        on_tokens: called with the number of tokens of each draw.

    Raises:
        CheckpointError: logits that are not finite, or a model without a KV cache.
    """
    noise = torch.rand(len(prompts), length - prompts.shape[1], generator=generator, dtype=torch.float64)
    plan = GenerationPlan.of(decoder, length, free_bytes(decoder.device))
    model = decoder.streaming_model(plan.num_resident_blocks)
    written = []
    for first in range(0, len(prompts), plan.group_size):
        rows = slice(first, first + plan.group_size)
        try:
            ids = _continue(model, prompts[rows].to(decoder.device), noise[rows], on_tokens)
        except _NoCache:
            raise _refusal(decoder) from None
        written.append(ids.cpu())
    text = torch.cat(written)
    if (text < 0).any():
        raise CheckpointError(f"{decoder.weights.path}: its logits are not finite: the checkpoint is damaged")
    return text


def kv_bytes(decoder: Decoder) -> int:
    """Return an upper bound on the KV cache's bytes per token: windows and shared heads may need less."""
    config = decoder.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if heads is None:
        raise _refusal(decoder)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * int(heads) * int(head_dim) * decoder.num_blocks * decoder.dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, or the available host memory for the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return max(0, available_bytes())


@torch.no_grad()
def _continue(
    model: Any,
    ids: Tensor,  # [sequences, tokens]
    noise: Tensor,  # [sequences, draws] float64
    on_tokens: Callable[[int], Any] | None,
) -> Tensor:  # [sequences, tokens + draws]; -1 where the logits were not finite
    cache, pieces = None, [ids]
    for column in noise.to(ids.device).T:
        output = model(
            input_ids=pieces[-1].clamp(min=0), past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        if cache is None:
            cache = _reserved(getattr(output, "past_key_values", None), ids.shape[1] + noise.shape[1])
        pieces.append(draw(output.logits[:, -1], column)[:, None])
        if on_tokens is not None:
            on_tokens(len(ids))
    return torch.cat(pieces, dim=1)


def _reserved(cache: Any, length: int) -> Any:
    """Give the growing layers of a cache their memory for `length` tokens, so that no token copies those before it.

    Raises:
        _NoCache: the model returned none.
    """
    if cache is None:
        raise _NoCache
    if isinstance(cache, DynamicCache):
        cache.layers = [
            _ReservedLayer(layer.keys, layer.values, length)
            if type(layer) is DynamicLayer and layer.keys is not None and layer.values is not None
            else layer
            for layer in cache.layers
        ]
    return cache


class _ReservedLayer(DynamicLayer):
    """A layer of a `DynamicCache` that writes new tokens behind those it has, in place of making longer tensors."""

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lazy_initialization(keys, values)
        self._room = [
            states.new_empty(*states.shape[:-2], length, states.shape[-1]) for states in (keys, values)
        ]
        self.keys, self.values = (room[..., :0, :] for room in self._room)
        self.update(keys, values)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        first = self.keys.shape[-2]
        end = first + key_states.shape[-2]
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[..., first:end, :] = states
        self.keys, self.values = (room[..., :end, :] for room in self._room)
        return self.keys, self.values


class _NoCache(Exception):
    """The model returned no KV cache."""


def _refusal(decoder: Decoder) -> CheckpointError:
    return CheckpointError(
        f"{decoder.weights.path}: model type {decoder.config.model_type!r} has no KV cache that text could be sampled "
        "with: give `text` a .txt or .jsonl file"
    )


def draw(
    logits: Tensor,  # [rows, vocabulary]
    noise: Tensor,  # [rows] float64, in [0, 1)
) -> Tensor:  # [rows] int64; -1 where the logits are not finite
    """Draw one id per row: the first whose cumulated probability exceeds the row's noise."""
    drawn = []
    for first in range(0, len(logits), DRAWN_ROWS):
        rows = slice(first, first + DRAWN_ROWS)
        cumulated = logits[rows].double().softmax(-1).cumsum(-1)
        total = cumulated[:, -1:]
        ids = torch.searchsorted(cumulated, noise[rows, None] * total, right=True)
        ids = ids.clamp_(max=logits.shape[1] - 1).where(total.isfinite(), -1)
        drawn.append(ids[:, 0])
    return torch.cat(drawn)
