"""Which tokens of a flat batch belong to which delta. Set by the runner before each step, read by every layer.

Tokens are sorted by delta, so that each delta is one contiguous run of rows; rows of no group belong to the base.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from server.deltas.composition import Composition, HookPoints
from server.deltas.resident import ResidentDelta


@dataclass(frozen=True, slots=True)
class Group:
    """A run of rows that one delta applies to."""

    delta: ResidentDelta
    rows: slice
    kept: slice  # the same sequences' rows of the output head, which sees only the rows whose logits are kept


@dataclass(frozen=True, slots=True)
class DeltaBatch:
    """One step's rows."""

    groups: tuple[Group, ...] = ()
    num_rows: int = 0  # the base's included

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
        groups: list[Group] = []
        row = kept = 0
        for delta, tokens, logits in zip(deltas, num_tokens, num_kept, strict=True):
            rows, own = slice(row, row + tokens), slice(kept, kept + logits)
            row, kept = rows.stop, own.stop
            if delta is None or tokens == 0:
                continue
            if groups and groups[-1].delta is delta and groups[-1].rows.stop == rows.start:
                before = groups.pop()
                rows, own = slice(before.rows.start, rows.stop), slice(before.kept.start, own.stop)
            groups.append(Group(delta, rows, own))
        return cls(tuple(groups), row)


class Step:
    """What layers need of the batch that is running."""

    def __init__(self, batch: DeltaBatch, composition: Composition) -> None:
        device = composition.deltas[0].slot.memory.device
        self.groups = batch.groups
        self.composition = composition
        self.ranges = _ranges([group.rows for group in batch.groups], device)  # [groups, 2] int32
        self.kept = _ranges([group.kept for group in batch.groups], device)  # [groups, 2] int32
        self._num_rows = batch.num_rows
        self._owners: Tensor | None = None

    @property
    def owners(self) -> Tensor:  # [rows] int64
        """Of each row: 0 for the base, 1 + its group's number for others."""
        if self._owners is None:
            owners = torch.zeros(self._num_rows, dtype=torch.int64)
            for number, group in enumerate(self.groups):
                owners[group.rows] = number + 1
            self._owners = owners.to(self.ranges.device)
        return self._owners

    def by_row(self, name: str, base: Tensor) -> Tensor:
        """A vector parameter in the base's dtype: [rows, features], or the base's where no delta changes it."""
        vectors = self.composition.vectors(name, base)
        return base if vectors is None else vectors.index_select(0, self.owners)


class BatchContext:
    """Where layers find the batch of the step that is running. The engine thread alone touches it."""

    def __init__(self) -> None:
        self.sites = HookPoints()
        self.current: Step | None = None  # None where all rows are the base's
        self._composition: Composition | None = None  # the last one

    @contextmanager
    def step(self, batch: DeltaBatch) -> Iterator[None]:
        """Make `batch` the current one while the model runs."""
        for group in batch.groups:
            group.delta.check_alive()
        self.current = Step(batch, self._compose(batch)) if batch.groups else None
        try:
            yield
        finally:
            self.current = None

    def _compose(self, batch: DeltaBatch) -> Composition:
        # Deltas compare by identity, and a slot that was given up has another one, so what is found is alive.
        deltas = tuple(group.delta for group in batch.groups)
        if self._composition is None or self._composition.deltas != deltas:
            self._composition = self.sites.compose(deltas)
        return self._composition


def _ranges(rows: list[slice], device: torch.device) -> Tensor:
    return torch.tensor([(own.start, own.stop) for own in rows], dtype=torch.int32).to(device)
