"""Memory, arithmetic and time of one stage of a run. Plain numbers: imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MemoryKind = Literal["host", "device"]


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One thing in memory during a stage."""

    what: str
    num_bytes: int
    where: MemoryKind
    least_bytes: int | None = None  # with which the stage works where memory is short; None: all of it


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage at its peak of memory, and its work in all."""

    name: str
    items: Sequence[MemoryItem]
    operations: float  # of float32
    moved_bytes: float  # to and from memory, where that takes the time in place of arithmetic

    def num_bytes(self, where: str, *, least: bool = False) -> int:
        """Return the bytes of one kind of memory; with `least`, those without which the stage fails."""
        sizes = (
            item.least_bytes if least and item.least_bytes is not None else item.num_bytes
            for item in self.items
            if item.where == where
        )
        return sum(sizes)


@dataclass(frozen=True, slots=True)
class MachineRate:
    """Measured speed of a machine."""

    operations_per_s: float  # of float32 matrix products
    bytes_per_s: float

    def seconds(self, stage: StageCost) -> float:
        return stage.operations / self.operations_per_s + stage.moved_bytes / self.bytes_per_s
