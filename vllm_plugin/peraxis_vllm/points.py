"""The places of vLLM's model where deltas act: wrapped quantisation methods of layers, and norms.

Every linear layer, embedding and output head of vLLM computes through `module.quant_method`. A wrapper of it adds the
deltas beside whatever the method computes, bf16, FP8 or INT4 alike, and before a row-parallel layer's all-reduce.

The wrapper calls an operation that knows a layer by its number. It is opaque to torch.compile, and reads tables and
rows that never move, so that a captured graph reads each step's values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from server.kernels import add_planes, add_rows

if TYPE_CHECKING:
    from peraxis_vllm.manager import DeltaManager
    from server.deltas.resident import Rows

POINTS: list[Point] = []  # of this process's model; operations know a point by its index


@dataclass(slots=True, eq=False)
class Point:
    """A layer whose inputs several tensors of the checkpoint share, such as q, k and v."""

    manager: DeltaManager
    name: str
    first: int  # of its parts in the tables, which follow each other
    ends: Sequence[int]  # of each part's outputs on this rank
    is_head: bool = False
    is_embedding: bool = False
    is_called: bool = False  # by a step of the model

    @property
    def table(self) -> Tensor:
        return self.manager.tables.rows[self.first : self.first + len(self.ends)]

    def add_linear(self, output: Tensor, x: Tensor) -> None:
        """Add the deltas' products to `output`, [rows, out]."""
        if (rows := self._rows(len(x))) is not None:
            add_planes(output, x, self.table, rows.order, rows.ranges, self.ends)

    def add_embedding(self, output: Tensor, ids: Tensor) -> None:
        """Add the deltas' rows of an embedding to `output`, [rows, features]."""
        if (rows := self._rows(len(ids))) is not None:
            add_rows(output, ids, self.table, rows.order, rows.ranges, self.ends[0], 1.0)

    def _rows(self, num_rows: int) -> Rows | None:
        """Return the rows to which deltas are added; None if there are none.

        On the CPU alone, where no graph is captured that steps with deltas replay.
        """
        self.is_called = True
        rows = self.manager.rows(self.name, num_rows, self.is_head)
        is_skipped = rows is not None and rows.is_of_base and self.manager.device.type == "cpu"
        return None if is_skipped else rows


def add_point(point: Point) -> int:
    """Let operations find a point, and return its index."""
    POINTS.append(point)
    return len(POINTS) - 1


@torch.library.custom_op("peraxis::add_linear", mutates_args=["output"])
def _add_linear(output: Tensor, x: Tensor, point: int) -> None:
    POINTS[point].add_linear(output.flatten(0, -2), x.flatten(0, -2))


@torch.library.custom_op("peraxis::add_embedding", mutates_args=["output"])
def _add_embedding(output: Tensor, ids: Tensor, point: int) -> None:
    POINTS[point].add_embedding(output.flatten(0, -2), ids.flatten())


@_add_linear.register_fake
def _(output: Tensor, x: Tensor, point: int) -> None: ...


@_add_embedding.register_fake
def _(output: Tensor, ids: Tensor, point: int) -> None: ...


class WithDeltas:
    """Mixed into the class of a layer's quantisation method."""

    peraxis_linear = -1
    peraxis_embedding = -1

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        output: Tensor = super().apply(layer, x, bias)  # type: ignore[misc]
        if self.peraxis_linear >= 0:
            torch.ops.peraxis.add_linear(output, x, self.peraxis_linear)
        return output

    def embedding(self, layer: nn.Module, input_: Tensor) -> Tensor:
        output: Tensor = super().embedding(layer, input_)  # type: ignore[misc]
        if self.peraxis_embedding >= 0:
            torch.ops.peraxis.add_embedding(output, input_, self.peraxis_embedding)
        return output


def wrap(module: Any, linear: int = -1, embedding: int = -1) -> None:
    """Replace a module's quantisation method by one that adds deltas. It stays an instance of its own class."""
    inner = module.quant_method
    if isinstance(inner, WithDeltas):
        method: Any = inner
    else:
        kind = type(type(inner).__name__, (WithDeltas, type(inner)), {})
        method = object.__new__(kind)
        method.__dict__.update(inner.__dict__)
    if linear >= 0:
        method.peraxis_linear = linear
    if embedding >= 0:
        method.peraxis_embedding = embedding
    module.quant_method = method
    # Fused quantisation of activations would hand over inputs in FP8.
    module.requires_unquantized_input = True
    if hasattr(module, "use_fused_embedding"):
        # It would pass by the method.
        module.use_fused_embedding = False


