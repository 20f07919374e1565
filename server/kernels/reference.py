"""The products in plain torch: the oracle of every kernel, and what runs where no faster one exists. Any device."""

from __future__ import annotations

import torch
from torch import Tensor


def onebit_matmul(
    x: Tensor,  # [rows, in], any float dtype
    signs: Tensor,  # [out, ceil(in / 8)] uint8; a set bit is +1
    factor_out: Tensor,  # [out] float32
    factor_in: Tensor | None,  # [in] float32
) -> Tensor:  # [rows, out] float32
    """``factor_out * (B @ (factor_in * x))`` through an unpacked copy of the signs."""
    inputs = x.float() if factor_in is None else x.float() * factor_in
    return inputs @ _unpack(signs, x.shape[-1]).T * factor_out


def onebit_rows(
    ids: Tensor,  # [rows] int64, each a row of `signs`
    signs: Tensor,  # [num, ceil(in / 8)] uint8
    factor_out: Tensor,  # [num] float32
    factor_in: Tensor | None,  # [in] float32
    in_features: int,
) -> Tensor:  # [rows, in] float32
    """What one delta adds to embedding rows, in the order of operations of `OneBit.dense`."""
    delta = _unpack(signs[ids], in_features) * factor_out[ids, None]
    return delta if factor_in is None else delta * factor_in


def _unpack(packed: Tensor, in_features: int) -> Tensor:
    """Signs as float32, [rows, in]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed[:, :, None] >> shifts & 1).flatten(1)[:, :in_features]
    return bits.float().mul_(2).sub_(1)
