"""The parts of a coded matrix, and the names of the tensors in an artifact's file.

The parts are generic in what stands for one: a tensor name, a header entry or a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

# Importing the manifest imports pydantic, which readers of a slot's bytes do without.
if TYPE_CHECKING:
    from deltastore.format.manifest import TensorSpec

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class PlaneParts(Generic[T]):
    """The parts of one sign plane."""

    signs: T
    scale_out: T | None
    scale_in: T | None
    gain: T

    def all(self) -> list[T]:
        """The parts that are present, in file order."""
        return _present((self.signs, self.scale_out, self.scale_in, self.gain))

    def scales(self) -> list[T]:
        """The scale vectors that are present."""
        return _present((self.scale_out, self.scale_in))

    def map(self, change: Callable[[T], U]) -> PlaneParts[U]:
        """Apply a function to every part that is present."""
        return PlaneParts(
            change(self.signs),
            None if self.scale_out is None else change(self.scale_out),
            None if self.scale_in is None else change(self.scale_in),
            change(self.gain),
        )


@dataclass(frozen=True, slots=True)
class MatrixParts(Generic[T]):
    """The parts of a coded matrix."""

    planes: tuple[PlaneParts[T], ...]
    left: T | None
    right: T | None
    added: T | None

    def all(self) -> list[T]:
        """The parts that are present, in file order."""
        return [
            *(part for plane in self.planes for part in plane.all()),
            *self.residual(),
            *self.added_rows(),
        ]

    def residual(self) -> list[T]:
        """Both factors of the low-rank residual; empty if there is none."""
        return _present((self.left, self.right))

    def added_rows(self) -> list[T]:
        """The rows that the base lacks; empty if there are none."""
        return _present((self.added,))

    def map(self, change: Callable[[T], U]) -> MatrixParts[U]:
        """Apply a function to every part that is present."""
        return MatrixParts(
            tuple(plane.map(change) for plane in self.planes),
            None if self.left is None else change(self.left),
            None if self.right is None else change(self.right),
            None if self.added is None else change(self.added),
        )


def part_names(name: str, spec: TensorSpec) -> MatrixParts[str]:
    """Return the names of the tensors that a coded matrix is stored as."""
    assert spec.axis is not None
    return MatrixParts(
        tuple(_plane_names(name if k == 0 else f"{name}.plane{k}", spec.axis) for k in range(spec.planes)),
        f"{name}.left" if spec.rank else None,
        f"{name}.right" if spec.rank else None,
        f"{name}.added" if spec.added_rows else None,
    )


def file_tensor(filename: str) -> str:
    """Return the name of the tensor that holds one of the variant's files."""
    return f"file.{filename}"


def padding_tensor(index: int) -> str:
    """Return the name of the tensor that pads up to the next aligned one; safetensors allows no holes."""
    return f"padding.{index}"


def _plane_names(prefix: str, axis: str) -> PlaneParts[str]:
    return PlaneParts(
        f"{prefix}.signs",
        f"{prefix}.scale_out" if axis != "in" else None,
        f"{prefix}.scale_in" if axis in ("in", "both") else None,
        f"{prefix}.gain",
    )


def _present(parts: Sequence[T | None]) -> list[T]:
    return [part for part in parts if part is not None]