class NormPoint:
    """A norm whose parameters are those of each row's variant: tables of all slots' values, at fixed addresses."""

    def __init__(self, manager: DeltaManager, module: Any, name: str) -> None:
        self.manager, self.module, self.name, self.is_called = manager, module, name, False
        self.vectors = {
            key: manager.tables.add_vector(manager.stored(f"{name}.{key}"), value)
            for key, value in module.named_parameters(recurse=False)
        }

    def attach(self, manager: DeltaManager) -> None:
        """Let the norm read the tables, which have been allocated."""
        module = self.module
        for key, number in self.vectors.items():
            module.register_buffer(f"peraxis_{key}", manager.tables.vectors[number].table, persistent=False)
        module.register_buffer("peraxis_slot_of_row", manager.tokens.slot_of_row, persistent=False)
        module.peraxis_rows_dim = manager.rows_dim
        forward = _FORWARDS[kind_of_norm(module) or ""]
        if forward is _rms_forward:
            module.peraxis_inner = module.forward_native
            module.pass_weight = module.pass_weight_add = False
        if hasattr(module, "_forward_method"):
            module._forward_method = forward.__get__(module)
        else:
            module.forward = forward.__get__(module)
        module.register_forward_pre_hook(self._note)

    def _note(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling():
            rows = self.manager.rows(self.name, args[0].shape[self.manager.rows_dim], False)
            self.is_called = self.is_called or rows is self.manager.tokens


def _by_row(self: Any, key: str, x: Tensor) -> Tensor:
    """Return each row's value of a parameter, to broadcast over `x`, [rows, ..., features] or [1, rows, ...]."""
    table: Tensor = getattr(self, f"peraxis_{key}")
    dim: int = self.peraxis_rows_dim
    value = table.index_select(0, self.peraxis_slot_of_row[: x.shape[dim]])
    return value if x.dim() == 2 + dim else value.view(len(value), *[1] * (x.dim() - 2 - dim), -1)


def _rms_forward(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    weight = _by_row(self, "weight", x)
    if residual is None:
        return self.peraxis_inner(x) * weight
    output, residual = self.peraxis_inner(x, residual)
    return output * weight, residual


def _gemma_forward(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    wide = x.float() if residual is None else x.float() + residual.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    output = (scaled * (1.0 + _by_row(self, "weight", x).float())).to(x.dtype)
    return output if residual is None else (output, wide.to(x.dtype))


def _layer_norm_forward(self: Any, x: Tensor) -> Tensor:
    scaled = nn.functional.layer_norm(x.float(), x.shape[-1:], None, None, eps_of(self))
    scaled = scaled * _by_row(self, "weight", x).float()
    if hasattr(self, "peraxis_bias"):
        scaled = scaled + _by_row(self, "bias", x).float()
    return scaled.to(x.dtype)


def _cohere_forward(self: Any, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    return _layer_norm_forward(self, x), residual


def eps_of(module: Any) -> float:
    """Return what a norm adds to the variance."""
    return float(module.eps if hasattr(module, "eps") else module.variance_epsilon)


_FORWARDS: dict[str, Any] = {
    "RMSNorm": _rms_forward,
    "GemmaRMSNorm": _gemma_forward,
    "LayerNorm": _layer_norm_forward,
    "Cohere's LayerNorm": _cohere_forward,
}


def kind_of_norm(module: nn.Module) -> str | None:
    """Return the kind of a norm whose parameters may differ by row; None for another module.

    By the names of its classes, because not every version has each, and models have norms of the same names.
    """
    own = list(module.parameters(recurse=False))
    if not own or any(parameter.dim() != 1 for parameter in own):
        return None
    for kind in type(module).__mro__:
        if kind.__module__.endswith("models.commandr"):
            return "Cohere's LayerNorm" if kind.__name__ == "LayerNorm" else None
        if kind.__name__ in _FORWARDS:
            return kind.__name__
    return None
