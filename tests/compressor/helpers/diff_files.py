"""Make files in the formats of BitDelta and of the paper's code from tiny pairs, and compute their weights.

Written from the formulas, without the importer: words of 32 inputs, W = base + coeff * sign.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.tiny_models import Change, TinyModels, make_pair

BITS = torch.arange(32)[None, :, None]
SINGLE = "model.safetensors"


def make_packable(
    architecture: str, directory: Path, *changes: Change, dtype: torch.dtype = torch.float32, **config: Any
) -> TinyModels:
    """Make a pair whose linear layers have a multiple of 32 inputs, as the packing requires."""
    return make_pair(
        architecture, directory, changes=changes or (Change(),), dtype=dtype, intermediate_size=96, **config
    )


def bitdelta(models: TinyModels, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """BitDelta without its training: coefficients are mean |delta|; all that is no linear layer of a block is whole."""
    content: dict[str, Tensor] = {}
    for name, (base, finetune) in _pairs(models).items():
        if not is_linear(name, finetune):
            content[name] = torch.nn.Parameter(finetune)
            continue
        delta, module = finetune.float() - base.float(), name.removesuffix(".weight")
        content[f"{module}.mask"] = packed(delta >= 0)
        content[f"{module}.coeff"] = torch.nn.Parameter(delta.abs().mean().to(dtype))
    return content


def per_axis(models: TinyModels, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The paper's without its training: attention by column (one per output), the MLP by row (one per input)."""
    content: dict[str, Tensor] = {}
    for name, (base, finetune) in _pairs(models).items():
        if not is_linear(name, finetune):
            content[name] = finetune
            continue
        delta, module = finetune.float() - base.float(), name.removesuffix(".weight")
        axis, dim = ("row", 0) if ".mlp." in name else ("col", 1)
        content[f"{module}.mask_{axis}"] = packed(delta >= 0)
        content[f"{module}.coeff_{axis}"] = delta.abs().mean(dim).to(dtype)
    return content


def loaded(base: Path, content: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The base with the file's delta added in the base's dtype, and its whole parameters in that dtype."""
    weights = load_file(base / SINGLE)
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if name in content:
            weights[name] = content[name].detach().to(weight.dtype)
        elif f"{module}.mask" in content:
            delta = unpacked(content[f"{module}.mask"]) * content[f"{module}.coeff"].detach()
            weights[name] = weight + delta.to(weight.dtype)
        elif f"{module}.mask_row" in content:
            delta = unpacked(content[f"{module}.mask_row"]) * content[f"{module}.coeff_row"].float()[None, :]
            weights[name] = weight + delta.to(weight.dtype)
        elif f"{module}.mask_col" in content:
            delta = unpacked(content[f"{module}.mask_col"]) * content[f"{module}.coeff_col"].float()[:, None]
            weights[name] = weight + delta.to(weight.dtype)
    return weights


def packed(positive: Tensor) -> Tensor:  # [out, in] bool -> [in / 32, out] int32
    words = positive.T.reshape(-1, 32, len(positive)).long() << BITS
    return words.sum(1).to(torch.int32)


def unpacked(mask: Tensor) -> Tensor:  # [in / 32, out] int32 -> [out, in] of -1 and +1
    bits = mask[:, None, :].long() >> BITS & 1
    return (2 * bits - 1).reshape(-1, mask.shape[1]).T.float()


def is_linear(name: str, tensor: Tensor) -> bool:
    """True for the layers that BitDelta codes: the linear layers of attention and MLP."""
    return tensor.dim() == 2 and (".self_attn." in name or ".mlp." in name)


def _pairs(models: TinyModels) -> dict[str, tuple[Tensor, Tensor]]:
    base, finetune = load_file(models.base / SINGLE), load_file(models.finetunes[0] / SINGLE)
    return {name: (base.get(name, tensor), tensor) for name, tensor in finetune.items()}
