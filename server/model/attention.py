"""Attention over a paged KV cache, for every transformers model that looks up its attention function by name.

Owns the cache's tensors and the metadata of the running step. Knows pages and positions; no requests and no deltas.
Each attention module holds a reference to this object: not every architecture passes extra arguments down to attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from deltastore.errors import NotServable
from server.kernels.reference import AttentionGroup, AttentionParams

# The name of the function in transformers' registry of attention implementations.
IMPLEMENTATION = "peraxis_paged"
# The attribute of an attention module that holds its `PagedAttention`.
ATTRIBUTE = "peraxis_attention"
# Single-token sequences are padded to at most this many times their own number of pages.
MAX_PADDING = 2


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence that a step computes."""

    start: int  # position of the first token
    num_tokens: int
    pages: Sequence[int]  # the sequence's page table, up to and including these tokens


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """The cache positions of one step's tokens, and the sequences whose keys they attend to."""

    slot_mapping: Tensor  # [tokens] int64: page * page_tokens + offset in the page
    groups: Sequence[AttentionGroup]

    @classmethod
    def of(cls, chunks: Sequence[Chunk], page_tokens: int, device: torch.device) -> AttentionMetadata:
        """Build the metadata of chunks that follow each other in the flat batch."""
        slot_mapping: list[int] = []
        first_rows: list[int] = []
        for chunk in chunks:
            first_rows.append(len(slot_mapping))
            if chunk.num_tokens == 1:
                # A step that decodes has hundreds of these.
                slot = chunk.pages[chunk.start // page_tokens] * page_tokens + chunk.start % page_tokens
                slot_mapping.append(slot)
                continue
            slot_mapping += [
                chunk.pages[position // page_tokens] * page_tokens + position % page_tokens
                for position in range(chunk.start, chunk.start + chunk.num_tokens)
            ]
        # A kernel reads no padding, so it takes sequences of all lengths together.
        max_padding = None if _single_token_kernel(device.type) else MAX_PADDING
        groups = [_attention_group(own, device) for own in _grouped(chunks, first_rows, max_padding)]
        return cls(torch.tensor(slot_mapping, device=device), groups)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of one token's keys and values in one layer, and how many heads read them."""

    num_heads: int
    key_dim: int
    value_dim: int
    num_query_heads: int


class PagedAttention:
    """The KV cache of one model and the attention function that its layers call."""

    def __init__(self, model: PreTrainedModel, page_tokens: int) -> None:
        """Replace the attention function of `model`. `allocate` must follow before a step runs."""
        self.page_tokens = page_tokens
        self.shapes: dict[int, LayerShape] = {}  # by layer; filled by the first forward pass without a cache
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._metadata: AttentionMetadata | None = None
        self._dtype, self._device = model.dtype, model.device
        AttentionInterface.register(IMPLEMENTATION, _attend)
        for module in model.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                setattr(module, ATTRIBUTE, self)
        model.set_attn_implementation(IMPLEMENTATION)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        size = torch.empty((), dtype=self._dtype).element_size()
        return size * sum(s.num_heads * (s.key_dim + s.value_dim) for s in self.shapes.values())

    @property
    def macs_per_context_token(self) -> int:
        """Multiplications and additions with which one token attends to one before it, in all layers."""
        return sum(s.num_query_heads * (s.key_dim + s.value_dim) for s in self.shapes.values())

    def allocate(self, num_pages: int) -> None:
        """Allocate the cache, all zeros. Frees an earlier one first."""
        self._layers = {}
        self._layers = {
            layer: (
                self._zeros(num_pages, shape.num_heads, shape.key_dim),
                self._zeros(num_pages, shape.num_heads, shape.value_dim),
            )
            for layer, shape in self.shapes.items()
        }

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages before another sequence uses them: masked values must be finite and of no other sequence."""
        if not pages:
            return
        index = torch.tensor(pages, device=self._device)
        for keys, values in self._layers.values():
            keys.index_fill_(0, index, 0)
            values.index_fill_(0, index, 0)

    @contextmanager
    def step(self, metadata: AttentionMetadata) -> Iterator[None]:
        """Attend according to `metadata` while the model runs."""
        self._metadata = metadata
        try:
            yield
        finally:
            self._metadata = None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams
    ) -> Tensor:
        """Store one layer's new keys and values, then attend to all keys of each sequence.

        Outside of `step`, attend to one whole sequence without a cache and record the layer's shape.

        Args:
            layer: index of the layer.
            query: ``[1, heads, tokens, key_dim]``.
            key: ``[1, kv heads, tokens, key_dim]``.
            value: ``[1, kv heads, tokens, value_dim]``.
            params: the model's options.

        Returns:
            ``[1, tokens, heads, value_dim]``.
        """
        if self._metadata is None:
            self.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3], query.shape[1])
            return _attend_uncached(query, key, value, params)
        keys, values = self._layers[layer]
        slot_mapping = self._metadata.slot_mapping
        keys.flatten(0, 1).index_copy_(0, slot_mapping, key[0].transpose(0, 1))
        values.flatten(0, 1).index_copy_(0, slot_mapping, value[0].transpose(0, 1))
        by_row = query[0].transpose(0, 1)
        output = by_row.new_empty(*by_row.shape[:2], value.shape[3])
        kernel = _kernel_for(query, key, value)
        for group in self._metadata.groups:
            if kernel is not None and group.row_index.shape[1] == 1:
                kernel.attend(output, by_row, (keys, values), group, params)
            else:
                rows = group.row_index
                output[rows] = _attend_gathered(by_row[rows], keys, values, group, params)
        return output[None]

    def _zeros(self, num_pages: int, num_heads: int, dim: int) -> Tensor:
        shape = (num_pages, self.page_tokens, num_heads, dim)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls. `ignored` holds dropout and other training options."""
    paged = getattr(module, ATTRIBUTE, None)
    layer = getattr(module, "layer_idx", None)
    if paged is None or layer is None:
        raise NotServable(f"{type(module).__name__} does not know which layer it is of: it cannot be served")
    return paged.attend(
        layer, query, key, value, AttentionParams(scaling, sliding_window, softcap, s_aux)
    ), None


@cache
def _single_token_kernel(device_type: str) -> ModuleType | None:
    """Return the kernels for sequences with one new token on a device; None where torch attends over gathered pages."""
    if device_type == "cpu":
        # A server on CUDA runs without numba.
        from server.kernels import attention_cpu

        return attention_cpu
    if device_type == "cuda" and find_spec("triton") is not None:
        # A server on the CPU runs without Triton.
        from server.kernels import attention_cuda

        return attention_cuda
    return None


def _kernel_for(query: Tensor, key: Tensor, value: Tensor) -> ModuleType | None:
    """Return the single-token kernels if they support one layer's heads, each [1, heads, tokens, dim]."""
    kernel = _single_token_kernel(query.device.type)
    return kernel if kernel is not None and kernel.serves(query, key, value) else None


def _attend_uncached(query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
    """Attend to one whole sequence, and compile the kernels that later steps need for such heads."""
    positions = torch.arange(query.shape[2], device=query.device)[None]
    mask = _mask(AttentionGroup(positions, positions, positions), query.shape[2], params.window)
    if (kernel := _kernel_for(query, key, value)) is not None:
        kernel.prepare(*(part[0].transpose(0, 1) for part in (query, key, value)), params)
    return _attention(query, key, value, mask, params).transpose(1, 2)


def _attend_gathered(
    query: Tensor,  # [sequences, new tokens, heads, key_dim]
    keys: Tensor,  # [pages, page_tokens, kv heads, key_dim]
    values: Tensor,  # [pages, page_tokens, kv heads, value_dim]
    group: AttentionGroup,
    params: AttentionParams,
) -> Tensor:  # [sequences, new tokens, heads, value_dim]
    """Attend to copies of the sequences' pages."""
    key, value = (part[group.page_table].flatten(1, 2).transpose(1, 2) for part in (keys, values))
    mask = _mask(group, key.shape[2], params.window)
    return _attention(query.transpose(1, 2), key, value, mask, params).transpose(1, 2)


def _mask(group: AttentionGroup, num_keys: int, window: int | None) -> Tensor:
    """Return the keys that each token sees: those up to its own position, at most `window` of them.

    Returns:
        [sequences, 1, new tokens, keys] bool.
    """
    if window not in group.masks:
        keys = torch.arange(num_keys, device=group.positions.device)
        sees = keys <= group.positions[..., None]
        if window is not None:
            sees &= keys > group.positions[..., None] - window
        group.masks[window] = sees[:, None]
    return group.masks[window]


def _attention(
    query: Tensor,  # [sequences, heads, new tokens, key_dim]
    key: Tensor,  # [sequences, kv heads, keys, key_dim]
    value: Tensor,  # [sequences, kv heads, keys, value_dim]
    mask: Tensor,  # [sequences, 1, new tokens, keys] bool
    params: AttentionParams,
) -> Tensor:  # [sequences, heads, new tokens, value_dim]
    if params.softcap is None and params.sinks is None:
        return _torch_attention(query, key, value, mask, params)
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1).float(), value.repeat_interleave(repeats, 1).float()
    scaling = query.shape[-1] ** -0.5 if params.scaling is None else params.scaling
    scores = query.float() @ key.transpose(2, 3) * scaling
    if params.softcap is not None:
        scores = (scores / params.softcap).tanh() * params.softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if params.sinks is not None:
        sinks = params.sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).to(query.dtype)


def _torch_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, params: AttentionParams
) -> Tensor:
    """Attend with torch. In decoding, the heads that share a key head are the rows of one product."""
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    if query.shape[2] == 1 and num_heads != num_kv_heads:
        shared = query.view(len(query), num_kv_heads, -1, query.shape[3])
        out = nn.functional.scaled_dot_product_attention(shared, key, value, mask, scale=params.scaling)
        return out.flatten(1, 2)[:, :, None]
    return nn.functional.scaled_dot_product_attention(
        query, key, value, mask, scale=params.scaling, enable_gqa=num_heads != num_kv_heads
    )


