"""Bytes of a delta: of an artifact by tensor and kind of part, and the one-bit plan, computed from tensor shapes alone.

The plan sizes slots and answers `inspect --plan`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod

from deltastore.checkpoint import EMBEDDING_SUFFIXES, HEAD_SUFFIXES
from deltastore.format.artifact import Artifact
from deltastore.format.header import TensorEntry
from deltastore.format.layout import TENSOR_ALIGNMENT
from deltastore.format.manifest import file_tensor
from deltastore.format.matrix import packed_width

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


def coded_names(
    shapes: Mapping[str, tuple[int, ...]], stacks: Collection[str] = (), *, embeddings: bool = True
) -> frozenset[str]:
    """Return the names of the tensors that are coded at one bit: stacks of experts, and matrices.

    Beside a stack, matrices with a row for each expert stay whole: the router, which a few numbers turn to another
    expert, and the experts' biases.

    Args:
        shapes: Every tensor's shape by name.
        stacks: The names of the stacks.
        embeddings: False keeps embedding and output head whole.
    """
    rows = {(_mixture(name), shapes[name][0]) for name in stacks}
    coded = {name for name, shape in shapes.items() if is_matrix(name, shape, embeddings=embeddings)}
    for_experts = {
        name for name in coded if any((prefix, shapes[name][0]) in rows for prefix in _prefixes(name))
    }
    return frozenset(coded - for_experts | set(stacks))


def _mixture(stack: str) -> str:
    """Return the prefix of the names of a mixture of experts, of which a stack is one parameter."""
    *modules, _ = stack.removesuffix(".weight").split(".")
    if modules and modules[-1] == "experts":
        modules.pop()
    return "".join(f"{module}." for module in modules)


def _prefixes(name: str) -> Iterable[str]:
    """Yield the prefix of each module that a tensor lies in."""
    for index, character in enumerate(name):
        if character == ".":
            yield name[: index + 1]


def one_bit_plan(
    shapes: Mapping[str, tuple[int, ...]], stacks: Collection[str] = (), *, embeddings: bool = True
) -> OneBitPlan:
    """Plan one sign plane and both scales per matrix, of each expert where they are stacked.

    Args:
        shapes: Every tensor's shape by name.
        stacks: The names of the stacks of experts.
        embeddings: False keeps embedding and output head whole at 16 bits.
    """
    coded = coded_names(shapes, stacks, embeddings=embeddings)
    signs = scales = whole = device = full = 0
    for name, shape in shapes.items():
        numel = prod(shape)
        full += FP16_BYTES * numel
        if name in coded:
            *experts, out_features, in_features = shape
            parts = [
                prod(experts) * size
                for size in (
                    out_features * packed_width(in_features),
                    FP16_BYTES * out_features,
                    FP16_BYTES * in_features,
                    4,
                )
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


KINDS = ("signs", "scales", "low_rank", "added", "whole", "files")


def tensor_bytes(artifact: Artifact, name: str) -> dict[str, int]:
    """Return the bytes of one of the manifest's tensors by kind, without `files`. Gains count as scales."""
    sizes = dict.fromkeys(KINDS[:-1], 0)
    if artifact.manifest.tensors[name].codec == "whole":
        sizes["whole"] = artifact.header.tensors[name].num_bytes
        return sizes
    parts = artifact.parts(name)
    sizes["signs"] = _num_bytes(plane.signs for plane in parts.planes)
    sizes["scales"] = sum(_num_bytes(plane.all()) for plane in parts.planes) - sizes["signs"]
    sizes["low_rank"] = _num_bytes(parts.residual())
    sizes["added"] = _num_bytes(parts.added_rows())
    return sizes


def extra_bytes(artifact: Artifact, name: str) -> int:
    """Return the bytes of a tensor's further sign planes and its low-rank residual."""
    if artifact.manifest.tensors[name].codec == "whole":
        return 0
    parts = artifact.parts(name)
    return sum(_num_bytes(plane.all()) for plane in parts.planes[1:]) + _num_bytes(parts.residual())


def files_bytes(artifact: Artifact) -> int:
    """Return the bytes of the variant's files."""
    return _num_bytes(artifact.header.tensors[file_tensor(name)] for name in artifact.manifest.files)


def _num_bytes(entries: Iterable[TensorEntry]) -> int:
    return sum(entry.num_bytes for entry in entries)
