"""A delta in its slot as typed views, and the rows and tables of a batch of deltas that kernels read.

A layer's cost in Python must not grow with the number of variants. So each delta's addresses are put into one table
when it first runs, and the tables of a batch are stacked once per tuple of deltas: consecutive decode steps mostly run
the same deltas and reuse the stack.

The sequences of a batch are sorted by delta, so each delta owns one contiguous run of rows. Rows of no group belong to
the base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from deltastore.checkpoint import HEAD_SUFFIXES, TORCH_DTYPE
from deltastore.format.header import Header, TensorEntry
from deltastore.format.manifest import Manifest, MatrixParts, PlaneParts, part_names
from server.errors import EngineFailed


@dataclass(frozen=True, slots=True, eq=False)
class PlaneView:
    """One sign plane as kernels take it. `factor_out` is the scale of each row times the plane's gain."""

    signs: Tensor  # [out, ceil(in / 8)] uint8, in the slot
    factor_out: Tensor  # [out] float32
    factor_in: Tensor | None  # [in] float32


@dataclass(frozen=True, slots=True, eq=False)
class MatrixView:
    """A coded matrix: the sum of its planes and its low-rank residual, and the rows that the base lacks."""

    planes: tuple[PlaneView, ...]
    left: Tensor | None  # [out, rank] float16, in the slot
    right: Tensor | None  # [rank, in] float16, in the slot
    added: Tensor | None  # [added, in], in the slot: rows that the base lacks

    @property
    def num_base_rows(self) -> int:
        """Rows that the base has, too."""
        return len(self.planes[0].signs)

    @property
    def num_rows(self) -> int:
        """Rows that the variant has, including added ones."""
        return self.num_base_rows + (0 if self.added is None else len(self.added))

    @property
    def is_one_plane(self) -> bool:
        """True if the base's rows change by the first plane alone."""
        return len(self.planes) == 1 and self.left is None


@dataclass(frozen=True, slots=True)
class DeltaLayout:
    """The positions of an artifact's tensors in its device section."""

    digest: str
    tied: bool  # as in `ResidentDelta`
    head: str  # as in `ResidentDelta`
    matrices: Mapping[str, MatrixParts[TensorEntry]]
    whole: Mapping[str, TensorEntry]

    @classmethod
    def of(cls, header: Header, manifest: Manifest, digest: str) -> DeltaLayout:
        """Find the positions in the header of the artifact that `digest` names."""
        specs, entries = manifest.tensors, header.tensors
        return cls(
            digest,
            manifest.tied,
            next((name for name in specs if name.endswith(HEAD_SUFFIXES)), ""),
            {
                name: part_names(name, spec).map(entries.__getitem__)
                for name, spec in specs.items()
                if spec.codec == "onebit"
            },
            {name: entries[name] for name, spec in specs.items() if spec.codec == "whole"},
        )


class Slot:
    """Device memory for one delta. `generation` grows when the delta leaves, so that stale views of it are refused."""

    def __init__(self, index: int, memory: Tensor) -> None:
        self.index = index
        self.memory = memory  # [slot_bytes] uint8 on the device
        self.generation = 0


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ResidentDelta:
    """A delta that is complete in its slot: every chunk has been verified and copied."""

    digest: str
    tied: bool  # the output head is the input embedding
    head: str  # name of the changed head's tensor, which a tied base lacks; "" if there is none
    matrices: Mapping[str, MatrixView]
    whole: Mapping[str, Tensor]
    slot: Slot
    generation: int

    @classmethod
    def in_slot(cls, layout: DeltaLayout, slot: Slot) -> ResidentDelta:
        """Make views of a slot that holds the device section of the artifact that `layout` describes."""
        planes = iter(
            _planes([plane for parts in layout.matrices.values() for plane in parts.planes], slot.memory)
        )
        matrices = {
            name: MatrixView(
                tuple(islice(planes, len(parts.planes))),
                *(
                    None if part is None else _view(part, slot.memory)
                    for part in (parts.left, parts.right, parts.added)
                ),
            )
            for name, parts in layout.matrices.items()
        }
        whole = {name: _view(entry, slot.memory) for name, entry in layout.whole.items()}
        return cls(layout.digest, layout.tied, layout.head, matrices, whole, slot, slot.generation)

    def check_alive(self) -> None:
        """Raise EngineFailed if the slot was given to another delta: a batch must never read those bytes."""
        if self.generation != self.slot.generation:
            raise EngineFailed(
                f"slot {self.slot.index} no longer holds delta {self.digest[:12]}: send the request again"
            )

    def num_rows(self, name: str) -> int:
        """Return the rows of a matrix that this delta changes, including added ones; 0 if the matrix is unchanged."""
        if (matrix := self.matrices.get(name)) is not None:
            return matrix.num_rows
        return len(self.whole[name]) if name in self.whole else 0


def arena(num_slots: int, slot_bytes: int, device: torch.device) -> list[Slot]:
    """Allocate all slots as one block of device memory."""
    memory = torch.empty(num_slots, slot_bytes, dtype=torch.uint8, device=device)
    return [Slot(index, memory[index]) for index in range(num_slots)]


def _planes(parts: Sequence[PlaneParts[TensorEntry]], memory: Tensor) -> list[PlaneView]:
    """Make views of planes, in their order.

    All factors are computed in a few operations: one operation per plane would delay the engine's steps, which share
    the interpreter and the device.
    """
    if not parts:
        return []
    halves = memory[: len(memory) // 2 * 2].view(torch.float16)
    ones = halves.new_ones(1)
    rows = [plane.signs.shape[0] for plane in parts]
    scales = [
        (ones if plane.scale_out is None else _elements(plane.scale_out, halves)).expand(count)
        for plane, count in zip(parts, rows, strict=True)
    ]
    gains = torch.cat([_view(plane.gain, memory) for plane in parts])
    repeats = torch.tensor(rows, device=memory.device)
    factors_out = torch.cat(scales).float() * gains.repeat_interleave(repeats, output_size=sum(rows))
    scales_in = [plane.scale_in for plane in parts if plane.scale_in is not None]
    factors_in = iter(_float32(scales_in, halves))
    return [
        PlaneView(
            memory[plane.signs.start : plane.signs.end].view(plane.signs.shape),
            factor_out,
            None if plane.scale_in is None else next(factors_in),
        )
        for plane, factor_out in zip(parts, torch.split(factors_out, rows), strict=True)
    ]


def _float32(vectors: Sequence[TensorEntry], halves: Tensor) -> Sequence[Tensor]:
    if not vectors:
        return []
    together = torch.cat([_elements(entry, halves) for entry in vectors]).float()
    return torch.split(together, [entry.shape[0] for entry in vectors])


def _elements(entry: TensorEntry, halves: Tensor) -> Tensor:
    """Return a float16 vector from a slot viewed as float16."""
    return halves[entry.start // 2 : entry.end // 2]


def _view(entry: TensorEntry, memory: Tensor) -> Tensor:
    return memory[entry.start : entry.end].view(TORCH_DTYPE[entry.dtype]).view(entry.shape)


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