def _grouped(
    chunks: Sequence[Chunk], first_rows: Sequence[int], max_padding: int | None
) -> list[list[tuple[int, Chunk]]]:
    """Group chunks, each with its first row, that attend in one call: single tokens of sequences of similar length."""
    items = list(zip(first_rows, chunks, strict=True))
    single = sorted((item for item in items if item[1].num_tokens == 1), key=lambda item: len(item[1].pages))
    groups: list[list[tuple[int, Chunk]]] = []
    for item in single:
        if groups and (
            max_padding is None or len(item[1].pages) <= max_padding * len(groups[-1][0][1].pages)
        ):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups + [[item] for item in items if item[1].num_tokens > 1]


def _attention_group(chunks: Sequence[tuple[int, Chunk]], device: torch.device) -> AttentionGroup:
    width = max(len(chunk.pages) for _, chunk in chunks)
    page_table = [[*chunk.pages, *[0] * (width - len(chunk.pages))] for _, chunk in chunks]
    num_tokens = chunks[0][1].num_tokens
    return AttentionGroup(
        torch.tensor([[row + i for i in range(num_tokens)] for row, _ in chunks], device=device),
        torch.tensor(page_table, device=device),
        torch.tensor([[chunk.start + i for i in range(num_tokens)] for _, chunk in chunks], device=device),
    )
