"""Which deltas a batch is made of, as the tables that layers hand to kernels. Knows deltas and layers; no tokens.

What a layer costs in Python must not grow with the number of variants, so all that can be known about a delta is put
into one table when it first runs, and the tables of a batch's deltas are stacked once per *composition*: the tuple of
its deltas. Decode steps repeat their composition, so they find it made.
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
    """A place in the model where deltas may have a coded matrix."""

    matrix: Callable[[ResidentDelta], MatrixView | None]
    is_special: Callable[[ResidentDelta], bool]  # besides coded matrices that are more than one plane


@dataclass(frozen=True, slots=True)
class _DeltaTable:
    """What one delta has at each site."""

    places: Tensor  # [sites, 3] int64 on the CPU: the first plane's addresses, zeros where there is none
    changed: frozenset[int]  # sites with a first plane
    special: frozenset[int]  # sites that need more than the first plane's product


@dataclass(frozen=True, slots=True, eq=False)
class Composition:
    """The deltas of a batch in their order, as layers use them."""

    deltas: Deltas
    places: tuple[Tensor, ...]  # of each site: [groups, 3] int64 on the device
    changed: frozenset[int]  # sites where any delta has a plane
    special: tuple[
        tuple[int, ...], ...
    ]  # of each site: the groups that need more than the first plane's product
    _vectors: dict[str, Tensor | None] = field(default_factory=dict)

    def vectors(self, name: str, base: Tensor) -> Tensor | None:
        """A vector parameter of the base and of each group, in that order, in the base's dtype.

        Returns:
            Tensor: [1 + groups, features], or None where no delta changes it.
        """
        if name not in self._vectors:
            own = [delta.whole.get(name) for delta in self.deltas]
            rows = [base if value is None else value.to(base.dtype) for value in (None, *own)]
            self._vectors[name] = torch.stack(rows) if any(value is not None for value in own) else None
        return self._vectors[name]


class HookPoints:
    """All places where deltas apply, and the tables of deltas that were seen. The engine thread alone touches it."""

    def __init__(self) -> None:
        self._sites: list[HookPoint] = []
        self._tables: WeakKeyDictionary[ResidentDelta, _DeltaTable] = WeakKeyDictionary()

    def add(self, site: HookPoint) -> int:
        """Register a site while the model is built. Returns its number."""
        self._sites.append(site)
        return len(self._sites) - 1

    def compose(self, deltas: Deltas) -> Composition:
        """Stack the tables of deltas. Only for deltas whose slots are theirs still."""
        tables = [self._table(delta) for delta in deltas]
        special = tuple(
            tuple(group for group, table in enumerate(tables) if number in table.special)
            for number in range(len(self._sites))
        )
        places = torch.stack([table.places for table in tables], dim=1).to(deltas[0].slot.memory.device)
        return Composition(
            deltas, places.unbind(), frozenset().union(*(table.changed for table in tables)), special
        )

    def _table(self, delta: ResidentDelta) -> _DeltaTable:
        if (table := self._tables.get(delta)) is None:
            matrices = [site.matrix(delta) for site in self._sites]
            places = [(0, 0, 0) if matrix is None else address(matrix.planes[0]) for matrix in matrices]
            special = [
                number
                for number, (site, matrix) in enumerate(zip(self._sites, matrices, strict=True))
                if site.is_special(delta) or (matrix is not None and not matrix.is_one_plane)
            ]
            table = _DeltaTable(
                torch.tensor(places, dtype=torch.int64).view(-1, 3),
                frozenset(number for number, matrix in enumerate(matrices) if matrix is not None),
                frozenset(special),
            )
            self._tables[delta] = table
        return table


def address(plane: PlaneView) -> tuple[int, int, int]:
    """Where a plane lies, as kernels take it."""
    factor_in = 0 if plane.factor_in is None else plane.factor_in.data_ptr()
    return plane.signs.data_ptr(), plane.factor_out.data_ptr(), factor_in
