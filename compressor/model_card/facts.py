"""The facts of a delta that its model card shows, from the artifact's header: tensors by layer and module type.

Tensor names may be any text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import TypeVar

from compressor.tasks import Example
from compressor.writer import WrittenDelta
from deltastore.format.artifact import Artifact
from deltastore.format.manifest import TensorSpec
from deltastore.format.sizes import KINDS, extra_bytes, files_bytes, tensor_bytes

MAX_MODULES = 24  # rows of the figure of errors
OUTSIDE = "outside"  # its column of matrices outside the layers, such as embedding and head

T = TypeVar("T")
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor of the manifest, and where its name says that it stands."""

    name: str
    spec: TensorSpec
    num_bytes: int
    extra_bytes: int  # of further sign planes and a low-rank residual
    layer: int | None  # None outside the numbered layers
    module: str  # its type, such as `q_proj`; `experts.w1` for one of many experts
    pattern: str  # the name, with `*` for an expert's number

    @classmethod
    def of(cls, name: str, spec: TensorSpec, num_bytes: int, extra_bytes: int) -> TensorFacts:
        layer, module, pattern = _location(name)
        return cls(name, spec, num_bytes, extra_bytes, layer, module, pattern)


def _location(name: str) -> tuple[int | None, str, str]:
    """Return layer, module type and pattern of a tensor's name."""
    parts = name.removesuffix(".weight").split(".")
    numbers = [index for index, part in enumerate(parts) if part.isascii() and part.isdigit()]
    if not numbers:
        return None, parts[-1], name
    layer = int(parts[numbers[0]])
    if len(numbers) == 1:
        return layer, parts[-1] if numbers[0] < len(parts) - 1 else parts[0], name
    expert = numbers[1]
    module = ".".join([parts[expert - 1], *parts[expert + 1 :]])
    return layer, module, ".".join([*parts[:expert], "*", *parts[expert + 1 :]])


@dataclass(frozen=True, slots=True)
class DeltaFacts:
    """A written delta and what was measured of it."""

    written: WrittenDelta
    finetune_id: str  # a hub id or a directory's name
    tensors: Sequence[TensorFacts]
    sizes: Mapping[str, int]  # bytes by `KINDS`, and `overhead` for header and padding
    examples: Sequence[Example]

    @classmethod
    def of(cls, written: WrittenDelta, finetune_id: str, examples: Sequence[Example]) -> DeltaFacts:
        with Artifact.open(written.out) as artifact:
            by_name = {name: tensor_bytes(artifact, name) for name in written.manifest.tensors}
            sizes = {kind: sum(size.get(kind, 0) for size in by_name.values()) for kind in KINDS}
            sizes["files"] = files_bytes(artifact)
            sizes["overhead"] = artifact.size_bytes - sum(sizes.values())
            tensors = [
                TensorFacts.of(name, spec, sum(size.values()), extra_bytes(artifact, name))
                for (name, spec), size in zip(written.manifest.tensors.items(), by_name.values(), strict=True)
            ]
        return cls(written, finetune_id, tensors, sizes, examples)


@dataclass(frozen=True, slots=True)
class ErrorGrid:
    """Mean error of the coded matrices by module type and layer."""

    modules: Sequence[str]
    layers: Sequence[str]  # numbers, and OUTSIDE if there are such matrices
    values: Sequence[Sequence[float | None]]  # [modules, layers]; None where no error is known

    @classmethod
    def of(cls, tensors: Iterable[TensorFacts]) -> ErrorGrid:
        """Collect the errors that the manifest has; several matrices in one cell, such as experts, by their mean."""
        modules = by_module(tensor for tensor in tensors if tensor.spec.error is not None)
        shown = dict(islice(modules.items(), MAX_MODULES))
        found = {tensor.layer for group in shown.values() for tensor in group}
        layers = [*sorted(layer for layer in found if layer is not None), *([None] if None in found else [])]
        rows = [grouped(group, lambda tensor: tensor.layer) for group in shown.values()]
        values = [[_mean_error(row.get(layer, ())) for layer in layers] for row in rows]
        return cls(list(shown), [OUTSIDE if layer is None else str(layer) for layer in layers], values)

    @property
    def known(self) -> list[float]:
        return [value for row in self.values for value in row if value is not None]


def by_module(tensors: Iterable[TensorFacts]) -> dict[str, list[TensorFacts]]:
    """Return the coded matrices of each module type."""
    return grouped((tensor for tensor in tensors if tensor.spec.axis), lambda tensor: tensor.module)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items of each key, in the order of their first."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _mean_error(tensors: Iterable[TensorFacts]) -> float | None:
    errors = [tensor.spec.error for tensor in tensors if tensor.spec.error is not None]
    return fmean(errors) if errors else None
