"""Norms: the base's weight, or each row's own. The library's code runs; only the weight it finds is chosen by batch.

RMSNorms broadcast a weight of one vector per token, ``1 + w`` forms included. `nn.LayerNorm` refuses that and has its
two lines written out.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from server.deltas.batch import BatchContext, spread


class NormDelta:
    """Gives one norm the weight (and bias) of each row's variant before it runs."""

    def __init__(self, module: nn.Module, name: str, context: BatchContext) -> None:
        self.context = context
        self.base: dict[str, Tensor] = {}
        self.names: dict[str, str] = {}
        for parameter, value in list(module.named_parameters(recurse=False)):
            self.base[parameter] = value.detach()
            self.names[parameter] = f"{name}.{parameter}"
            delattr(module, parameter)  # a registered parameter could not be exchanged for a view
            setattr(module, parameter, self.base[parameter])
        if isinstance(module, nn.LayerNorm):
            setattr(module, "forward", _LayerNorm(module))  # noqa: B010 - a method may not be assigned
        module.register_forward_pre_hook(self)

    def by_name(self) -> dict[str, Tensor]:
        """The base's own values, by checkpoint name."""
        return {self.names[parameter]: value for parameter, value in self.base.items()}

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        groups, shape = self.context.batch.groups, args[0].shape
        for parameter, base in self.base.items():
            value = spread(base, groups, self.names[parameter], shape[1])
            setattr(module, parameter, _by_token(value, len(shape)).to(base.dtype))


class _LayerNorm:
    """`nn.LayerNorm.forward` for weights that may differ by token; statistics in float32, as in the library's."""

    def __init__(self, module: nn.LayerNorm) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.module.weight, self.module.bias
        if weight is None or weight.dim() == 1:
            return nn.functional.layer_norm(x, self.module.normalized_shape, weight, bias, self.module.eps)
        normal = nn.functional.layer_norm(
            x.float(), self.module.normalized_shape, None, None, self.module.eps
        )
        scaled = normal * weight.float()
        return (scaled if bias is None else scaled + bias.float()).to(x.dtype)


def _by_token(value: Tensor, rank: int) -> Tensor:
    """Shape a [tokens, features] weight for inputs [1, tokens, features] or [1, tokens, heads, features]."""
    if value.dim() == 1:
        return value
    return value[None] if rank == 3 else value[None, :, None]


def is_norm(module: nn.Module) -> bool:
    """A module whose own parameters are all vectors: what normalises, scales or shifts features."""
    own = [value for _, value in module.named_parameters(recurse=False)]
    return (
        bool(own)
        and all(value.dim() == 1 for value in own)
        and not isinstance(module, (nn.Linear, nn.Embedding))
    )
