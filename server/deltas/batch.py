"""Which tokens of a flat batch belong to which delta. Set by the runner before each step, read by every layer.

Tokens are sorted by delta, so that each delta is one contiguous run of rows; rows of no group belong to the base.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from server.deltas.resident import ResidentDelta


@dataclass(frozen=True, slots=True)
class Group:
    """A run of rows that one delta applies to."""

    delta: ResidentDelta
    rows: slice


@dataclass(frozen=True, slots=True)
class DeltaBatch:
    """One step's rows. The output head sees only the rows whose logits are kept, hence a second grouping."""

    groups: tuple[Group, ...] = ()
    kept: tuple[Group, ...] = ()

    @classmethod
    def of(
        cls, deltas: Sequence[ResidentDelta | None], num_tokens: Sequence[int], num_kept: Sequence[int]
    ) -> DeltaBatch:
        """Group sequences that follow each other in the batch.

        Args:
            deltas: the delta of each sequence, None for the base.
            num_tokens: tokens of each sequence in this step.
            num_kept: how many logit rows of each sequence are computed.
        """
        return cls(_groups(deltas, num_tokens), _groups(deltas, num_kept))


class BatchContext:
    """Where layers find the batch of the step that is running. The engine thread alone touches it."""

    def __init__(self) -> None:
        self.batch = DeltaBatch()

    @contextmanager
    def step(self, batch: DeltaBatch) -> Iterator[None]:
        """Make `batch` the current one while the model runs."""
        for group in batch.groups:
            group.delta.check_alive()
        self.batch = batch
        try:
            yield
        finally:
            self.batch = DeltaBatch()


def spread(
    base: Tensor,  # [features]
    groups: Sequence[Group],
    name: str,
    num_rows: int,
) -> Tensor:  # [features], or [num_rows, features] where rows differ
    """A vector parameter by row: the base's, and each delta's own where it changed it."""
    changed = [(group, group.delta.whole[name]) for group in groups if name in group.delta.whole]
    if not changed:
        return base
    first, value = changed[0]
    if first.rows == slice(0, num_rows):
        return value
    rows = base.expand(num_rows, -1).clone()
    for group, value in changed:
        rows[group.rows] = value
    return rows


def _groups(deltas: Sequence[ResidentDelta | None], counts: Sequence[int]) -> tuple[Group, ...]:
    groups: list[Group] = []
    position = 0
    for delta, count in zip(deltas, counts, strict=True):
        rows = slice(position, position + count)
        position += count
        if delta is None or count == 0:
            continue
        if groups and groups[-1].delta is delta and groups[-1].rows.stop == rows.start:
            groups[-1] = Group(delta, slice(groups[-1].rows.start, rows.stop))
        else:
            groups.append(Group(delta, rows))
    return tuple(groups)


def add_rows(output: Tensor, rows: slice, delta: Tensor) -> None:
    """Add float32 `delta` to some rows of `output` in place, rounding once to its dtype."""
    output[rows] = torch.add(output[rows].float(), delta).to(output.dtype)
