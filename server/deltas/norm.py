"""Norms: transformers' own code runs, with the weight of each row's variant in place of the base's.

RMSNorms, ``1 + w`` forms included, broadcast one weight vector per token. `nn.LayerNorm` does not and is replaced by
its own formula.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from server.deltas.batch import BatchContext


class NormDelta:
    """Sets the weight (and bias) of one norm to those of each row's variant before it runs."""

    def __init__(self, module: nn.Module, name: str, context: BatchContext) -> None:
        self.context = context
        self.base: dict[str, Tensor] = {}
        self.names: dict[str, str] = {}
        # 1 for inputs [1, tokens, heads, features], 2 if heads come first.
        self._token_axis: int | None = None
        for parameter, value in list(module.named_parameters(recurse=False)):
            self.base[parameter] = value.detach()
            self.names[parameter] = f"{name}.{parameter}"
            # torch does not let a plain tensor replace a registered parameter.
            delattr(module, parameter)
            setattr(module, parameter, self.base[parameter])
        if isinstance(module, nn.LayerNorm):
            setattr(module, "forward", _LayerNorm(module))  # noqa: B010 - a method may not be assigned
        module.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        step = self.context.current
        for parameter, base in self.base.items():
            value = base
            if step is not None:
                value = self._by_token(step.by_row(self.names[parameter], base), args[0])
            if getattr(module, parameter) is not value:
                setattr(module, parameter, value)

    def _by_token(self, value: Tensor, x: Tensor) -> Tensor:
        """Reshape a weight [tokens, features] to broadcast over `x`.

        Args:
            value: ``[features]``, which is returned as it is, or ``[tokens, features]``.
            x: ``[1, tokens, features]``, ``[1, tokens, heads, features]`` or ``[1, heads, tokens, features]``.
        """
        if value.dim() == 1:
            return value
        if x.dim() == 3:
            return value[None]
        # Set by the start-up probe, whose 13 tokens match no model's number of heads.
        if self._token_axis is None and x.shape[1] != x.shape[2]:
            self._token_axis = 1 if x.shape[1] == len(value) else 2
        return value[None, None] if self._token_axis == 2 else value[None, :, None]


class _LayerNorm:
    """`nn.LayerNorm.forward` for weights that may differ by token. Statistics are float32, as in torch."""

    def __init__(self, module: nn.LayerNorm) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        shape, eps = self.module.normalized_shape, self.module.eps
        weight, bias = self.module.weight, self.module.bias
        if weight is None or weight.dim() == 1:
            return nn.functional.layer_norm(x, shape, weight, bias, eps)
        scaled = nn.functional.layer_norm(x.float(), shape, None, None, eps) * weight.float()
        return (scaled if bias is None else scaled + bias.float()).to(x.dtype)
