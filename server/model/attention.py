"""Attention over a paged key-value cache, for any model of the library that looks its attention function up by name.

Owns the cache's tensors and the layout of the step that runs. Knows pages and positions; nothing of requests or deltas.
Every layer of a model finds this object on its attention module, so nothing has to travel through the model's code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from server.errors import NotServable

NAME = "peraxis_paged"  # of the function, among the library's
PLACE = "peraxis_attention"  # where an attention module keeps its `PagedAttention`
CROWDED = 2  # sequences are padded to at most so many times their own pages


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence that a step computes."""

    start: int  # the first one's position
    num_tokens: int
    pages: Sequence[int]  # of the whole sequence up to and with these tokens


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Rows of one step that attend together: of sequences with as many new tokens each."""

    rows: Tensor  # [sequences, new tokens] int64: rows of the flat batch
    table: Tensor  # [sequences, pages] int64
    positions: Tensor  # [sequences, new tokens] int64
    masks: dict[int | None, Tensor] = field(
        default_factory=dict
    )  # by sliding window, made when first asked for

    def mask(self, num_keys: int, window: int | None) -> Tensor:  # [sequences, 1, new tokens, keys] bool
        """Which keys each token sees: those up to its own position, `window` of them at most."""
        if window not in self.masks:
            keys = torch.arange(num_keys, device=self.positions.device)
            sees = keys <= self.positions[..., None]
            if window is not None:
                sees &= keys > self.positions[..., None] - window
            self.masks[window] = sees[:, None]
        return self.masks[window]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where one step's tokens go in the cache, and what they attend to."""

    places: Tensor  # [tokens] int64: page times its size plus offset
    spans: Sequence[Span]

    @classmethod
    def of(cls, chunks: Sequence[Chunk], page_tokens: int, device: torch.device) -> Layout:
        """The layout of chunks that follow each other in the flat batch."""
        places: list[int] = []
        firsts: list[int] = []
        for chunk in chunks:
            firsts.append(len(places))
            places += [
                chunk.pages[position // page_tokens] * page_tokens + position % page_tokens
                for position in range(chunk.start, chunk.start + chunk.num_tokens)
            ]
        crowded = None if _single_token_kernel(device.type) else CROWDED  # a kernel reads no padding
        spans = [_span(group, device) for group in _alike(chunks, firsts, crowded)]
        return cls(torch.tensor(places, device=device), spans)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps of a token."""

    num_heads: int
    key_dim: int
    value_dim: int


class PagedAttention:
    """The cache of one model and the function that its layers call."""

    def __init__(self, model: PreTrainedModel, page_tokens: int) -> None:
        """Make `model` use this; NotServable where its layers do not look their attention up."""
        self.page_tokens = page_tokens
        self.shapes: dict[int, LayerShape] = {}  # by layer, in order of calls; known after the first pass
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._layout: Layout | None = None
        self._dtype, self._device = model.dtype, model.device
        AttentionInterface.register(NAME, _attend)
        for module in model.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                setattr(module, PLACE, self)
        model.set_attn_implementation(NAME)

    @property
    def bytes_per_token(self) -> int:
        """Of all layers' keys and values."""
        size = torch.empty((), dtype=self._dtype).element_size()
        return size * sum(s.num_heads * (s.key_dim + s.value_dim) for s in self.shapes.values())

    def allocate(self, num_pages: int) -> None:
        """Take the cache's memory, all zeros."""
        self._layers = {}  # given back first
        self._layers = {
            layer: (
                self._zeros(num_pages, shape.num_heads, shape.key_dim),
                self._zeros(num_pages, shape.num_heads, shape.value_dim),
            )
            for layer, shape in self.shapes.items()
        }

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages that change hands: what masks hide must be finite, and nobody's."""
        if not pages:
            return
        index = torch.tensor(pages, device=self._device)
        for keys, values in self._layers.values():
            keys.index_fill_(0, index, 0)
            values.index_fill_(0, index, 0)

    @contextmanager
    def step(self, layout: Layout) -> Iterator[None]:
        """Attend by `layout` while the model runs."""
        self._layout = layout
        try:
            yield
        finally:
            self._layout = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """One layer: keep the new keys and values, then attend to all that each sequence has.

        Args:
            query: ``[1, heads, tokens, key_dim]``.
            key: ``[1, kv heads, tokens, key_dim]``.
            value: ``[1, kv heads, tokens, value_dim]``.

        Returns:
            ``[1, tokens, heads, value_dim]``.
        """
        if self._layout is None:  # a pass that looks, with one sequence and no cache
            self.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
            positions = torch.arange(query.shape[2], device=query.device)
            span = Span(positions[None], positions[None], positions[None])
            mask = span.mask(len(positions), options.window)
            if (kernel := _kernel_for(query, key, value)) is not None:
                kernel.prepare(*(part[0].transpose(0, 1) for part in (query, key, value)), options)
            return _attention(query, key, value, mask, options).transpose(1, 2)
        keys, values = self._layers[layer]
        places = self._layout.places
        keys.flatten(0, 1).index_copy_(0, places, key[0].transpose(0, 1))
        values.flatten(0, 1).index_copy_(0, places, value[0].transpose(0, 1))
        by_row = query[0].transpose(0, 1)
        output = by_row.new_empty(*by_row.shape[:2], value.shape[3])
        kernel = _kernel_for(query, key, value)
        for span in self._layout.spans:
            if kernel is not None and span.rows.shape[1] == 1:
                kernel.attend(output, by_row, (keys, values), span, options)
            else:
                output[span.rows] = _over_gathered(by_row[span.rows], keys, values, span, options)
        return output[None]

    def _zeros(self, num_pages: int, num_heads: int, dim: int) -> Tensor:
        shape = (num_pages, self.page_tokens, num_heads, dim)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """What a model hands to attention beside queries, keys and values."""

    scaling: float | None  # None is one over the root of the heads' size
    window: int | None  # keys that a token sees, itself included
    softcap: float | None  # scores s become ``softcap * tanh(s / softcap)``
    sinks: Tensor | None  # [heads]: a score per head that takes weight and gives nothing


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
    **ignored: Any,  # dropout and the like, which serving has none of
) -> tuple[Tensor, None]:
    """What the library calls in place of its own attention."""
    paged = getattr(module, PLACE, None)
    layer = getattr(module, "layer_idx", None)
    if paged is None or layer is None:
        raise NotServable(f"{type(module).__name__} does not know which layer it is of: it cannot be served")
    return paged.attend(layer, query, key, value, Options(scaling, sliding_window, softcap, s_aux)), None


