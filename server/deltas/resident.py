"""A delta in its slot: typed views of the slot's bytes, by tensor name. Knows offsets; no requests and no files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from deltastore.base.checkpoint import HEAD_SUFFIXES, TORCH_DTYPE
from deltastore.format.header import Header, TensorEntry
from deltastore.format.manifest import Manifest
from deltastore.format.parts import MatrixParts, PlaneParts, part_names
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
