"""The tables of a batch's deltas, stacked as kernels take them. Knows deltas and hook points; no tokens or requests.

A layer's cost in Python must not grow with the number of variants. So each delta's addresses are put into one table
when it first runs, and the tables of a batch are stacked once per tuple of deltas: consecutive decode steps mostly run
the same deltas and reuse the stack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from server.deltas.resident import MatrixView, PlaneView, ResidentDelta

Deltas = tuple[ResidentDelta, ...]


@dataclass(frozen=True, slots=True)
class HookPoint:
    """A layer of the model whose matrix deltas may change."""

    matrix: Callable[[ResidentDelta], MatrixView | None]
    # True for a delta with added rows, a tensor stored whole or a head bias here. Further planes and a residual
    # are found without it.
    needs_more_than_planes: Callable[[ResidentDelta], bool]


@dataclass(frozen=True, slots=True)
class _DeltaTable:
    """The planes of one delta at all hook points."""

    # [hook points, 3] int64 on the CPU: addresses of the first plane, zeros if there is none.
    plane_ptrs: Tensor
    with_planes: frozenset[int]  # hook points with a first plane
    beyond_first: frozenset[int]  # hook points that need more than the first plane's product


@dataclass(frozen=True, slots=True, eq=False)
class StackedTables:
    """The tables of a batch's deltas, stacked in the order of their groups."""

    deltas: Deltas
    plane_ptrs: tuple[Tensor, ...]  # by hook point: [groups, 3] int64 on the device
    # Hook points where any delta has a plane; a tensor stored whole does not count.
    with_planes: frozenset[int]
    # By hook point: the groups that need more than the first plane's product, those with a whole tensor included.
    beyond_first: tuple[tuple[int, ...], ...]
    _vectors: dict[str, Tensor | None] = field(default_factory=dict)

    def vectors(self, name: str, base: Tensor) -> Tensor | None:
        """Stack a vector parameter of the base and of each group, in the base's dtype.

        Returns:
            ``[1 + groups, features]``, or None if no delta changes it.
        """
        if name not in self._vectors:
            own = [delta.whole.get(name) for delta in self.deltas]
            rows = [base if value is None else value.to(base.dtype) for value in (None, *own)]
            self._vectors[name] = torch.stack(rows) if any(value is not None for value in own) else None
        return self._vectors[name]


class HookPoints:
    """All hook points of a model, and the tables of deltas that have run. Used on the engine thread alone."""

    def __init__(self) -> None:
        self._points: list[HookPoint] = []
        self._tables: WeakKeyDictionary[ResidentDelta, _DeltaTable] = WeakKeyDictionary()

    def add(self, point: HookPoint) -> int:
        """Register a hook point while hooks are attached, and return its index."""
        self._points.append(point)
        return len(self._points) - 1

    def stack(self, deltas: Deltas) -> StackedTables:
        """Stack the tables of deltas, which must be alive (`ResidentDelta.check_alive`)."""
        tables = [self._table(delta) for delta in deltas]
        beyond_first = tuple(
            tuple(group for group, table in enumerate(tables) if index in table.beyond_first)
            for index in range(len(self._points))
        )
        plane_ptrs = torch.stack([table.plane_ptrs for table in tables], dim=1)
        plane_ptrs = plane_ptrs.to(deltas[0].slot.memory.device)
        with_planes = frozenset[int]().union(*(table.with_planes for table in tables))
        return StackedTables(deltas, plane_ptrs.unbind(), with_planes, beyond_first)

    def _table(self, delta: ResidentDelta) -> _DeltaTable:
        if (table := self._tables.get(delta)) is None:
            matrices = [point.matrix(delta) for point in self._points]
            plane_ptrs = [
                (0, 0, 0) if matrix is None else plane_pointers(matrix.planes[0]) for matrix in matrices
            ]
            beyond_first = [
                index
                for index, (point, matrix) in enumerate(zip(self._points, matrices, strict=True))
                if point.needs_more_than_planes(delta) or (matrix is not None and not matrix.is_one_plane)
            ]
            table = _DeltaTable(
                torch.tensor(plane_ptrs, dtype=torch.int64).view(-1, 3),
                frozenset(index for index, matrix in enumerate(matrices) if matrix is not None),
                frozenset(beyond_first),
            )
            self._tables[delta] = table
        return table


def plane_pointers(plane: PlaneView) -> tuple[int, int, int]:
    """Return the addresses of a plane's signs, `factor_out` and `factor_in`, the last 0 if there is none."""
    factor_in = 0 if plane.factor_in is None else plane.factor_in.data_ptr()
    return plane.signs.data_ptr(), plane.factor_out.data_ptr(), factor_in
