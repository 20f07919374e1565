"""Norms: the base's weight, or each row's own. The library's code runs; only the weight it finds is chosen by batch.

RMSNorms broadcast a weight of one vector per token, ``1 + w`` forms included. `nn.LayerNorm` refuses that and has its
two lines written out.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from server.deltas.batch import BatchContext


class NormDelta:
    """Gives one norm the weight (and bias) of each row's variant before it runs."""

    def __init__(self, module: nn.Module, name: str, context: BatchContext) -> None:
        self.context = context
        self.base: dict[str, Tensor] = {}
        self.names: dict[str, str] = {}
        self._token_axis: int | None = None  # of inputs [1, tokens, heads, features], or heads before tokens
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
        step = self.context.current
        for parameter, base in self.base.items():
            value = (
                base if step is None else self._by_token(step.by_row(self.names[parameter], base), args[0])
            )
            if getattr(module, parameter) is not value:
                setattr(module, parameter, value)

    def _by_token(self, value: Tensor, x: Tensor) -> Tensor:
        """Shape a [tokens, features] weight for inputs [1, tokens, features], or with heads before or behind tokens."""
        if value.dim() == 1:
            return value
        if x.dim() == 3:
            return value[None]
        if (
            self._token_axis is None and x.shape[1] != x.shape[2]
        ):  # told apart at start-up, by a probe of few tokens
            self._token_axis = 1 if x.shape[1] == len(value) else 2
        return value[None, None] if self._token_axis == 2 else value[None, :, None]


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


def is_norm(module: nn.Module) -> bool:
    """A module whose own parameters are all vectors: what normalises, scales or shifts features."""
    own = [value for _, value in module.named_parameters(recurse=False)]
    return (
        bool(own)
        and all(value.dim() == 1 for value in own)
        and not isinstance(module, (nn.Linear, nn.Embedding))
    )
