"""The rows of a flat batch by delta. The model runner sets them before each step; every layer reads them.

Sequences are sorted by delta, so each delta owns one contiguous run of rows. Rows of no group belong to the base.
Knows rows and deltas; no requests and no layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from server.deltas.resident import ResidentDelta
from server.deltas.stacked import HookPoints, StackedDeltas


@dataclass(frozen=True, slots=True)
class Group:
    """A contiguous run of rows that one delta applies to."""

    delta: ResidentDelta
    rows: slice  # of the flat batch
    logit_rows: slice  # of the output head's input, which has only the rows whose logits are computed


@dataclass(frozen=True, slots=True)
class DeltaBatch:
    """The groups of one step, ascending and disjoint."""

    groups: tuple[Group, ...] = ()
    num_rows: int = 0  # the base's included

    @classmethod
    def of(
        cls, deltas: Sequence[ResidentDelta | None], num_tokens: Sequence[int], num_logits: Sequence[int]
    ) -> DeltaBatch:
        """Group sequences that follow each other in the flat batch.

        Args:
            deltas: each sequence's delta, None for the base.
            num_tokens: each sequence's tokens in this step.
            num_logits: each sequence's rows whose logits are computed.
        """
        groups: list[Group] = []
        row = logit_row = 0
        for delta, tokens, logits in zip(deltas, num_tokens, num_logits, strict=True):
            rows, logit_rows = slice(row, row + tokens), slice(logit_row, logit_row + logits)
            row, logit_row = rows.stop, logit_rows.stop
            if delta is None or tokens == 0:
                continue
            if groups and groups[-1].delta is delta and groups[-1].rows.stop == rows.start:
                before = groups.pop()
                rows = slice(before.rows.start, rows.stop)
                logit_rows = slice(before.logit_rows.start, logit_rows.stop)
            groups.append(Group(delta, rows, logit_rows))
        return cls(tuple(groups), row)


class StepDeltas:
    """The deltas of the running step, as layers read them."""

    def __init__(self, batch: DeltaBatch, stacked: StackedDeltas) -> None:
        device = stacked.deltas[0].slot.memory.device
        self.groups = batch.groups
        self.stacked = stacked
        self.ranges = _ranges([group.rows for group in batch.groups], device)  # [groups, 2] int32
        self.logit_ranges = _ranges([group.logit_rows for group in batch.groups], device)  # [groups, 2] int32
        self._num_rows = batch.num_rows
        self._group_of_row: Tensor | None = None

    @property
    def group_of_row(self) -> Tensor:  # [rows] int64
        """The index of each row's group plus one; 0 is the base."""
        if self._group_of_row is None:
            group_of_row = torch.zeros(self._num_rows, dtype=torch.int64)
            for number, group in enumerate(self.groups):
                group_of_row[group.rows] = number + 1
            self._group_of_row = group_of_row.to(self.ranges.device)
        return self._group_of_row

    def by_row(self, name: str, base: Tensor) -> Tensor:
        """Return each row's value of a vector parameter, in the base's dtype.

        Args:
            name: of the parameter in the checkpoint.
            base: its value in the base, ``[features]``.

        Returns:
            ``[rows, features]``, or `base` itself if no delta of the step changes the parameter.
        """
        vectors = self.stacked.vectors(name, base)
        return base if vectors is None else vectors.index_select(0, self.group_of_row)


class BatchContext:
    """The object through which layers find the deltas of the running step. Used on the engine thread alone."""

    def __init__(self) -> None:
        self.hook_points = HookPoints()
        self.current: StepDeltas | None = None  # None if all rows are the base's
        self._stacked: StackedDeltas | None = None  # of the last step with deltas

    @contextmanager
    def step(self, batch: DeltaBatch) -> Iterator[None]:
        """Make `batch` the current one while the model runs.

        Raises:
            EngineFailed: the slot of one of its deltas holds other bytes by now.
        """
        for group in batch.groups:
            group.delta.check_alive()
        self.current = StepDeltas(batch, self._stack(batch)) if batch.groups else None
        try:
            yield
        finally:
            self.current = None

    def _stack(self, batch: DeltaBatch) -> StackedDeltas:
        # Deltas compare by identity and a reloaded delta is another object, so equal tuples name the same memory.
        deltas = tuple(group.delta for group in batch.groups)
        if self._stacked is None or self._stacked.deltas != deltas:
            self._stacked = self.hook_points.stack(deltas)
        return self._stacked


def _ranges(rows: list[slice], device: torch.device) -> Tensor:
    return torch.tensor([(own.start, own.stop) for own in rows], dtype=torch.int32).to(device)
