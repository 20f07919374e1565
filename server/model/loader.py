"""Load the base, make every layer of it delta-aware, and check that it still computes the same.

Knows the order of these steps, which other files of this folder implement.

torch's bfloat16 product reorders its weights for the processor's dot-product instructions at every call, which takes as
long as the product of a few rows. Here they are reordered once, in place of the plain ones. Without such instructions
it takes four times as long as a float32 one, which then runs in its place. Knows modules; no deltas.
"""

from __future__ import annotations

import logging
import platform
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from deltastore.base import Base
from deltastore.checkpoint import Checkpoint
from deltastore.errors import NotServable
from deltastore.servable import kind
from server import kernels
from server.deltas.layers import attach
from server.deltas.resident import BatchContext
from server.errors import Draining
from server.model.attention import PagedAttention
from server.model.probe import Probe, short_windows
from server.model.weights import read_base

# The number of rows that the layout is chosen for. The same layout serves any number.
TYPICAL_ROWS = 16
# Fewer rows are multiplied by the weights as they are: reading them takes the time.
MIN_WIDENED_ROWS = 12
# Weights that are float32 at a time: 2 MiB, which stay in a core's cache.
WIDENED_WEIGHTS = 1 << 19
X86_64 = ("x86_64", "AMD64")


class PackedLinear:
    """The forward method of an `nn.Linear` whose weight is packed: sums are float32 and rounded once, as in torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = self._product(x, self._weight, self._bias, "none", [], "")
        return product


class WidenedLinear:
    """The forward method of an `nn.Linear` in 16 bits whose products are float32, a block of weights after the other.

    Sums are float32 and rounded once, as in torch.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._bias_float32 = None if bias is None else bias.float()
        self._block = max(1, WIDENED_WEIGHTS // weight.shape[1])

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) < MIN_WIDENED_ROWS:
            return nn.functional.linear(x, self._weight, self._bias)
        rows, outputs = rows.float(), x.new_empty(len(rows), len(self._weight))
        for start in range(0, len(self._weight), self._block):
            block = slice(start, start + self._block)
            bias = None if self._bias_float32 is None else self._bias_float32[block]
            outputs[:, block] = nn.functional.linear(rows, self._weight[block].float(), bias)
        return outputs.view(*x.shape[:-1], -1)


def widenable(model: nn.Module) -> list[nn.Linear]:
    """Return the layers that `widen` makes faster: plain `nn.Linear` in 16 bits, on a CPU that lacks instructions."""
    return [
        module
        for module in model.modules()
        if type(module) is nn.Linear and module.weight.device.type == "cpu" and _is_slow(module.weight.dtype)
    ]


def widen(module: nn.Linear) -> None:
    """Let a layer compute in float32; its weight stays as it is."""
    setattr(module, "forward", WidenedLinear(module.weight, module.bias))  # noqa: B010 - a method may not be assigned


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
def _is_slow(dtype: torch.dtype) -> bool:
    """Return whether products of a dtype are slower than in float32; measured on x86-64 alone."""
    is_supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return platform.machine() in X86_64 and dtype in is_supported and not is_supported[dtype]()


@cache
def _has_instructions() -> bool:
    return platform.machine() in X86_64 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


log = logging.getLogger(__name__)

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """The delta-aware base, its KV cache, and the context through which its layers find the deltas of a step."""

    model: PreTrainedModel
    base: Base
    context: BatchContext
    attention: PagedAttention
    device: torch.device
    max_positions: int  # tokens of the longest context
    position_limit: int | None  # tokens of the longest context of any variant; None: any number
    weight_bytes: int
    context_tokens: float  # to which attention takes as many multiplications as all else of a token


def load_model(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, stopping: threading.Event
) -> ServedModel:
    """Load a Hugging Face decoder and attach deltas to all of it.

    Args:
        checkpoint: the base.
        device: the device of the base and the slots.
        dtype: dtype of the weights.
        stopping: an event that ends loading early when it is set.

    Raises:
        CheckpointError: the directory is not a readable checkpoint.
        NotServable: the architecture cannot run delta-aware. The message names the modules or the measured errors.
        Draining: `stopping` was set.
    """
    model, base = read_base(checkpoint, device, dtype, stopping)
    _check_going_on(stopping)
    weights = [module.weight for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding))]
    weight_bytes = sum(value.nbytes for value in model.parameters())
    # An embedding is only looked up, and a prompt needs its head for one token.
    num_ends = sum(len(weight) * weight.shape[1] for weight in _ends(model))
    num_multiplied = sum(value.numel() for value in model.parameters()) - num_ends
    kernels.prepare(device, {(len(weight), weight.shape[1]) for weight in weights}, model.dtype)
    log.info("the base is read; checking that its deltas give the same tokens as merged weights")
    with torch.inference_mode(), short_windows(model):
        _check_going_on(stopping)
        probe = Probe.of(model, base)
        # After the reference, which computes with plain weights.
        for module in packable(model):
            _check_going_on(stopping)
            pack(module)
        for module in widenable(model):
            widen(module)
        _check_going_on(stopping)
        context = attach(model, base)
        attention = PagedAttention(model, PAGE_TOKENS)
        probe.check_base()
        _check_paged(model, attention)
        probe.check_mixed(context, attention)
    return ServedModel(
        model,
        base,
        context,
        attention,
        device,
        max_positions(model.config.get_text_config()),
        position_limit(model),
        weight_bytes,
        num_multiplied / attention.macs_per_context_token,
    )


def _ends(model: PreTrainedModel) -> set[Tensor]:
    """Return the weights of the embedding and of the head, which may be one."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return {end.weight for end in ends if isinstance(end, (nn.Linear, nn.Embedding))}


def _check_going_on(stopping: threading.Event) -> None:
    if stopping.is_set():
        raise Draining("the server was told to stop while its base was loading")


def _check_paged(model: PreTrainedModel, attention: PagedAttention) -> None:
    """Raise NotServable if a layer did not look up its attention function by name in the pass before."""
    num_layers = model.config.get_text_config().num_hidden_layers
    if len(attention.shapes) != num_layers:
        raise NotServable(
            f"{kind(model)}: {len(attention.shapes)} of its {num_layers} layers look their attention "
            "up by name: such models can be compressed and merged, not served"
        )


def max_positions(config: Any) -> int:
    """Return the longest context, in tokens, of a mixed batch.

    LongRoPE rotates all positions of a batch by one set of factors, which depends on the longest sequence. Contexts end
    where the factors would change.
    """
    longest = int(getattr(config, "max_position_embeddings", 0) or 2048)
    lengths = [one.get("original_max_position_embeddings") or longest for one in _ropes(config, "longrope")]
    return min(longest, *map(int, lengths)) if lengths else longest


def position_limit(model: PreTrainedModel) -> int | None:
    """Return the tokens of the longest context that a variant may have; None where rotations are computed for any."""
    config = model.config.get_text_config()
    is_rotary = any(hasattr(module, "inv_freq") for module in model.modules())
    return None if is_rotary and has_any_length(config) else max_positions(config)


def has_any_length(config: Any) -> bool:
    """True if a model rotates positions, and in a way that does not depend on the length of a context."""
    return bool(getattr(config, "rope_parameters", None)) and not _ropes(config, "longrope", "dynamic")


def _ropes(config: Any, *kinds: str) -> list[Mapping[str, Any]]:
    """Return the rope parameters of these kinds; some models have several, by type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = (rope, *(part for part in rope.values() if isinstance(part, dict)))
    return [one for one in ropes if one.get("rope_type") in kinds]
