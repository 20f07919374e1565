"""The rows of a flat batch by delta. The model runner sets them for each step; every layer reads them.

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
from server.deltas.stacked import HookPoints, StackedTables


@dataclass(frozen=True, slots=True)
class DeltaGroup:
    """A contiguous run of rows that one delta applies to."""

    delta: ResidentDelta
    rows: slice  # of the flat batch
    logit_rows: slice  # of the output head's input, which has only the rows whose logits are computed


def delta_groups(
    deltas: Sequence[ResidentDelta | None], num_tokens: Sequence[int], num_logits: Sequence[int]
) -> tuple[DeltaGroup, ...]:
    """Group sequences that follow each other in the flat batch.

    Args:
        deltas: each sequence's delta, None for the base.
        num_tokens: each sequence's tokens in this step.
        num_logits: each sequence's rows whose logits are computed.

    Returns:
        Groups with ascending and disjoint rows.
    """
    groups: list[DeltaGroup] = []
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
        groups.append(DeltaGroup(delta, rows, logit_rows))
    return tuple(groups)


class StepDeltas:
    """The groups of the running step and the tables of their deltas, as layers read them."""

    def __init__(self, groups: tuple[DeltaGroup, ...], num_rows: int, tables: StackedTables) -> None:
        """`num_rows` counts all rows of the flat batch, the base's included."""
        device = groups[0].delta.slot.memory.device
        self.groups = groups
        self.tables = tables
        self.ranges = _ranges([group.rows for group in groups], device)  # [groups, 2] int32
        self.logit_ranges = _ranges([group.logit_rows for group in groups], device)  # [groups, 2] int32
        self._num_rows = num_rows
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
        vectors = self.tables.vectors(name, base)
        return base if vectors is None else vectors.index_select(0, self.group_of_row)


class BatchContext:
    """The object through which layers find the deltas of the running step. Used on the engine thread alone."""

    def __init__(self) -> None:
        self.hook_points = HookPoints()
        self.current: StepDeltas | None = None  # None if all rows are the base's
        self._tables: StackedTables | None = None  # of the last step with deltas

    @contextmanager
    def step(
        self,
        deltas: Sequence[ResidentDelta | None],
        num_tokens: Sequence[int],
        num_logits: Sequence[int],
    ) -> Iterator[None]:
        """Apply deltas to the sequences of a flat batch while the model runs. Arguments are those of `delta_groups`.

        Raises:
            EngineFailed: the slot of one of the deltas holds other bytes by now.
        """
        groups = delta_groups(deltas, num_tokens, num_logits)
        for group in groups:
            group.delta.check_alive()
        if groups:
            self.current = StepDeltas(groups, sum(num_tokens), self._stack(groups))
        try:
            yield
        finally:
            self.current = None

    def _stack(self, groups: tuple[DeltaGroup, ...]) -> StackedTables:
        # Deltas compare by identity and a reloaded delta is another object, so equal tuples name the same memory.
        deltas = tuple(group.delta for group in groups)
        if self._tables is None or self._tables.deltas != deltas:
            self._tables = self.hook_points.stack(deltas)
        return self._tables


def _ranges(rows: list[slice], device: torch.device) -> Tensor:
    return torch.tensor([(own.start, own.stop) for own in rows], dtype=torch.int32).to(device)
