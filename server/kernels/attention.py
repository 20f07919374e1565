"""The arguments of paged attention, the same on every device. Knows tensors and positions; no model and no request."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParams:
    """The options that a model passes to attention beside queries, keys and values."""

    scaling: float | None  # None is ``key_dim ** -0.5``
    window: int | None  # keys that a token sees, itself included; None is all
    softcap: float | None  # scores s become ``softcap * tanh(s / softcap)``
    sinks: Tensor | None  # [heads]: a score per head that enters the softmax and has no value


@dataclass(frozen=True, slots=True, eq=False)
class AttentionGroup:
    """Sequences of a step with equally many new tokens, for one call. The cache has the new tokens' keys."""

    row_index: Tensor  # [sequences, new tokens] int64: rows of the flat batch
    page_table: Tensor  # [sequences, pages] int64, padded with any page
    positions: Tensor  # [sequences, new tokens] int64
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by window, made on first use

    def mask(self, num_keys: int, window: int | None) -> Tensor:  # [sequences, 1, new tokens, keys] bool
        """Return the keys that each token sees: those up to its own position, at most `window` of them."""
        if window not in self.masks:
            keys = torch.arange(num_keys, device=self.positions.device)
            sees = keys <= self.positions[..., None]
            if window is not None:
                sees &= keys > self.positions[..., None] - window
            self.masks[window] = sees[:, None]
        return self.masks[window]
