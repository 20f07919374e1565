"""Run a plain model in any dtype with a delta on some rows: the reference of the start-up probe.

Weights are widened a few rows of one matrix at a time, so the memory needed does not grow with the model. Independent
of the hooks and kernels that serve deltas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# Elements of a weight to widen at a time.
BLOCK_NUMEL = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class RankOneDelta:
    """A one-bit delta whose signs are an outer product, so that applying it costs two vector operations.

    With signs ``a_i b_j`` the delta of a weight is ``(factor_out * a)_i (factor_in * b)_j``.
    """

    signed_out: Tensor  # [out] float32: factor_out * a
    signed_in: Tensor  # [in] float32: factor_in * b

    def product(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        """Return the delta's product with `x`, in the dtype of `x`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        inner = (x.to(wide) * self.signed_in.to(wide)).sum(-1, keepdim=True)
        return (inner * self.signed_out.to(wide)).to(x.dtype)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:  # [tokens] -> [tokens, in]
        """Return rows of the dense delta."""
        return (self.signed_out[ids][:, None] * self.signed_in).to(dtype)


class ReferenceModel(TorchFunctionMode):
    """A mode in which linear layers, embeddings and norms compute in `dtype`, independent of their weights' dtype.

    The batch is one text twice: the first sequence is the base's, the second has deltas at the positions of `own`.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        deltas: Mapping[int, RankOneDelta],  # by the address of the weight
        own: slice,  # positions of the second sequence with deltas
    ) -> None:
        super().__init__()
        self._dtype = dtype
        self._deltas = deltas
        self._own = own

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func is F.embedding:
            return self._embedding(*args, **kwargs)
        if func in (F.layer_norm, F.rms_norm):
            args = tuple(arg.to(self._dtype) if isinstance(arg, Tensor) else arg for arg in args)
            kwargs = {
                key: arg.to(self._dtype) if isinstance(arg, Tensor) else arg for key, arg in kwargs.items()
            }
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x = input.to(self._dtype)
        output = self._product(x, weight)
        if bias is not None:
            output += bias.to(self._dtype)
        if (delta := self._deltas.get(weight.data_ptr())) is not None:
            by_sequence = output.view(2, -1, output.shape[-1])
            own = x.reshape(2, -1, x.shape[-1])[1, self._own]
            by_sequence[1, self._own] += delta.product(own)
        return output

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        if weight.dtype == self._dtype:
            return F.linear(x, weight)
        num_rows = max(1, BLOCK_NUMEL // weight.shape[1])
        # One buffer for all blocks: a buffer per block would fragment the memory between parts of the output.
        buffer = torch.empty(
            min(num_rows, len(weight)), weight.shape[1], dtype=self._dtype, device=weight.device
        )
        output = x.new_empty(*x.shape[:-1], len(weight))
        for start in range(0, len(weight), num_rows):
            block = weight[start : start + num_rows]
            output[..., start : start + num_rows] = F.linear(x, buffer[: len(block)].copy_(block))
        return output

    def _embedding(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = F.embedding(input, weight, *args, **kwargs).to(self._dtype)
        if (delta := self._deltas.get(weight.data_ptr())) is not None:
            output[1, self._own] += delta.rows(input[1, self._own], self._dtype)
        return output


@contextmanager
def own_norms(norms: Mapping[nn.Module, Mapping[str, Tensor]], own: slice, num_tokens: int) -> Iterator[None]:
    """Give the second sequence's positions `own` other norm weights, by running each norm a second time.

    Args:
        norms: other values for the parameters of some modules, by name.
        own: positions of the second sequence that have them.
        num_tokens: length of each sequence. No other dimension of a norm's output may have this size.
    """

    def rerun(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        before = dict(module._parameters)
        try:
            module._parameters.update(
                {name: nn.Parameter(value, requires_grad=False) for name, value in norms[module].items()}
            )
            other: Tensor = module.forward(*args)
        finally:
            module._parameters.update(before)
        token_axis = output.shape.index(num_tokens, 1)
        output.select(0, 1).narrow(token_axis - 1, own.start, own.stop - own.start).copy_(
            other.select(0, 1).narrow(token_axis - 1, own.start, own.stop - own.start)
        )
        return output

    with ExitStack() as stack:
        for module in norms:
            stack.callback(module.register_forward_hook(rerun).remove)
        yield
