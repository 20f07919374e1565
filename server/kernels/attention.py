"""What attention over a paged key-value cache is asked for; the same for every device."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Sequences(Protocol):
    """Which sequences attend, each with one new token."""

    @property
    def rows(self) -> Tensor: ...  # [sequences, 1] int64: rows of query and output
    @property
    def table(self) -> Tensor: ...  # [sequences, pages] int64, filled up with any page
    @property
    def positions(self) -> Tensor: ...  # [sequences, 1] int64: of the new token, whose key is in the cache


class Rules(Protocol):
    """What a model asks of attention."""

    @property
    def scaling(self) -> float | None: ...  # None is one over the root of the heads' size
    @property
    def window(self) -> int | None: ...  # keys that a token sees, itself included
    @property
    def softcap(self) -> float | None: ...  # scores s become ``softcap * tanh(s / softcap)``
    @property
    def sinks(self) -> Tensor | None: ...  # [heads]: a score per head that takes weight and gives nothing
