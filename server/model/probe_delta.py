"""The random delta of the start-up probe: a delta of every matrix and norm of a model. Knows no runs and no errors.

Its signs are outer products, so the reference applies it with two vectors per matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from deltastore.base.base import Base
from deltastore.format.signs import pack_signs
from server.deltas.norm import is_norm
from server.deltas.resident import MatrixView, PlaneView, ResidentDelta, Slot
from server.model.reference import RankOneDelta

# Size of the probe's delta, in units of each weight's standard deviation.
DELTA_SHARE = 0.5
# Standard deviation of the change of norm weights, which are around one, or around zero in ``1 + w`` forms.
NORM_SHIFT = 0.25
# Rows of a weight that its standard deviation is estimated from, and the value for a weight of zeros.
STD_ROWS = 64
ZERO_STD = 0.02


@dataclass(frozen=True, slots=True, eq=False)
class ProbeDelta:
    """One random delta of a whole model, as layers and as the reference take it."""

    resident: ResidentDelta
    by_address: Mapping[int, RankOneDelta]  # by the address of the weight
    norms: Mapping[nn.Module, Mapping[str, Tensor]]  # values of each norm's parameters, by name


def draw_delta(model: PreTrainedModel, base: Base) -> ProbeDelta:
    """Draw a delta of every matrix and norm of a model without hooks, with a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    output_head = model.get_output_embeddings()
    matrices: dict[str, MatrixView] = {}
    by_address: dict[int, RankOneDelta] = {}
    norms: dict[nn.Module, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    signs: dict[torch.Size, _OuterSigns] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and module.weight.data_ptr() not in by_address:
            weight = module.weight
            if weight.shape not in signs:
                signs[weight.shape] = _OuterSigns.drawn(weight.shape, generator, weight.device)
            stored = base.head or f"{name}.weight" if module is output_head else f"{name}.weight"
            matrices[stored], by_address[weight.data_ptr()] = signs[weight.shape].delta_of(weight, generator)
        elif is_norm(module):
            norms[module] = {
                key: value + NORM_SHIFT * torch.randn(value.shape, generator=generator).to(value)
                for key, value in module.named_parameters(recurse=False)
            }
            whole |= {f"{name}.{key}": value for key, value in norms[module].items()}
    slot = Slot(0, torch.empty(0, dtype=torch.uint8, device=model.device))
    delta = ResidentDelta("", base.head is None, base.head or "", matrices, whole, slot, 0)
    return ProbeDelta(delta, by_address, norms)


@dataclass(frozen=True, slots=True, eq=False)
class _OuterSigns:
    """Signs ``a_i b_j`` for all matrices of one shape, each with factors of its own."""

    packed: Tensor  # [out, ceil(in / 8)] uint8
    a: Tensor  # [out] float32, each -1 or 1
    b: Tensor  # [in] float32, each -1 or 1

    @classmethod
    def drawn(cls, shape: torch.Size, generator: torch.Generator, device: torch.device) -> _OuterSigns:
        a, b = (torch.rand(size, generator=generator) < 0.5 for size in shape)
        rows = pack_signs(torch.stack([~b, b])).to(device)
        return cls(rows[a.long().to(device)], *((2.0 * side.float() - 1).to(device) for side in (a, b)))

    def delta_of(self, weight: Tensor, generator: torch.Generator) -> tuple[MatrixView, RankOneDelta]:
        """Return a delta of random factors in proportion to the weight, as layers and as the reference take it."""
        std = float(weight[:: max(1, len(weight) // STD_ROWS)].float().std()) or ZERO_STD
        spread_out, spread_in = (
            (0.5 + torch.rand(side.shape, generator=generator)).to(side) for side in (self.a, self.b)
        )
        factor_out = DELTA_SHARE * std * spread_out
        plane = PlaneView(self.packed, factor_out, spread_in)
        return MatrixView((plane,), None, None, None), RankOneDelta(factor_out * self.a, spread_in * self.b)
