"""The base's linear layers on the CPU, over weights in the blocked layout of oneDNN.

torch's bfloat16 product reorders its weights for the processor's dot-product instructions at every call, which takes as
long as the product of a few rows. Here they are reordered once, in place of the plain ones. Knows modules; no deltas.
"""

from __future__ import annotations

import platform
from collections import Counter
from functools import cache

import torch
from torch import Tensor, nn

# The number of rows that the layout is chosen for. The same layout serves any number.
TYPICAL_ROWS = 16


class PackedLinear:
    """The forward method of an `nn.Linear` whose weight is packed: sums are float32 and rounded once, as in torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = self._product(x, self._weight, self._bias, "none", [], "")
        return product


def packable(model: nn.Module) -> list[nn.Linear]:
    """Return the layers that `pack` makes faster.

    They are plain `nn.Linear` in bfloat16 on a CPU with instructions for it. A weight that two modules share stays
    plain: the embedding reads its rows. Other dtypes stay plain: float32 keeps the bits of torch's own product.
    """
    linear = [module for module in model.modules() if type(module) is nn.Linear]
    owners = Counter(
        value.data_ptr() for module in model.modules() for value in module.parameters(recurse=False)
    )
    return [module for module in linear if _is_packable(module.weight, owners)]


def pack(module: nn.Linear) -> None:
    """Replace a layer's weight by a packed copy, which torch's own operations do not accept, and free the weight."""
    weight = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), TYPICAL_ROWS)
    # torch does not let a plain tensor replace a registered parameter.
    del module.weight
    setattr(module, "weight", weight)  # noqa: B010 - a parameter may not be assigned
    setattr(module, "forward", PackedLinear(weight, module.bias))  # noqa: B010 - a method may not be assigned


def _is_packable(weight: Tensor, owners: Counter[int]) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and owners[weight.data_ptr()] == 1
        and _has_instructions()
    )


@cache
def _has_instructions() -> bool:
    return platform.machine() in ("x86_64", "AMD64") and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
