"""The one-bit plan: a delta's bytes computed from tensor shapes alone. Sizes slots and answers `inspect --plan`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from deltastore.base.checkpoint import EMBEDDING_SUFFIXES, HEAD_SUFFIXES
from deltastore.format.layout import TENSOR_ALIGNMENT
from deltastore.format.signs import packed_width

FP16_BYTES = 2


@dataclass(frozen=True, slots=True)
class OneBitPlan:
    """Bytes of a delta in which every tensor differs, and of the full checkpoint at 16 bits."""

    signs_bytes: int
    scales_bytes: int
    whole_bytes: int
    device_bytes: int  # the sum, with every tensor's alignment
    full_bytes: int

    @property
    def ratio(self) -> float:
        """Checkpoint bytes at 16 bits over delta bytes."""
        return self.full_bytes / self.device_bytes


def is_matrix(name: str, shape: tuple[int, ...], *, embeddings: bool = True) -> bool:
    """True if a tensor is coded at one bit: a matrix, and not an embedding or head if those stay whole."""
    whole = not embeddings and name.endswith((*EMBEDDING_SUFFIXES, *HEAD_SUFFIXES))
    return len(shape) == 2 and min(shape) > 1 and not whole


def one_bit_plan(shapes: Mapping[str, tuple[int, ...]], *, embeddings: bool = True) -> OneBitPlan:
    """Plan one sign plane and both scales per matrix.

    Args:
        shapes: Every tensor's shape by name.
        embeddings: False keeps embedding and output head whole at 16 bits.
    """
    signs = scales = whole = device = full = 0
    for name, shape in shapes.items():
        numel = prod(shape)
        full += FP16_BYTES * numel
        if is_matrix(name, shape, embeddings=embeddings):
            out_features, in_features = shape
            parts = [
                out_features * packed_width(in_features),
                FP16_BYTES * out_features,
                FP16_BYTES * in_features,
                4,
            ]
            signs += parts[0]
            scales += sum(parts[1:])
        else:
            parts = [FP16_BYTES * numel]
            whole += parts[0]
        device += sum(_aligned(parts))
    return OneBitPlan(signs, scales, whole, device, full)


def _aligned(sizes: Iterable[int]) -> Iterable[int]:
    return (size + -size % TENSOR_ALIGNMENT for size in sizes)
