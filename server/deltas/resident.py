"""A delta in its slot: typed views of the slot's bytes, by tensor name. Knows offsets; nothing of requests or files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deltastore.base.checkpoint import HEAD_SUFFIXES, TORCH_DTYPE
from deltastore.format.header import Header, TensorEntry
from deltastore.format.parts import MatrixParts, PlaneParts, part_names

if TYPE_CHECKING:  # those who only compute need not have what parses it
    from deltastore.format.manifest import Manifest


@dataclass(frozen=True, slots=True, eq=False)
class PlaneView:
    """One sign plane as kernels take it. The gain is folded into `factor_out`."""

    signs: Tensor  # [out, ceil(in / 8)] uint8, in the slot
    factor_out: Tensor  # [out] float32
    factor_in: Tensor | None  # [in] float32


@dataclass(frozen=True, slots=True, eq=False)
class MatrixView:
    """A coded matrix: what its layers add up."""

    planes: tuple[PlaneView, ...]
    left: Tensor | None  # [out, rank] float16, in the slot
    right: Tensor | None  # [rank, in] float16, in the slot
    added: Tensor | None  # [added, in]: rows that the base lacks, in the slot

    @property
    def num_base_rows(self) -> int:
        """Rows that the base has too."""
        return len(self.planes[0].signs)

    @property
    def num_rows(self) -> int:
        """Rows that the variant has, added ones included."""
        return self.num_base_rows + (0 if self.added is None else len(self.added))

    @property
    def is_one_plane(self) -> bool:
        """Whether the first plane is all that the base's rows are given."""
        return len(self.planes) == 1 and self.left is None


@dataclass(frozen=True, slots=True)
class DeltaPlan:
    """Where an artifact's tensors lie in its data section."""

    digest: str
    tied: bool
    head: str
    matrices: Mapping[str, MatrixParts[TensorEntry]]
    whole: Mapping[str, TensorEntry]

    @classmethod
    def of(cls, header: Header, manifest: Manifest, digest: str) -> DeltaPlan:
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
    """One place of the arena. `generation` grows each time its bytes are given up, so that stale views are caught."""

    def __init__(self, index: int, memory: Tensor) -> None:
        self.index = index
        self.memory = memory  # [slot_bytes] uint8 on the device
        self.generation = 0


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ResidentDelta:
    """A loaded delta. Made when every chunk of it has been verified and copied."""

    digest: str
    tied: bool  # the output head is the input embedding
    head: str  # the changed head's own tensor, which a tied base does not have; "" where there is none
    matrices: Mapping[str, MatrixView]
    whole: Mapping[str, Tensor]
    slot: Slot
    generation: int

    @classmethod
    def in_slot(cls, plan: DeltaPlan, slot: Slot) -> ResidentDelta:
        """Views of a slot that holds the data section of the artifact that `plan` was taken from."""
        planes = iter(
            _planes([plane for parts in plan.matrices.values() for plane in parts.planes], slot.memory)
        )
        matrices = {
            name: MatrixView(
                tuple(islice(planes, len(parts.planes))),
                *(
                    None if part is None else _view(part, slot.memory)
                    for part in (parts.left, parts.right, parts.added)
                ),
            )
            for name, parts in plan.matrices.items()
        }
        whole = {name: _view(entry, slot.memory) for name, entry in plan.whole.items()}
        return cls(plan.digest, plan.tied, plan.head, matrices, whole, slot, slot.generation)

    def check_alive(self) -> None:
        """A batch must never read a slot that has been given to another delta."""
        assert self.generation == self.slot.generation, f"slot {self.slot.index} was overwritten while in use"

    def num_rows(self, name: str) -> int:
        """Rows of a matrix that this delta changes, added ones included; 0 where it is unchanged."""
        if (matrix := self.matrices.get(name)) is not None:
            return matrix.num_rows
        return len(self.whole[name]) if name in self.whole else 0


def arena(num_slots: int, slot_bytes: int, device: torch.device) -> list[Slot]:
    """All slots, cut from one allocation."""
    memory = torch.empty(num_slots, slot_bytes, dtype=torch.uint8, device=device)
    return [Slot(index, memory[index]) for index in range(num_slots)]


def _planes(parts: Sequence[PlaneParts[TensorEntry]], memory: Tensor) -> list[PlaneView]:
    """Views of planes, in their order. All factors are made at once: an operation for each would hold up the engine,
    on whose interpreter and device they run.
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
    """A float16 vector in a slot that is seen as float16."""
    return halves[entry.start // 2 : entry.end // 2]


def _view(entry: TensorEntry, memory: Tensor) -> Tensor:
    return memory[entry.start : entry.end].view(TORCH_DTYPE[entry.dtype]).view(entry.shape)