@cache
def _single_token_kernel(device_type: str) -> ModuleType | None:
    """What attends with one token of each sequence on a kind of device; None where gathered pages and torch do."""
    if device_type == "cpu":
        from server.kernels import attention_cpu  # compiles, which a server on another device never needs

        return attention_cpu
    if device_type == "cuda" and find_spec("triton") is not None:
        from server.kernels import attention_cuda  # imports Triton, which a server on a CPU need not have

        return attention_cuda
    return None


def _kernel_for(query: Tensor, key: Tensor, value: Tensor) -> ModuleType | None:
    """The same for the heads of one layer, [1, heads, tokens, dim], which may be more than it takes."""
    kernel = _single_token_kernel(query.device.type)
    return kernel if kernel is not None and kernel.serves(query, key, value) else None


def _over_gathered(
    query: Tensor,  # [sequences, new tokens, heads, key_dim]
    keys: Tensor,  # [pages, page_tokens, kv heads, key_dim]
    values: Tensor,  # [pages, page_tokens, kv heads, value_dim]
    span: Span,
    options: Options,
) -> Tensor:  # [sequences, new tokens, heads, value_dim]
    """Attention over copies of the sequences' pages."""
    key, value = (part[span.table].flatten(1, 2).transpose(1, 2) for part in (keys, values))
    mask = span.mask(key.shape[2], options.window)
    return _attention(query.transpose(1, 2), key, value, mask, options).transpose(1, 2)


def _attention(
    query: Tensor,  # [sequences, heads, new tokens, key_dim]
    key: Tensor,  # [sequences, kv heads, keys, key_dim]
    value: Tensor,  # [sequences, kv heads, keys, value_dim]
    mask: Tensor,  # [sequences, 1, new tokens, keys] bool
    options: Options,
) -> Tensor:  # [sequences, heads, new tokens, value_dim]
    if options.softcap is None and options.sinks is None:
        return _by_library(query, key, value, mask, options)
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1).float(), value.repeat_interleave(repeats, 1).float()
    scaling = query.shape[-1] ** -0.5 if options.scaling is None else options.scaling
    scores = query.float() @ key.transpose(2, 3) * scaling
    if options.softcap is not None:
        scores = (scores / options.softcap).tanh() * options.softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).to(query.dtype)


def _by_library(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: Options) -> Tensor:
    """Heads that share a key head are rows of one product where there is one new token, as in decoding."""
    num_heads, num_shared = query.shape[1], key.shape[1]
    if query.shape[2] == 1 and num_heads != num_shared:
        shared = query.view(len(query), num_shared, -1, query.shape[3])
        out = nn.functional.scaled_dot_product_attention(shared, key, value, mask, scale=options.scaling)
        return out.flatten(1, 2)[:, :, None]
    return nn.functional.scaled_dot_product_attention(
        query, key, value, mask, scale=options.scaling, enable_gqa=num_heads != num_shared
    )


def _alike(
    chunks: Sequence[Chunk], firsts: Sequence[int], crowded: int | None
) -> list[list[tuple[int, Chunk]]]:
    """Chunks, each with its first row, by what can attend together: single tokens of sequences of like length."""
    alone = [[(first, chunk)] for first, chunk in zip(firsts, chunks, strict=True) if chunk.num_tokens > 1]
    single = [(first, chunk) for first, chunk in zip(firsts, chunks, strict=True) if chunk.num_tokens == 1]
    single.sort(key=lambda item: len(item[1].pages))
    together: list[list[tuple[int, Chunk]]] = []
    for item in single:
        if together and (crowded is None or len(item[1].pages) <= crowded * len(together[-1][0][1].pages)):
            together[-1].append(item)
        else:
            together.append([item])
    return together + alone


def _span(group: Sequence[tuple[int, Chunk]], device: torch.device) -> Span:
    width = max(len(chunk.pages) for _, chunk in group)
    table = [[*chunk.pages, *[0] * (width - len(chunk.pages))] for _, chunk in group]
    count = group[0][1].num_tokens
    return Span(
        torch.tensor([[first + i for i in range(count)] for first, _ in group], device=device),
        torch.tensor(table, device=device),
        torch.tensor([[chunk.start + i for i in range(count)] for _, chunk in group], device=device),
    )
