"""An artifact's tensors as a report looks at them: by layer and by module type, with counts and means over them.

Knows names, specs and sizes; nothing of pages and figures. Names come from strangers: any text may be one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from deltastore.format.artifact import Artifact
from deltastore.format.manifest import TensorSpec
from deltastore.format.sizes import extra_bytes, tensor_bytes

MAX_MODULES = 24  # module types that are told apart; more are OTHER
OTHER = "(other)"
AXES = ("out", "in", "both", "scalar")
# As data flows through a block; any other module type comes after, in the order of the file.
FLOW = (
    "q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", "o_proj", "out_proj", "dense",
    "gate", "gate_proj", "w1", "up_proj", "w3", "gate_up_proj", "fc1", "c_fc", "dense_h_to_4h",
    "down_proj", "w2", "fc2", "c_proj", "dense_4h_to_h",
)  # fmt: skip

T = TypeVar("T")
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a name says that its tensor stands."""

    layer: int | None  # None outside the numbered layers
    module: str  # what the layer calls it, `experts.w1` for one of many experts
    is_expert: bool
    pattern: str  # the name, with an expert's number as `*`

    @classmethod
    def of(cls, name: str) -> Place:
        parts = name.removesuffix(".weight").split(".")
        numbers = [index for index, part in enumerate(parts) if part.isascii() and part.isdigit()]
        if not numbers:
            return cls(None, parts[-1], False, name)
        layer = int(parts[numbers[0]])
        if len(numbers) == 1:
            return cls(layer, parts[-1] if numbers[0] < len(parts) - 1 else parts[0], False, name)
        expert = numbers[1]
        module = ".".join([parts[expert - 1], *parts[expert + 1 :]])
        return cls(layer, module, True, ".".join([*parts[:expert], "*", *parts[expert + 1 :]]))


@dataclass(frozen=True, slots=True)
class CarriedTensor:
    """One tensor of the manifest."""

    name: str
    spec: TensorSpec
    sizes: Mapping[str, int]  # bytes by kind, as `tensor_bytes` gives them
    extra_bytes: int  # beyond one sign plane
    place: Place

    @classmethod
    def of(cls, artifact: Artifact, name: str) -> CarriedTensor:
        spec = artifact.manifest.tensors[name]
        return cls(name, spec, tensor_bytes(artifact, name), extra_bytes(artifact, name), Place.of(name))

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes.values())

    @property
    def has_more(self) -> bool:
        """Whether it got more than one bit per weight."""
        return self.spec.planes > 1 or self.spec.rank > 0


@dataclass(frozen=True, slots=True)
class ErrorGrid:
    """Mean error of the coded matrices by module type and layer."""

    modules: Sequence[str]
    layers: Sequence[int]
    values: Sequence[Sequence[float | None]]  # [modules, layers]; None where no error is known
    outside: Sequence[tuple[str, float]]  # of the matrices outside the layers: embedding, head

    @property
    def known(self) -> list[float]:
        return [value for row in self.values for value in row if value is not None] + [
            error for _, error in self.outside
        ]


def by_module(tensors: Iterable[CarriedTensor]) -> dict[str, list[CarriedTensor]]:
    """The coded matrices of each module type."""
    coded = [tensor for tensor in tensors if tensor.spec.axis is not None]
    name_of = _told_apart(coded)
    groups = _grouped(coded, lambda tensor: name_of(tensor.place.module))
    return {module: groups[module] for module in _ordered(groups)}


def axis_counts(tensors: Iterable[CarriedTensor]) -> dict[str, Counter[str]]:
    """How many coded matrices of each module type have which axis."""
    return {
        module: Counter(str(tensor.spec.axis) for tensor in some)
        for module, some in by_module(tensors).items()
    }


def error_grid(tensors: Sequence[CarriedTensor]) -> ErrorGrid:
    """The errors that the manifest has; several matrices in one place, such as experts, by their mean."""
    known = [tensor for tensor in tensors if tensor.spec.error is not None]
    inside = [tensor for tensor in known if tensor.place.layer is not None]
    name_of = _told_apart(inside)
    groups = _grouped(inside, lambda tensor: name_of(tensor.place.module))
    layers = sorted({tensor.place.layer for tensor in inside if tensor.place.layer is not None})
    modules = _ordered(groups)
    rows = [_grouped(groups[module], lambda tensor: tensor.place.layer) for module in modules]
    values = [[_mean_error(row.get(layer, ())) for layer in layers] for row in rows]
    outside = [
        (tensor.place.module, tensor.spec.error or 0.0) for tensor in known if tensor.place.layer is None
    ]
    return ErrorGrid(modules, layers, values, outside[:MAX_MODULES])


def by_layer(tensors: Iterable[CarriedTensor]) -> dict[int | None, list[list[CarriedTensor]]]:
    """Per layer, in the order of the file, its tensors; the experts' of one kind stand together, others alone."""
    groups = _grouped(tensors, lambda tensor: tensor.place.layer)
    return {
        layer: list(_grouped(some, lambda tensor: tensor.place.pattern).values())
        for layer, some in groups.items()
    }


def with_more(tensors: Iterable[CarriedTensor]) -> list[CarriedTensor]:
    """The matrices that got more than one bit per weight, the most bytes first."""
    return sorted((tensor for tensor in tensors if tensor.has_more), key=lambda tensor: -tensor.extra_bytes)


def modules_with_more(tensors: Iterable[CarriedTensor]) -> Iterator[tuple[str, int, list[CarriedTensor]]]:
    """The module types that have such matrices, how many matrices each has, and those that got more."""
    for module, some in by_module(tensors).items():
        if chosen := with_more(some):
            yield module, len(some), chosen


def _mean_error(tensors: Iterable[CarriedTensor]) -> float | None:
    errors = [tensor.spec.error for tensor in tensors if tensor.spec.error is not None]
    return fmean(errors) if errors else None


def _grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _told_apart(tensors: Sequence[CarriedTensor]) -> Callable[[str], str]:
    """What a module type is called: by its own name, or OTHER where there are too many."""
    counts = Counter(tensor.place.module for tensor in tensors)
    kept = set(counts) if len(counts) <= MAX_MODULES else {m for m, _ in counts.most_common(MAX_MODULES - 1)}
    return lambda module: module if module in kept else OTHER


def _ordered(groups: Mapping[str, Sequence[CarriedTensor]]) -> list[str]:
    """In the order of a block's data flow; then other modules, experts, what is outside the layers, and OTHER."""

    def key(module: str) -> tuple[bool, bool, bool, int]:
        last, first = module.rpartition(".")[2], groups[module][0].place
        place = FLOW.index(last) if last in FLOW else len(FLOW)
        return module == OTHER, first.layer is None, first.is_expert, place

    return sorted(groups, key=key)
